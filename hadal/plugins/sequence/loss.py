"""Losses of whole sequences whose positions are split over ranks.

The engine sums the gradients of all ranks of a sequence. A loss here has the value of the whole on
every rank, and the gradient of this rank's part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hadal.comm.functions import all_reduce, labelled
from hadal.plugins.sequence.cross_entropy import vocab_parallel_cross_entropy
from hadal.plugins.sequence.tiles import IGNORED

_LABEL = "the sum of the loss of a whole sequence"
# Nodes of autograd's graph to examine: a loss from all ranks' parts is near its end.
_NODES = 256


def sequence_loss(
    logits: Tensor,
    shift_labels: Tensor,
    group: dist.ProcessGroup,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Return the mean cross entropy over all targets of whole sequences.

    Args:
        logits: [batch, length / ranks, vocabulary], of this rank's positions.
        shift_labels: [batch, length / ranks]: each position's next token.
        group: the ranks that share the sequences.
        ignore_index: a target that does not count.

    Returns:
        The loss, the same on every rank; 0 if no target counts.
    """
    losses = vocab_parallel_cross_entropy(logits, shift_labels, ignore_index=ignore_index)
    return mean_over_sequence(losses.sum(), (shift_labels != ignore_index).sum(), group)


def mean_over_sequence(total: Tensor, count: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' totals over the sum of their counts; 0 if they have none."""
    counts = count.detach().clone()
    labelled(_LABEL, all_reduce, counts, group=group)
    return whole_value(total / counts.clamp(min=1), group)


def whole_value(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' parts, with the gradient of this rank's part."""
    found: Tensor = _WholeValue.apply(part, group)  # type: ignore[no-untyped-call]
    return found


def as_parts(loss: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a loss whose gradient is that of this rank's part of it.

    A loss built with `torch.distributed.nn.functional.all_gather`, as in transformers, has the
    gradients of all ranks' copies of it: that of the part, times the number of ranks.
    """
    if not _gathers(loss, group):
        return loss
    shared: Tensor = _ShareOfGradient.apply(loss, dist.get_world_size(group))  # type: ignore[no-untyped-call]
    return shared


def _gathers(loss: Tensor, group: dist.ProcessGroup) -> bool:
    """Return True if the last steps of a loss gather it over a group, differentiably."""
    nodes, seen = [loss.grad_fn], 0
    while nodes and seen < _NODES:
        node = nodes.pop(0)
        seen += 1
        if node is None:
            continue
        if type(node).__name__ == "_AllGatherBackward" and getattr(node, "group", None) is group:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


class _WholeValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        labelled(_LABEL, all_reduce, total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _ShareOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
