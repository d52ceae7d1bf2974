"""The start and end of each recomputed block: device synchronization and timing."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hadal.device import Stamp, at_end_of_backward, graph_task, synchronize

_log = logging.getLogger(__name__)


class Boundaries:
    """Calls before and after the forward and backward of each recomputed block."""

    def __init__(self, *, synchronizes: bool, profiles: bool) -> None:
        self._synchronizes = synchronizes
        self._profiles = profiles
        self._blocks: weakref.WeakSet[BlockBoundaries] = weakref.WeakSet()
        self._spans: list[tuple[str, int, Stamp, Stamp]] = []
        self._number = 0
        self._task = -1

    def block(self, inputs: list[Tensor]) -> BlockBoundaries | None:
        """Return the boundaries of another block, or None if nothing happens at them."""
        if not (self._synchronizes or self._profiles) or not inputs:
            return None
        self._number += 1
        return BlockBoundaries(self, self._number, inputs[0].device)

    def reach(self, device: torch.device) -> Stamp:
        """Pass a boundary; return its time."""
        if self._synchronizes:
            synchronize(device, "the boundary of a recomputed block")
        return Stamp(device)

    def add(self, name: str, number: int, begun: Stamp, ended: Stamp) -> None:
        """Record the time of a block's forward or backward, if times are logged."""
        if self._profiles:
            self._spans.append((name, number, begun, ended))

    def report_at_end(self) -> None:
        """Log the times at the end of the running backward."""
        if self._profiles and self._task != graph_task():
            self._task = graph_task()
            at_end_of_backward(self.report)

    def report(self) -> None:
        """Log the times so far; waits for the device."""
        spans, self._spans = self._spans, []
        self._number, self._task = 0, -1
        for name, number, begun, ended in spans:
            if not ended.is_reached:
                synchronize(torch.accelerator.current_accelerator() or torch.device("cpu"))
            milliseconds = ended.seconds_since(begun) * 1000
            _log.info("recomputed block %d: %s %.3f ms", number, name, milliseconds)


class BlockBoundaries:
    """The boundaries of one recomputed block."""

    def __init__(self, home: Boundaries, number: int, device: torch.device) -> None:
        self._home = home
        self._number = number
        self._device = device
        self._begun: Stamp | None = None
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap the block's forward."""
        begun = self._home.reach(self._device)
        yield
        self._home.add("fwd", self._number, begun, self._home.reach(self._device))

    def begin_backward(self) -> None:
        """Begin the block's backward, whose first part is the recomputation."""
        self._begun = self._home.reach(self._device)
        self._home.report_at_end()

    def end_at(self, inputs: Sequence[Tensor]) -> None:
        """Let the first complete gradient of an input end the block's backward.

        A node of the graph would do so too, but gradients of an input that other blocks use as well
        would then be summed in another order.
        """
        for tensor in inputs:
            if tensor.requires_grad:
                hook = tensor.register_hook(self._end)
                if tensor.is_leaf:  # it outlives the graph
                    self._hooks.append(hook)

    def _end(self, _: Tensor) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            self._home.add("backward", self._number, begun, self._home.reach(self._device))
        while self._hooks:
            self._hooks.pop().remove()
