"""Collectives under way: in phases, each of which may do its arithmetic and start the next."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from hadal.comm.watchdog import missing_rank, watched
from hadal.comm.works import failure
from hadal.device import same_order
from hadal.errors import CommunicationError


class Work(Protocol):
    """One call under way."""

    def wait(self) -> Any:
        """Wait for its end."""


def _nothing() -> None:
    return None


@dataclass
class Pending:
    """A started collective, in one phase or several."""

    label: str
    works: Sequence[Work] = ()
    then: Callable[[], Pending | None] = _nothing
    done: bool = field(default=False, init=False)
    _watch: _Watch | None = field(default=None, init=False)

    def advance(self) -> None:
        """Wait for the present phase, do its arithmetic, and start the next one if there is one."""
        if self.done:
            return
        try:
            with watched(self.label, self.works):
                if self._watch is None:
                    _wait_for(self.works)
                else:
                    self._watch.join()
            following = self.then()
        except CommunicationError:
            raise  # it names itself
        except (RuntimeError, dist.DistError) as error:
            rank = missing_rank(self.works)
            whom = "" if rank is None else f"with rank {rank}"
            raise failure(self.label, error, whom) from error
        self._watch = None
        if following is None:
            self.done = True
            self.works, self.then = (), _nothing
        else:
            self.works, self.then = following.works, following.then

    def arrives_within(self, seconds: float) -> bool:
        """Whether the present phase's values are here within `seconds`.

        For whoever must not wait for a rank that may be waiting for him.
        """
        if self._watch is None:
            self._watch = _Watch(self.works)
        return self._watch.ended.wait(seconds)

    def wait(self) -> None:
        """Wait for all phases."""
        while not self.done:
            self.advance()


class _Watch:
    """A thread that waits for works: gloo's cannot be asked, and can be waited for only once."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.ended = threading.Event()
        self._works = works
        self._in_order = same_order()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            with self._in_order():
                _wait_for(self._works)
        except BaseException as error:
            # Of whatever kind: it is raised where the works are waited for, which would not end.
            self._error = error
        finally:
            self.ended.set()

    def join(self) -> None:
        """Wait for the end, and raise what the works raised."""
        self.ended.wait()
        if self._error is not None:
            raise self._error


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def finished(label: str) -> Pending:
    """A collective that needed no rank but this one."""
    pending = Pending(label)
    pending.done = True
    return pending


def at_end(pending: Pending, act: Callable[[], object]) -> Pending:
    """Let `act` follow the last phase of a collective that is under way."""
    following = pending.then

    def then() -> Pending | None:
        rest = following()
        if rest is not None:
            return at_end(rest, act)
        act()
        return None

    pending.then = then
    return pending


def followed_by(pending: Pending, start: Callable[[], Pending]) -> Pending:
    """Let another collective follow the last phase of one that is under way."""
    following = pending.then

    def then() -> Pending:
        rest = following()
        return start() if rest is None else followed_by(rest, start)

    pending.then = then
    return pending


class _Relay:
    """Starts collectives that follow earlier ones, as soon as these have arrived.

    One thread for all of a process, so that they start in the order in which they were asked for:
    the same on all ranks.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[_Relayed] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="hadal-relay", daemon=True).start()

    def put(self, relayed: _Relayed) -> None:
        self._asked.put(relayed)

    def _run(self) -> None:
        while True:
            self._asked.get().start()


class _Relayed:
    """A collective in two hops, as one call under way."""

    def __init__(self, first: Pending, start: Callable[[], Pending]) -> None:
        self._first = first
        self._start = start
        self._begun = threading.Event()
        self._following: Pending | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        try:
            self._first.wait()
            self._following = self._start()
        except Exception as error:
            # Raised where it is waited for.
            self._error = error
        self._begun.set()

    def wait(self) -> None:
        """Wait for the end of both hops."""
        self._begun.wait()
        if self._error is not None:
            raise self._error
        assert self._following is not None  # it was begun
        self._following.wait()


_relay: _Relay | None = None


def relayed(first: Pending, start: Callable[[], Pending]) -> Pending:
    """Let another collective follow `first` at once, and not where somebody comes to wait for it.

    For ranks that may wait for the second one here before this one does.
    """
    global _relay
    if _relay is None:
        _relay = _Relay()
    work = _Relayed(first, start)
    _relay.put(work)
    return Pending(first.label, [work])
