"""Tells who waits too long for whom: a hang that says where it is.

One daemon thread looks at the waits that have begun and not ended. A wait costs an append to a
list and a removal. Which rank is missing is known where messages go from rank to rank; of other
collectives the thread asks the other ranks' (see `progress.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch.distributed as dist

from hadal.comm.progress import Begun, Inquiry, Queued, unfinished
from hadal.comm.start import get_rank, watchdog_limit
from hadal.device import watch_waits

_log = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 15.0
_LAST_LOOK_S = 2.0


class _Waitable(Protocol):
    def wait(self) -> object: ...


class Letter:
    """One send or receive under way, the rank at its other end, and whom to tell of its end."""

    __slots__ = ("_ended", "_work", "is_over", "other")

    def __init__(
        self, work: _Waitable, other: int, ended: Callable[[], None] | None = None
    ) -> None:
        self._work = work
        self._ended = ended
        self.other = other
        self.is_over = False

    def wait(self) -> None:
        """Wait for its end."""
        self._work.wait()
        self.is_over = True
        if self._ended is not None:
            self._ended()


def missing_rank(works: Sequence[object]) -> int | None:
    """The number in the world of the rank that has not come, where what is waited for tells it."""
    # They are waited for in their order, so the first that is not over is the one that hangs.
    letters = (work for work in works if isinstance(work, Letter))
    return next((letter.other for letter in letters if not letter.is_over), None)


def collective_of(works: Sequence[object]) -> Begun | None:
    """The collective that is waited for, where what is waited for tells it."""
    found = (work.begun if isinstance(work, Queued) else work for work in works)
    return next((one for one in found if isinstance(one, Begun)), None)


class Wait:
    """A wait that has begun: what for, since when, and when it is worth a line next."""

    __slots__ = ("label", "since", "told_at", "works")

    def __init__(self, label: str, works: Sequence[object], now: float) -> None:
        self.label = label
        self.works = works
        self.since = now
        self.told_at = 0.0

    def is_due(self, now: float, limit: float) -> bool:
        """Whether to tell of it: at the limit, at twice the limit, at four times, and so on."""
        return now - self.since >= max(limit, 2 * self.told_at)

    @property
    def collective(self) -> Begun | None:
        """The collective that must end first: on an accelerator the first one in its queue."""
        return collective_of(self.works) or unfinished()

    def tell(self, now: float) -> str:
        """The line that says what is waited for; who is missing, where that is known."""
        self.told_at = now - self.since
        missing = missing_rank(self.works)
        first = None if missing is not None or self.works else unfinished()
        behind = "" if first is None else f" behind {first.label}"
        who = "another rank" if missing is None else f"rank {missing}"
        return (
            f"rank {get_rank()} has waited {self.told_at:.0f} s for {self.label}{behind}: {who} has"
            " not come. It died, hangs, or runs another program: look at its log and its stack."
            " (HADAL_WATCHDOG_S sets after how many seconds this is told; 0: never)"
        )


class Watchdog:
    """Looks at all waits of this process, and tells of those longer than `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._waits: list[Wait] = []
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._inquiry: tuple[dist.ProcessGroup, Inquiry] | None = None

    @contextmanager
    def over(self, label: str, works: Sequence[object] = ()) -> Iterator[None]:
        """Around one wait."""
        if not self._limit:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="hadal-watchdog", daemon=True)
            self._thread.start()
            atexit.register(self.stop)
        wait = Wait(label, works, time.monotonic())
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def _look(self) -> None:
        pause = min(self._limit / 4, _LONGEST_SLEEP_S)
        while not self._is_over.wait(pause):
            asked = self._tell(time.monotonic())
            # The store may be gone with rank 0, and a group end at any time.
            with contextlib.suppress(RuntimeError, ValueError):
                self._inquire(asked, 2 * pause)

    def _tell(self, now: float) -> list[Begun]:
        """Tell of the long ones. While `_look` sleeps it holds no wait, nor its tensors."""
        unknown = []
        for wait in tuple(self._waits):
            if wait.is_due(now, self._limit):
                _log.warning("%s", wait.tell(now))
                if missing_rank(wait.works) is None and (begun := wait.collective) is not None:
                    unknown.append(begun)
        return unknown

    def _inquire(self, unknown: list[Begun], patience: float) -> None:
        """Answer other ranks' watchdogs, and ask them who is behind."""
        world = dist.group.WORLD
        if world is None or world.size() == 1 or not hasattr(world, "get_group_store"):
            return
        if self._inquiry is None or self._inquiry[0] is not world:
            self._inquiry = world, Inquiry(world)
        self._inquiry[1].answer()
        for begun in dict.fromkeys(unknown):
            _log.warning("rank %d: %s", get_rank(), self._inquiry[1].ask(begun, patience))

    def stop(self) -> None:
        """End the thread: one that asks a store while the interpreter ends would abort it."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_LAST_LOOK_S)


_watchdog: Watchdog | None = None


def watched(label: str, works: Sequence[object] = ()) -> AbstractContextManager[None]:
    """A context around one wait of this process for others."""
    global _watchdog
    if _watchdog is None:
        _watchdog = Watchdog(watchdog_limit())
    return _watchdog.over(label, works)


watch_waits(watched)  # those of the host for its accelerator too
