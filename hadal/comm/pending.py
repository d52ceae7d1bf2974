"""Collectives under way: in phases, each of which may do arithmetic and start the next."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hadal.comm.watchdog import watched
from hadal.comm.works import Work, failure, in_step, is_from_a_signal, missing_rank
from hadal.device import StreamPurpose, side_stream
from hadal.errors import CommunicationError


class Pending:
    """A started collective: works to wait for, and follow-ups to run after them, in order.

    A follow-up computes, or starts another collective; `wait` waits for its works before it runs
    the next follow-up.
    """

    def __init__(
        self, label: str, works: Sequence[Work] = (), act: Callable[[], object] | None = None
    ) -> None:
        self.label = label
        self.works = works
        self.done = False
        self.phases = 0
        """The number of its phases that were waited for."""
        self._acts = deque(() if act is None else (act,))

    def then(self, act: Callable[[], object]) -> Pending:
        """Call `act` after all that is under way; a Pending that it returns comes next."""
        self._acts.append(act)
        self.done = False
        return self

    def advance(self) -> None:
        """Wait for the current works, and run follow-ups up to the next collective."""
        if self.done:
            return
        try:
            with watched(self.label, self.works):
                for work in self.works:
                    work.wait()
        except CommunicationError:
            raise  # it names itself
        except (RuntimeError, dist.DistError) as error:
            if is_from_a_signal(error):
                raise
            raise failure(self.label, error, missing_rank(self.works)) from error
        self.phases += 1
        self._go_on()

    @in_step
    def _go_on(self) -> None:
        while self._acts:
            following = self._acts.popleft()()
            if isinstance(following, Pending) and not following.done:
                self.works = following.works
                self._acts.extendleft(reversed(following._acts))
                return
        self.works, self.done = (), True

    def wait(self) -> None:
        """Wait until all is done."""
        while not self.done:
            self.advance()


class UnreadSends:
    """Sends that other ranks have not yet read from this rank's memory while it continues.

    At most `limit` bytes are kept for them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left: deque[tuple[Pending, int]] = deque()

    def add(self, pending: Pending, nbytes: int) -> None:
        """Let `pending`, which keeps so many bytes, end by itself; wait if room is short."""
        if not pending.done:
            self._left.append((pending, nbytes))
        self._end(self._limit)

    def wait(self) -> None:
        """Wait until all is sent."""
        self._end(0)

    def _end(self, limit: int) -> None:
        while sum(nbytes for _, nbytes in self._left) > limit:
            self._left[0][0].wait()
            self._left.popleft()


class _Ahead(threading.Thread):
    """A thread that makes one call, whose end can be waited for."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Make the call."""
        try:
            self._act()
        except BaseException as error:
            # Of any type: `wait` raises it.
            self._error = error

    def wait(self) -> None:
        """Wait for the end, and raise the call's exception."""
        self.join()
        if self._error is not None:
            raise self._error


def finished(label: str) -> Pending:
    """Return a collective that needed no rank but this one."""
    pending = Pending(label)
    pending.done = True
    return pending


# Whether the latest relayed collective has begun: they begin in the order of their calls, which is
# the same on all ranks.
_begun = threading.Event()
_begun.set()


def relayed(first: Pending, start: Callable[[], Pending], device: torch.device) -> Pending:
    """Start another collective as soon as `first` is over, not only at a wait for it.

    On a host other ranks may wait for the second one before this one does, so a thread starts it.
    On an accelerator a side stream starts it, and no other work of the device waits for `first`.
    """
    global _begun
    if device.type != "cpu":
        with side_stream(StreamPurpose.RELAY, device).current():
            first.wait()
            return start()
    before, begun = _begun, threading.Event()
    _begun = begun

    def go() -> None:
        try:
            first.wait()
            before.wait()
            second = start()
        finally:
            begun.set()
        second.wait()

    return Pending(first.label, [_Ahead(go)])
