"""Losses: cross entropy over large or split vocabularies, and sums over positions on several ranks.

Only a few rows have logits at a time, in fp32. `linear_cross_entropy` computes its gradients in
forward, while these exist: three matrix products as for plain logits, none repeated.

The engine sums the gradients of all ranks of a sequence. A loss of a sequence whose positions are
split over ranks has the value of the whole on every rank, and the gradient of this rank's part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hadal.comm import Ranks
from hadal.comm.adjoint import Way, across, gathered, own, same, summed
from hadal.comm.functions import all_gather_into_tensor, all_reduce, labelled
from hadal.errors import SequenceError, expect_one_of
from hadal.plugins.sequence.tiles import IGNORED, recomputed

Group = dist.ProcessGroup | None
ROWS_NUMEL = 1 << 25
"""Logits that exist at a time: 128 MiB in fp32."""
REDUCTIONS = ("none", "mean", "sum")
_LABEL = "the cross entropy over a split vocabulary"


class _Slice(NamedTuple):
    """This rank's columns of a vocabulary, which may be split unevenly."""

    group: Group
    """The ranks that share the vocabulary; None if it is whole."""
    start: int
    """The first column."""
    rows: int
    """The rows that fill `ROWS_NUMEL` on the rank with most columns: the same on all ranks."""
    total: int
    """All ranks' columns."""


def _slice_of(size: int, group: Group, start: int | None) -> _Slice:
    """Return the slice of `size` columns; all ranks must call it."""
    if group is None:
        if start:
            raise SequenceError(
                f"the slice of the vocabulary begins at {start}, but no group of ranks shares the"
                " rest; pass the group"
            )
        _check_sizes([size])
        return _Slice(None, 0, max(1, ROWS_NUMEL // size), size)
    ranks = Ranks.of(group)
    found = torch.empty(ranks.size, dtype=torch.int64, device="cpu")
    mine = torch.tensor([size], device="cpu")
    labelled(_LABEL, all_gather_into_tensor, found, mine, group=ranks.host_group)
    sizes = found.tolist()
    _check_sizes(sizes)
    first = sum(sizes[: ranks.rank]) if start is None else start
    return _Slice(group, first, max(1, ROWS_NUMEL // max(sizes)), sum(sizes))


def _check_targets(target: Tensor, ignore_index: int, total: int) -> None:
    """Raise an error for targets without a column, except on accelerators, where it would block."""
    if target.is_floating_point() or target.is_complex():
        raise SequenceError(f"targets of {target.dtype}; expected integers, the vocabulary's rows")
    if target.device.type != "cpu":
        return
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= total))]
    if wrong.numel():
        raise SequenceError(
            f"a target is {int(wrong.max())}, in a vocabulary of {total}; expected 0 to"
            f" {total - 1}, or {ignore_index} (ignore_index) for positions that do not count"
        )


def _check_sizes(sizes: list[int]) -> None:
    empty = [rank for rank, size in enumerate(sizes) if not size]
    if empty:
        raise SequenceError(
            f"rank {empty[0]} of {len(sizes)} has no columns of the vocabulary (all ranks:"
            f" {sizes}); give each rank one or more, or share the vocabulary among fewer ranks"
        )


def linear_cross_entropy(  # noqa: PLR0913 - of a layer, a loss and a split
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    rows: int | None = None,
    vocab_group: Group = None,
    vocab_start: int | None = None,
) -> Tensor:
    """Return `cross_entropy(linear(hidden, weight, bias), target)` without the whole logits.

    Args:
        hidden: [..., hidden size].
        weight: [vocabulary, hidden size]; with `vocab_group` this rank's slice of the vocabulary.
        target: [...], integers.
        bias: [vocabulary].
        ignore_index: a target that does not count.
        reduction: "mean" over the targets that count (0 if there are none), "sum", or "none".
        rows: the number of rows with logits at a time; by default as many as fill 128 MiB.
        vocab_group: ranks among which the vocabulary is split, evenly or not.
        vocab_start: the start of this rank's slice; by default slices follow the ranks' order.

    Returns:
        The loss in fp32, without dimensions; with "none" of the shape of `target`.

    Raises:
        SequenceError: shapes do not fit, or the reduction is unknown.
    """
    _check(hidden, weight, bias, target, reduction)
    vocab = _slice_of(weight.shape[0], vocab_group, vocab_start)
    _check_targets(target, ignore_index, vocab.total)
    rows = rows or vocab.rows
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if reduction == "none":
        parts = [
            recomputed(_losses_of_rows, some, weight, bias, goal, ignore_index, vocab)
            for some, goal in zip(flat.split(rows), targets.split(rows), strict=True)
        ]
        return torch.cat(parts).view(target.shape)
    arguments = (flat, weight, bias, targets, ignore_index, rows, vocab)
    total: Tensor = _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    if reduction == "sum":
        return total
    return total / (targets != ignore_index).sum().clamp(min=1)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab_group: Group = None,
    *,
    ignore_index: int = IGNORED,
    reduction: str = "none",
    vocab_start: int | None = None,
) -> Tensor:
    """Return the cross entropy of logits whose vocabulary is split over ranks.

    Args:
        logits: [..., this rank's slice of the vocabulary]; slices may differ in size.
        target: [...], integers in the whole vocabulary.
        vocab_group: the ranks that share the vocabulary; None if it is whole.
        ignore_index: a target that does not count; its loss is 0.
        reduction: "none", "sum", or "mean" over the targets that count.
        vocab_start: the start of this rank's slice; by default slices follow the ranks' order.

    Returns:
        The loss in fp32. Logits are read row by row; no fp32 copy of all of them is made.

    Raises:
        SequenceError: shapes do not fit, or the reduction is unknown.
    """
    expect_one_of(REDUCTIONS, "reduction", reduction, SequenceError)
    if logits.shape[:-1] != target.shape:
        raise SequenceError(
            f"logits of shape {tuple(logits.shape)} need targets of shape"
            f" {tuple(logits.shape[:-1])}, but got {tuple(target.shape)}"
        )
    vocab = _slice_of(logits.shape[-1], vocab_group, vocab_start)
    _check_targets(target, ignore_index, vocab.total)
    flat, targets = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    found: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, targets, ignore_index, vocab.rows, vocab
    )
    return reduce_losses(found.view(target.shape), target, ignore_index, reduction)


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    sp_group: Group,
    tp_group: Group = None,
    *,
    ignore_index: int = IGNORED,
    reduction: str = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
) -> Tensor:
    """Return the loss of whole sequences from logits split along the sequence.

    Each rank's gradient is that of its own positions; as elsewhere, they sum over ranks.

    Args:
        vocab_parallel_logits: [length / ranks, batch, vocabulary], this rank's positions.
        target: [length / ranks, batch].
        sp_group: the ranks that share each sequence, in the order of its positions.
        tp_group: the ranks that share the vocabulary; None if it is whole.
        ignore_index: a target that does not count.
        reduction: "none", "sum", or "mean" over the targets that count.
        gather_sequence_loss: over the whole sequence; otherwise over this rank's positions.
        backend: "torch".

    Returns:
        With "none" [length, batch], or [length / ranks, batch] if it is not gathered.

    Raises:
        SequenceError: shapes do not fit, or the reduction or the backend is unknown.
    """
    if backend != "torch":
        raise SequenceError(f"backend is {backend!r}; only 'torch' is built")
    expect_one_of(REDUCTIONS, "reduction", reduction, SequenceError)
    losses = vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, tp_group, ignore_index=ignore_index
    )
    if not gather_sequence_loss:
        return reduce_losses(losses, target, ignore_index, reduction)
    losses, target = (over_sequence(one, sp_group) for one in (losses, target))
    return reduce_losses(losses, target, ignore_index, reduction)


def over_sequence(values: Tensor, group: Group) -> Tensor:
    """Return values [length, ...] of all ranks' positions; the gradient is that of this rank's."""
    ranks = Ranks.world() if group is None else Ranks.of(group)
    label, sizes = "the gather of the losses of whole sequences", [len(values)] * ranks.size
    return _with_gradient(
        values,
        lambda mine: gathered(mine, 0, sizes, ranks, label),
        lambda gradient: own(gradient, 0, sizes, ranks),
    )


def reduce_losses(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Reduce losses, which are 0 for ignored targets; the mean is over the others."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "mean":
        total = total / (target != ignore_index).sum().clamp(min=1)
    return total


def _check(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str
) -> None:
    expect_one_of(REDUCTIONS, "reduction", reduction, SequenceError)
    fits = weight.dim() == 2 and hidden.dim() and hidden.shape[-1] == weight.shape[1]
    if not fits or hidden.shape[:-1] != target.shape:
        raise SequenceError(
            f"linear_cross_entropy got hidden states {tuple(hidden.shape)}, a weight"
            f" {tuple(weight.shape)} and targets {tuple(target.shape)}; expected [..., size],"
            " [vocabulary, size] and [...]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise SequenceError(
            f"linear_cross_entropy got a bias {tuple(bias.shape)}; expected [{weight.shape[0]}], a"
            " value for each row of the weight"
        )


# ---- arithmetic of a few rows --------------------------------------------------------------------


def _rows_loss(
    logits: Tensor, target: Tensor, ignore_index: int, vocab: _Slice
) -> tuple[Tensor, Tensor]:
    """Return the losses [rows] of fp32 logits, and each row's log of the sum of exponentials."""
    here, counts, place = _placed(logits, target, ignore_index, vocab)
    top = logits.amax(-1)
    if vocab.group is not None:
        labelled(_LABEL, all_reduce, top, dist.ReduceOp.MAX, group=vocab.group)
    exponentials = (logits - top[:, None]).exp().sum(-1)
    chosen = torch.where(here, logits.gather(-1, place[:, None])[:, 0], 0.0)
    if vocab.group is not None:
        both = torch.stack([exponentials, chosen])
        labelled(_LABEL, all_reduce, both, group=vocab.group)
        exponentials, chosen = both
    log_sum = top + exponentials.log()
    return torch.where(counts, log_sum - chosen, 0.0), log_sum


def _rows_gradient(
    logits: Tensor,
    log_sum: Tensor,
    target: Tensor,
    scale: Tensor | None,
    ignore_index: int,
    vocab: _Slice,
) -> Tensor:
    """Turn logits [rows, vocabulary], which are overwritten, into the gradient of their losses."""
    here, counts, place = _placed(logits, target, ignore_index, vocab)
    factor = counts.to(logits.dtype) if scale is None else torch.where(counts, scale, 0.0)
    gradient = logits.sub_(log_sum[:, None]).exp_()
    gradient.scatter_add_(-1, place[:, None], -here[:, None].to(logits.dtype))
    return gradient.mul_(factor[:, None])


def _placed(
    logits: Tensor, target: Tensor, ignore_index: int, vocab: _Slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which targets are in this slice of the vocabulary, which count, and their columns."""
    counts = target != ignore_index
    size = logits.shape[-1]
    column = target - vocab.start
    here = counts & (column >= 0) & (column < size) if vocab.group is not None else counts
    return here, counts, torch.where(here, column, 0)


def _losses_of_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    vocab: _Slice,
) -> Tensor:
    if vocab.group is not None:
        ranks = Ranks.of(vocab.group)
        hidden = across(hidden, same, lambda gradient: summed(gradient, ranks, _LABEL))
    logits = torch.nn.functional.linear(hidden, weight, bias)
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, ignore_index, max(1, logits.shape[0]), vocab
    )
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Losses [rows] from logits [rows, vocabulary], a few rows in fp32 at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, rows: int, vocab: _Slice
    ) -> Tensor:
        found = [
            _rows_loss(_wide(some), goal, ignore_index, vocab)
            for some, goal in zip(logits.split(rows), target.split(rows), strict=True)
        ]
        log_sums = torch.cat([log_sum for _, log_sum in found])
        ctx.save_for_backward(logits, target, log_sums)
        ctx.choices = (ignore_index, rows, vocab)
        return torch.cat([losses for losses, _ in found])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, target, log_sums = ctx.saved_tensors
        ignore_index, rows, vocab = ctx.choices
        result = torch.empty_like(logits)
        parts = (one.split(rows) for one in (logits, log_sums, target, gradient, result))
        for some, log_sum, goal, scale, out in zip(*parts, strict=True):
            wide = _wide(some, copy=True)
            out.copy_(_rows_gradient(wide, log_sum, goal, scale, ignore_index, vocab))
        return result, None, None, None, None


def _wide(logits: Tensor, copy: bool = False) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=copy)


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of losses; gradients are computed in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        rows: int,
        vocab: _Slice,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        by_hidden = torch.empty_like(hidden) if needs_hidden else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        by_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        by_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs_bias else None
        total = hidden.new_zeros((), dtype=wide)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        # Read once, as plain tensors: a parameter's class is consulted at each operation.
        plain = weight.detach().to(dtype)
        added = None if bias is None else bias.detach().to(dtype)
        for start in range(0, hidden.shape[0], rows):
            some, goal = hidden[start : start + rows].to(dtype), target[start : start + rows]
            logits = _wide(torch.nn.functional.linear(some, plain, added))
            losses, log_sum = _rows_loss(logits, goal, ignore_index, vocab)
            total += losses.sum()
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            gradient = _rows_gradient(logits, log_sum, goal, None, ignore_index, vocab)
            if by_bias is not None:
                by_bias += gradient.sum(0)
            narrow = gradient.to(dtype)
            del logits, gradient
            if by_hidden is not None:
                by_hidden[start : start + rows] = narrow @ plain
            if by_weight is not None:
                _add_product(by_weight, narrow.t(), some)
        if by_hidden is not None and vocab.group is not None:
            labelled(_LABEL, all_reduce, by_hidden, group=vocab.group)
        ctx.save_for_backward(by_hidden, by_weight, by_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, (weight if bias is None else bias).dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = [None if one is None else _scaled(one, gradient, dtype) for one, dtype in found]
        return (*scaled, None, None, None, None)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _scaled(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    # Not in place: a retained graph may run backward again.
    return torch.mul(values, factor.to(values.dtype), out=torch.empty_like(values, dtype=dtype))


# ---- between ranks -------------------------------------------------------------------------------


class _OtherGradient(torch.autograd.Function):
    """An operation over ranks whose backward is not its adjoint: each rank has its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Way, backward: Way) -> Tensor:
        ctx.way = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way(gradient), None, None


def _with_gradient(x: Tensor, forward: Way, backward: Way) -> Tensor:
    found: Tensor = _OtherGradient.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return found


_SUM = "the sum of the loss of a whole sequence"
# Nodes of autograd's graph to examine: a loss from all ranks' parts is near its end.
_NODES = 256


def sequence_loss(
    logits: Tensor, shift_labels: Tensor, group: dist.ProcessGroup, ignore_index: int = IGNORED
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
    labelled(_SUM, all_reduce, counts, group=group)
    return whole_value(total / counts.clamp(min=1), group)


def whole_value(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' parts, with the gradient of this rank's part."""
    ranks = Ranks.of(group)
    return _with_gradient(part, lambda mine: summed(mine, ranks, _SUM), same)


def as_parts(loss: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a loss whose gradient is that of this rank's part of it.

    A loss built with `torch.distributed.nn.functional.all_gather`, as in transformers, has the
    gradients of all ranks' copies of it: that of the part, times the number of ranks.
    """
    if not _gathers(loss, group):
        return loss
    ranks = dist.get_world_size(group)
    return _with_gradient(loss, same, lambda gradient: gradient / ranks)


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
