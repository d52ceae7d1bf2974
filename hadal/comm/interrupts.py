"""Exchanges between ranks that an interrupt (Ctrl-C, `SystemExit`) has cut short on this rank.

Ranks match most messages by their order. A rank that was interrupted between two of them does not
know which ones the others expect, so it refuses to go on, in place of waiting for them.

Tests: tests/zero/test_interrupts.py
"""

from __future__ import annotations

import weakref
from contextlib import ContextDecorator
from types import TracebackType

import torch.distributed as dist

from hadal.errors import CommunicationError

# The world whose messages were cut short, and the interrupt.
_cut: tuple[weakref.ref[dist.ProcessGroup], str] | None = None


class _InStep(ContextDecorator):
    """A block, or a function, after which other ranks rely on all of its messages.

    Exceptions of the other kind, `Exception`, are handled where they are raised.
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
        world = dist.group.WORLD
        if error is None or isinstance(error, Exception) or world is None or world.size() == 1:
            return
        if not is_cut_short():
            _cut = weakref.ref(world), type(error).__name__


in_step = _InStep()


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
