"""Works under way: their names in errors and for the watchdog, and interrupts of them.

All ranks of a group begin its collectives in one order, so a number names the same one on all of
them. An accelerator's host waits for no collective, only its stream does: an event behind each
shows which are over.

Ranks match most messages by their order. A rank that an interrupt (Ctrl-C, `SystemExit`) has
stopped between two of them does not know which ones the others expect, so it refuses to go on, in
place of waiting for them.
"""

from __future__ import annotations

import re
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hadal.comm.comms_log import numbers_of
from hadal.comm.start import get_rank
from hadal.device import Event, is_capturing, keep_for_current
from hadal.errors import CommunicationError

# ---- interrupts of exchanges ---------------------------------------------------------------------

# The world whose messages were cut short, and the interrupt.
_cut: tuple[weakref.ref[dist.ProcessGroup], str] | None = None


class _InStep(ContextDecorator):
    """A block, or a function, of whose messages other ranks need all.

    It looks for interrupts; other exceptions are handled where they are raised.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        global _cut
        if error is None or (isinstance(error, Exception) and not is_from_a_signal(error)):
            return
        world = dist.group.WORLD
        if world is None or world.size() == 1:
            return
        if not is_cut_short():
            _cut = weakref.ref(world), type(error).__name__


in_step = _InStep()


def is_from_a_signal(error: BaseException) -> bool:
    """Return True if a signal's handler raised an error, whatever the program was doing."""
    numbers = (one for one in signal.valid_signals() if isinstance(one, signal.Signals))
    handlers = (getattr(signal.getsignal(one), "__code__", None) for one in numbers)
    codes, trace = {code for code in handlers if code is not None}, error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


def is_cut_short() -> bool:
    """Return True if an interrupt has cut an exchange short since the ranks came together."""
    return _cut is not None and _cut[0]() is dist.group.WORLD


def expect_in_step() -> None:
    """Raise an error if an interrupt has cut an exchange short.

    Raises:
        CommunicationError: it has; the message names it.
    """
    if _cut is not None and is_cut_short():
        raise CommunicationError(
            f"rank {dist.get_rank()} cannot train or save any more: {_cut[1]} interrupted it in an"
            " exchange with other ranks, which may wait for the rest of it. End the program on"
            " every rank, and resume from the last checkpoint. checkpoint.on_signal saves at the"
            ' end of an update instead (at Ctrl-C with "signals": ["SIGINT"])'
        )


# ---- works ---------------------------------------------------------------------------------------

# Collectives under way that are remembered: far more than an accelerator has queued.
_MOST = 4096


class Work(Protocol):
    """A call under way."""

    def wait(self) -> Any:
        """Wait for its end."""


# Errors of backends by their words, in this order.
_TOOK_TOO_LONG = re.compile(r"tim(e|ed) ?out|no route|unreachable", re.IGNORECASE)
_IS_GONE = re.compile(
    r"closed by|reset by|broken pipe|socket closed|remote process exited", re.IGNORECASE
)
_IS_ELSEWHERE = re.compile(r"were sent where|came in place of|did not expect")

last_places: dict[int, tuple[str, float]] = {}
"""The places of other ranks as the watchdog last heard of them, and when (`time.monotonic`)."""


def failure(
    label: str, error: Exception, other: int | None = None, what: str = ""
) -> CommunicationError:
    """Return the exception to raise if the backend reports `error` in the collective `label`.

    `other` is the rank at the other end, if it is known, and `what` describes the message.
    """
    me, whom, text = get_rank(), "another rank" if other is None else f"rank {other}", str(error)
    they = whom[0].upper() + whom[1:]
    where = f"{label} ({what})" if what else label
    if _IS_ELSEWHERE.search(text):
        return CommunicationError(
            f"rank {me} and {whom} are out of step in {where}: {text}. Their programs differ, or"
            " an exception (Ctrl-C, a signal) has interrupted one of them between two messages."
            " End the program on every rank, and resume from the last checkpoint."
        )
    if _TOOK_TOO_LONG.search(text):
        return CommunicationError(
            f"rank {me} waited in vain for {whom} in {where}: {text}. {they} waits elsewhere,"
            f" hangs, or cannot be reached over the network{_last_seen(other)}."
        )
    if _IS_GONE.search(text):
        return CommunicationError(
            f"rank {me} lost {whom} in {where}: {text}. {they} died (see its own message), or"
            " ended after fewer steps (uneven data?)."
        )
    with_ = "" if other is None else f", with {whom}"
    return CommunicationError(f"{where} failed on rank {me}{with_}: {text}")


def _last_seen(other: int | None) -> str:
    places = last_places if other is None else {r: p for r, p in last_places.items() if r == other}
    now = time.monotonic()
    return "".join(f"; {now - at:.0f} s ago {text}" for text, at in places.values())


class NamedWork(dist.Work):
    """A work of torch's that names itself if it fails."""

    def __init__(
        self,
        work: dist.Work,
        failed: Callable[[Exception], Exception],
        ended: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._work = work
        self._failed = failed
        self._ended = ended
        self._acts: list[Callable[[], None]] = []
        if ended is not None:
            call_at_end(work, ended)

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` after the first wait."""
        self._acts.append(act)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; on an accelerator its stream does, not the host.

        Raises:
            CommunicationError: it failed, or did not end in time.
        """
        try:
            is_over = self._work.wait() if timeout is None else self._work.wait(timeout)
        except (RuntimeError, dist.DistError) as error:
            if is_from_a_signal(error):
                raise
            raise self._failed(error) from error
        if self._ended is not None:
            self._ended()
        acts, self._acts = self._acts, []
        for act in acts:
            act()
        return bool(is_over)

    def synchronize(self) -> None:
        """Make the current stream wait for it."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if it has ended."""
        return bool(self._work.is_completed())

    def result(self) -> list[Tensor]:
        """Return the tensors that it fills."""
        found: list[Tensor] = self._work.result()
        return found

    def source_rank(self) -> int:
        """Return the sender of a receive from any rank."""
        return int(self._work.source_rank())

    def get_future(self) -> Future[Any]:
        """Return torch's future of its end."""
        return self._work.get_future()


def call_at_end(work: dist.Work, ended: Callable[[], None]) -> None:
    """Call `ended` when a work has ended, if torch reports that.

    On an accelerator call it at once, inside a stream that waits for the work.
    """
    try:
        future = work.get_future()
    except RuntimeError:
        return  # gloo's sends and reduce-scatters have none: the wait reports the end
    future.add_done_callback(lambda _: ended())


@dataclass(slots=True, eq=False)
class PairMessage:
    """One send or receive under way, the rank at its other end, and a callback for its end."""

    work: Work
    other: int
    ended: Callable[[], None] | None = None
    is_over: bool = False

    def wait(self) -> None:
        """Wait for its end."""
        if self.is_over:
            return  # a wait that was interrupted begins anew, and gloo's end only once
        self.work.wait()
        self.is_over = True
        if self.ended is not None:
            self.ended()


class Begun(NamedTuple):
    """A collective that this rank has begun."""

    group: str
    number: int
    label: str
    ranks: tuple[int, ...]


# The last one of each group, by its name.
last_begun: dict[str, Begun] = {}
_queued: deque[tuple[Begun, Event]] = deque(maxlen=_MOST)


def begin(group: dist.ProcessGroup | None, label: str) -> Begun:
    """Count a collective of a group (None: of the world)."""
    group = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    name = "" if group is None else group.group_name
    before = last_begun.get(name)
    ranks = numbers_of(group) if before is None else before.ranks
    number = 1 if before is None else before.number + 1
    begun = last_begun[name] = Begun(name, number, label, ranks)
    return begun


Used = list[weakref.ref[Tensor]]
"""The tensors of a call, until the first wait. The backend keeps those alive that it needs."""


def keep_all(used: Used) -> None:
    """Let the memory of tensors wait, when it is freed, for the stream that has waited for them.

    Backends keep it only until the wait, which may be in another stream than the one that the
    memory was allocated in.
    """
    while used:
        tensor = used.pop()()
        if tensor is not None:
            keep_for_current(tensor)


@dataclass(slots=True, eq=False)
class Queued:
    """A work, and the collective that it belongs to."""

    work: Work
    begun: Begun
    device: torch.device
    used: Used

    def wait(self) -> Any:
        """Wait for its end: on an accelerator its stream does."""
        found = self.work.wait()
        keep_all(self.used)
        if self.device.type != "cpu" and not is_capturing(self.device):
            while _queued and _queued[0][1].is_over:
                _queued.popleft()
            stream = torch.accelerator.current_stream(self.device)
            _queued.append((self.begun, Event(stream.record_event(), self.device)))
        return found


def unfinished() -> Begun | None:
    """Return the first collective that the device still waits for."""
    return next((begun for begun, event in tuple(_queued) if not event.is_over), None)


def missing_rank(works: Sequence[object]) -> int | None:
    """Return the world's number of the missing rank, if the awaited work knows it."""
    # Waits go in order, so the first one that is not over is the one that hangs.
    messages = (work for work in works if isinstance(work, PairMessage))
    return next((message.other for message in messages if not message.is_over), None)


def collective_of(works: Sequence[object]) -> Begun | None:
    """Return the collective that is waited for, if the awaited work knows it."""
    found = (work.begun if isinstance(work, Queued) else work for work in works)
    return next((one for one in found if isinstance(one, Begun)), None)
