"""Linear layers and embeddings that are sliced over tensor-parallel ranks.

A layer of the model becomes one of these in place, and its parameters get this rank's slices:
names, identities and `isinstance` are preserved. Parameters are plain tensors, marked
`tensor_model_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hadal.comm import Ranks
from hadal.comm.functions import all_gather_into_tensor, all_reduce, labelled, reduce_scatter_tensor
from hadal.errors import UsageError
from hadal.plugins.tensor_parallel.cut import WeightCut


class TensorGroup:
    """The ranks that hold slices of one model's layers, and the state that its layers share."""

    def __init__(self, ranks: Ranks, *, overlaps: bool = False) -> None:
        self.ranks = ranks
        self.overlaps = overlaps
        """True if a column layer sums its input's gradient while it computes its weight's."""
        self._entered: tuple[Tensor, Tensor] | None = None

    def enter(self, x: Tensor, label: str) -> Tensor:
        """Pass values that all ranks have to a computation on slices; sum their gradients.

        Layers that follow each other and have the same input (query, key and value) share one sum.
        """
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self._entered is None or self._entered[0] is not x:
            found = across(x, same, lambda gradient: summed(gradient, self.ranks, label))
            if torch.compiler.is_compiling():
                return found
            self._entered = x, found
        return self._entered[1]

    def leave(self, x: Tensor, label: str) -> Tensor:
        """Return the sum over ranks of their partial results."""
        self._entered = None
        return across(x, lambda values: summed(values, self.ranks, label), same)

    def leave_cut(self, x: Tensor, label: str) -> Tensor:
        """Return this rank's positions of that sum; `x` is (batch, length, ...)."""
        self._entered = None
        sizes = [x.shape[1] // self.ranks.size] * self.ranks.size
        return across(
            x,
            lambda values: sum_scattered(values, 1, sizes, self.ranks, label),
            lambda gradient: gathered(gradient, 1, sizes, self.ranks, label),
        )

    def forget(self) -> None:
        """Release the inputs of layers."""
        self._entered = None

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self  # a copy of a layer has its slice on the same ranks

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a model that is cut over tensor-parallel ranks cannot be pickled: this process has a"
            " slice of it. Save it with engine.save_checkpoint or engine.save_16bit_model"
        )


class SlicedLayer(nn.Module):
    """Base of layers that hold a slice."""

    tensor_group: TensorGroup
    cut: WeightCut
    """The cut of the whole weight."""
    label: str
    """The layer's full name."""
    cuts_sequence = False
    """True if, in training, its parent gathers positions and a row layer scatters them."""

    def _take(self, group: TensorGroup, cut: WeightCut, name: str) -> None:
        self.tensor_group, self.cut, self.label = group, cut, name
        take_slice(self.weight, cut, group.ranks)  # type: ignore[arg-type]

    @property
    def _sum_label(self) -> str:
        return f"{self.label}: the sum over tensor-parallel ranks"


def take_slice(parameter: nn.Parameter, cut: WeightCut, ranks: Ranks) -> None:
    """Reduce a parameter to this rank's slice, and mark it. A repeated call does nothing."""
    if getattr(parameter, "tensor_model_parallel", False):
        return
    parameter.data = cut.take(parameter.detach(), ranks.rank)
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = cut.dim  # type: ignore[attr-defined]


class ColumnLinear(SlicedLayer, nn.Linear):
    """A linear layer that computes a slice of its outputs."""

    gather_output: bool

    @classmethod
    def become(
        cls, layer: nn.Linear, group: TensorGroup, cut: WeightCut, name: str, *, gather_output: bool
    ) -> None:
        """Turn a layer into this one; all ranks hold the same values."""
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.gather_output = gather_output
        layer._take(group, cut, name)
        if layer.bias is not None:
            take_slice(layer.bias, cut, group.ranks)
        layer.out_features = cut.sizes[group.ranks.rank]

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's outputs, or all of them (`gather_output`).

        Args:
            input: (..., in_features), the same on all ranks.
        """
        group, ranks = self.tensor_group, self.tensor_group.ranks
        is_entered = self.cuts_sequence and self.training
        if is_entered:
            found = F.linear(input, self.weight, self.bias)
        elif group.overlaps and torch.is_grad_enabled():
            found = _Overlapped.apply(  # type: ignore[no-untyped-call]
                input, self.weight, self.bias, ranks, self._sum_label
            )
        else:
            entered = group.enter(input, self._sum_label)
            found = F.linear(entered, self.weight, self.bias)
        if not self.gather_output:
            return found
        group.forget()
        cut = WeightCut(found.dim() - 1, self.cut.parts)
        label = f"{self.label}: outputs of all tensor-parallel ranks"

        def gather(values: Tensor) -> Tensor:
            whole = gathered(values, cut.dim, cut.sizes, ranks, label)
            return cut.join(whole.split(cut.sizes, cut.dim)) if len(cut.parts) > 1 else whole

        return across(found, gather, lambda gradient: cut.take(gradient, ranks.rank))


class RowLinear(SlicedLayer, nn.Linear):
    """A linear layer with a slice of its inputs; the ranks' results are summed.

    The bias is whole, and is added to the sum.
    """

    @classmethod
    def become(cls, layer: nn.Linear, group: TensorGroup, cut: WeightCut, name: str) -> None:
        """Turn a layer into this one; all ranks hold the same values."""
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer._take(group, cut, name)
        layer.in_features = cut.sizes[group.ranks.rank]

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs, the same on all ranks.

        Args:
            input: (..., in_features), this rank's slice.
        """
        group = self.tensor_group
        leave = group.leave_cut if self.cuts_sequence and self.training else group.leave
        found = leave(F.linear(input, self.weight), self._sum_label)
        return found if self.bias is None else found + self.bias


class VocabularyEmbedding(SlicedLayer, nn.Embedding):
    """An embedding with a slice of its vocabulary; the ranks' results are summed."""

    @classmethod
    def become(cls, layer: nn.Embedding, group: TensorGroup, cut: WeightCut, name: str) -> None:
        """Turn an embedding into this one; all ranks hold the same values."""
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer._take(group, cut, name)

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings (..., embedding_dim), the same on all ranks.

        Args:
            input: (...), integers in the whole vocabulary.
        """
        start, length = self.cut.spans(self.tensor_group.ranks.rank)[0]
        is_known = (input >= 0) & (input < self.num_embeddings)
        is_mine = (input >= start) & (input < start + length)
        # An index that no rank has is looked up on all, so that every rank raises torch's error.
        places = torch.where(is_known, torch.where(is_mine, input - start, 0), input + length)
        found = F.embedding(places, self.weight).masked_fill(~is_mine[..., None], 0)
        if self.padding_idx is not None:
            is_padding = (input == self.padding_idx)[..., None]
            found = torch.where(is_padding, found.detach(), found)
        group = self.tensor_group
        return across(found, lambda values: summed(values, group.ranks, self._sum_label), same)


class _Overlapped(torch.autograd.Function):
    """A column layer whose backward computes the weight's gradient while the input's is summed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: Ranks, label: str
    ) -> Tensor:
        ctx.ranks, ctx.label = ranks, label
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        by_x = work = by_weight = by_bias = None
        if needs_x:
            by_x = (gradient @ weight.to(gradient.dtype)).contiguous()
            work = labelled(ctx.label, all_reduce, by_x, group=ctx.ranks.group, async_op=True)
        rows = gradient.reshape(-1, gradient.shape[-1])
        if needs_weight:
            by_weight = rows.t() @ x.reshape(-1, x.shape[-1]).to(gradient.dtype)
        if needs_bias:
            by_bias = rows.sum(0)
        if work is not None:
            work.wait()
        return by_x, by_weight, by_bias, None, None


def sum_gradient(parameter: nn.Parameter, ranks: Ranks, name: str) -> None:
    """Sum the gradient of a whole parameter that each rank uses on its own slice of values."""
    label = f"the gradient of {name} over tensor-parallel ranks"
    parameter.register_hook(lambda gradient: summed(gradient, ranks, label))


# ---- conversions ---------------------------------------------------------------------------------

# Each operation in forward has its adjoint in backward: the gradient of a value that all ranks have
# is summed, and the gradient of a sum is passed to all ranks.

Way = Callable[[Tensor], Tensor]


def across(x: Tensor, forward: Way, backward: Way) -> Tensor:
    """Return `forward(x)`; its backward applies `backward` to the gradient."""
    found: Tensor = _Crossing.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return found


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Way, backward: Way) -> Tensor:
        ctx.way = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way(gradient), None, None


def same(x: Tensor) -> Tensor:
    """Return the values unchanged."""
    return x.view_as(x)


def summed(x: Tensor, ranks: Ranks, label: str) -> Tensor:
    """Return the sum over ranks. The argument, contiguous or not, is unchanged."""
    total = x.clone(memory_format=torch.contiguous_format)
    labelled(label, all_reduce, total, group=ranks.group)
    return total


def own(x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
    """Return this rank's slice along a dimension."""
    return x.narrow(dim, sum(sizes[: ranks.rank]), sizes[ranks.rank]).contiguous()


def gathered(x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, label: str) -> Tensor:
    """Return the slices of all ranks, one after another along a dimension."""
    longest = max(sizes)
    mine = x.movedim(dim, 0)
    if mine.shape[0] < longest:
        mine = torch.cat([mine, mine.new_zeros(longest - mine.shape[0], *mine.shape[1:])])
    mine = mine.contiguous()
    found = mine.new_empty(ranks.size * longest, *mine.shape[1:])
    labelled(label, all_gather_into_tensor, found, mine, group=ranks.group)
    if min(sizes) < longest:
        pieces = zip(found.split(longest), sizes, strict=True)
        found = torch.cat([piece[:size] for piece, size in pieces])
    return found.movedim(0, dim).contiguous()


def sum_scattered(x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, label: str) -> Tensor:
    """Return this rank's slice along a dimension of the sum over ranks."""
    longest = max(sizes)
    pieces = list(x.movedim(dim, 0).split(list(sizes)))
    if min(sizes) < longest:
        pieces = [
            torch.cat([piece, piece.new_zeros(longest - piece.shape[0], *piece.shape[1:])])
            for piece in pieces
        ]
    whole = torch.cat(pieces).contiguous()
    found = whole.new_empty(longest, *whole.shape[1:])
    labelled(label, reduce_scatter_tensor, found, whole, group=ranks.group)
    return found[: sizes[ranks.rank]].movedim(0, dim).contiguous()
