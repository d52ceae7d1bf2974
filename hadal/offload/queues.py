"""Threads that read and write: each queue has some, and says how much is under way at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Protocol

from hadal.offload.settings import IoSettings


class Call(Protocol):
    """What becomes one system call."""

    @property
    def count(self) -> int:
        """How many blocks it moves."""

    def run(self) -> None:
        """Move them; nothing is raised."""


class Queue:
    """Runs calls in the order in which they come, several at a time.

    The interpreter's lock is free while the system reads and writes. Threads are started when they
    are first needed. They know the queue, not its owner, so that an owner may be collected.
    """

    def __init__(self, settings: IoSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._waiting: deque[Call] = deque()
        self._under_way = 0
        self._lock = threading.Lock()
        self._begun: SimpleQueue[Call | None] = SimpleQueue()
        self._unfinished = 0
        self._threads: list[threading.Thread] = []

    def put(self, calls: Iterable[Call]) -> None:
        """Run these after those that came before."""
        with self._lock:
            self._waiting.extend(calls)
            self._begin()
            self._start_threads()

    @property
    def is_mine(self) -> bool:
        """Whether this is one of the queue's own threads."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """End the threads; nothing is under way any more."""
        for _ in self._threads:
            self._begun.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _begin(self) -> None:
        """Hand as many calls to the threads as may be under way now."""
        if self._under_way and not self._settings.overlaps:
            return
        while self._waiting and self._settings.admits(self._waiting[0].count, self._under_way):
            call = self._waiting.popleft()
            self._under_way += call.count
            self._unfinished += 1
            self._begun.put(call)

    def _start_threads(self) -> None:
        while len(self._threads) < min(self._unfinished, self._settings.workers):
            number = len(self._threads)
            thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # the program is ending: those that are there must do
                self._threads.pop()
                if not self._threads:
                    raise
                return

    def _work(self) -> None:
        while (call := self._begun.get()) is not None:
            call.run()
            with self._lock:
                self._under_way -= call.count
                self._unfinished -= 1
                self._begin()
                self._start_threads()
            del call  # nobody's memory is held while there is nothing to do
