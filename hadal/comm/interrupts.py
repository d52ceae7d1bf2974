"""Exchanges between ranks that an interrupt (Ctrl-C, `SystemExit`) has cut short on this rank.

Ranks match most messages by their order. A rank that was interrupted between two of them does not
know which ones the others expect, so it refuses to go on, in place of waiting for them.
"""

from __future__ import annotations

import signal
import weakref
from contextlib import ContextDecorator
from types import TracebackType

import torch.distributed as dist

from hadal.errors import CommunicationError

# The world whose messages were cut short, and the interrupt.
_cut: tuple[weakref.ref[dist.ProcessGroup], str] | None = None


class _InStep(ContextDecorator):
    """A block, or a function, of whose messages other ranks need all.

    It looks for interrupts; other exceptions are handled where they are raised.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    handlers = (getattr(signal.getsignal(number), "__code__", None) for number in _signals())
    codes, trace = {code for code in handlers if code is not None}, error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


def _signals() -> set[signal.Signals]:
    return {number for number in signal.valid_signals() if isinstance(number, signal.Signals)}


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
