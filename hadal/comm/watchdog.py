"""Warnings about long waits, which name the missing rank of a hang.

One daemon thread checks the waits that have begun and not ended. A wait costs an append to a list
and a removal. If ranks send to each other directly, the missing rank is known, and the thread asks
for its place in the program. For other collectives it requests all ranks' progress. Their threads
answer, through the store of the rendezvous.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hadal.comm.start import get_rank, watchdog_limit
from hadal.comm.works import Begun, collective_of, last_begun, last_places, missing_rank, unfinished
from hadal.device import device_thread, watch_waits

_log = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 15.0
LAST_LOOK_S = 2.0


def start_polling(
    name: str, is_over: threading.Event, poll: Callable[..., None], *given: Any
) -> Callable[[], None]:
    """Start a daemon thread that calls `poll(*given)`, which returns once `is_over` is set.

    Returns:
        A function that ends the thread. It also runs at exit: a thread that queries a store while
        the interpreter shuts down would abort the process.
    """
    thread = device_thread(poll, *given, name=name, daemon=True)
    thread.start()

    def stop() -> None:
        is_over.set()
        thread.join(LAST_LOOK_S)
        atexit.unregister(stop)

    atexit.register(stop)
    return stop


@dataclass(slots=True, eq=False)
class Wait:
    """A wait that has begun: its purpose, its start, and its last report."""

    label: str
    works: Sequence[object]
    since: float
    warned_at: float = 0.0

    def is_due(self, now: float, limit: float) -> bool:
        """Return True if it is to be reported: at the limit, twice the limit, four times, ..."""
        return now - self.since >= max(limit, 2 * self.warned_at)

    @property
    def collective(self) -> Begun | None:
        """The collective that must end first: on an accelerator the first one in its queue."""
        return collective_of(self.works) or unfinished()

    def describe(self, now: float) -> str:
        """Return the line that reports the wait, with the missing rank if that is known."""
        self.warned_at = now - self.since
        missing = missing_rank(self.works)
        first = None if missing is not None or self.works else unfinished()
        behind = "" if first is None else f" behind {first.label}"
        who = "another rank" if missing is None else f"rank {missing}"
        return (
            f"rank {get_rank()} has waited {self.warned_at:.0f} s for {self.label}{behind}: {who}"
            " has not joined. It died, hangs, or runs another program: check its log and its stack."
            " (HADAL_WATCHDOG_S sets the seconds before this warning; 0: never)"
        )


class Inquiry:
    """Questions and answers on how far each rank has come; for the watchdog's thread."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._store = PrefixStore("hadal/progress", world.get_group_store())
        self._rank = dist.get_rank()
        self._answered = 0

    def answer(self) -> None:
        """Publish this rank's progress and place, if a rank has requested them since."""
        asked = self._store.add("asked", 0)
        if asked != self._answered:
            self._answered = asked
            mine = {name: [begun.number, begun.label] for name, begun in last_begun.items()}
            self._store.set(str(self._rank), json.dumps([asked, mine, place_in_program()]))

    def ask(self, question: Begun | int, patience: float) -> str:
        """Report which ranks have not begun a collective, or where a rank is.

        Waits `patience` seconds for answers.
        """
        ranks = [question] if isinstance(question, int) else question.ranks
        found = self._answers([rank for rank in ranks if rank != self._rank], patience)
        now = time.monotonic()
        for rank, answer in found.items():
            if answer is None:
                last_places.pop(rank, None)
            else:
                last_places[rank] = f"rank {rank} was {answer.place}", now
        if isinstance(question, int):
            (one,) = found.values()
            return f"rank {question} " + ("does not answer" if one is None else f"is {one.place}")
        return _compared(question, found)

    def _answers(self, others: Sequence[int], patience: float) -> dict[int, Answer | None]:
        asked, deadline = self._store.add("asked", 1), time.monotonic() + patience
        found: dict[int, Answer | None] = dict.fromkeys(others)
        while not all(found.values()) and time.monotonic() < deadline:
            self.answer()
            time.sleep(patience / 20)
            for rank in others:
                if found[rank] is None and self._store.check([str(rank)]):
                    number, begun, place = json.loads(self._store.get(str(rank)))
                    if number >= asked:
                        found[rank] = Answer(begun, place)
        return found


class Answer(NamedTuple):
    """A rank's last collectives by their group, and its place in the program."""

    begun: dict[str, tuple[int, str]]
    place: str


def place_in_program() -> str:
    """Return the line of the program that the main thread is at, and the function called there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inner: list[FrameType] = []
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _LIBRARIES:
            break
        if not module.endswith(".c10d_logger"):  # wraps torch's collectives
            inner.append(frame)
        frame = frame.f_back
    if frame is None:
        return "in no code of the program"
    at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    if not inner:
        return f"at {at}"
    name = inner[-1].f_code.co_name
    if inner[-1].f_globals["__name__"].startswith("torch.distributed."):
        return f"inside a collective of the program ({name}, called at {at})"
    return f"inside {name}, called at {at}"


_LIBRARIES = sys.stdlib_module_names | {"hadal", "torch"}


def _compared(begun: Begun, found: dict[int, Answer | None]) -> str:
    behind = []
    for rank, answer in found.items():
        if answer is None:
            behind.append(f"rank {rank} does not answer")
            continue
        number, last = answer.begun.get(begun.group, (0, "none"))
        if number < begun.number:
            behind.append(
                f"rank {rank} has begun {number} (the last: {last}), and is {answer.place}"
            )
    where = f"{begun.label} is collective {begun.number} of its group"
    if not behind:
        return (
            f"{where}, and all its ranks have begun it: a device or the network between them hangs"
        )
    return f"{where}: {'; '.join(behind[:8])}" + (f"; {len(behind)} in all" * (len(behind) > 8))


class Watchdog:
    """A thread that looks at all waits of this process, and reports those over `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._waits: list[Wait] = []
        self._stop: Callable[[], None] | None = None
        self._is_over = threading.Event()
        self._inquiry: tuple[dist.ProcessGroup, Inquiry] | None = None

    @contextmanager
    def over(self, label: str, works: Sequence[object] = ()) -> Iterator[None]:
        """Watch one wait, inside the block."""
        if not self._limit:
            yield
            return
        if self._stop is None:
            self._stop = start_polling("hadal-watchdog", self._is_over, self._look)
        wait = Wait(label, works, time.monotonic())
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def _look(self) -> None:
        pause = min(self._limit / 4, _LONGEST_SLEEP_S)
        while not self._is_over.wait(pause):
            asked = self._warn(time.monotonic())
            # The store may be gone with rank 0, and a group end at any time.
            with contextlib.suppress(RuntimeError, ValueError):
                self._inquire(asked, 2 * pause)

    def _warn(self, now: float) -> list[Begun | int]:
        """Report the long ones; return the collective, or the missing rank, to ask about.

        While `_look` sleeps it holds no wait, nor its tensors.
        """
        questions: list[Begun | int] = []
        for wait in tuple(self._waits):
            if wait.is_due(now, self._limit):
                _log.warning("%s", wait.describe(now))
                missing = missing_rank(wait.works)
                question = wait.collective if missing is None else missing
                questions += [] if question is None else [question]
        return questions

    def _inquire(self, questions: list[Begun | int], patience: float) -> None:
        """Answer other ranks' watchdogs, and request their progress."""
        world = dist.group.WORLD
        if world is None or world.size() == 1 or not hasattr(world, "get_group_store"):
            return
        if self._inquiry is None or self._inquiry[0] is not world:
            self._inquiry = world, Inquiry(world)
        self._inquiry[1].answer()
        for question in dict.fromkeys(questions):
            _log.warning("rank %d: %s", get_rank(), self._inquiry[1].ask(question, patience))

    def stop(self) -> None:
        """End the thread."""
        if self._stop is not None:
            self._stop()


_watchdog: Watchdog | None = None


def watched(label: str, works: Sequence[object] = ()) -> AbstractContextManager[None]:
    """Return a context that watches one wait of this process for others."""
    global _watchdog
    if _watchdog is None:
        _watchdog = Watchdog(watchdog_limit())
    return _watchdog.over(label, works)


watch_waits(watched)  # waits of the host for its accelerator too
