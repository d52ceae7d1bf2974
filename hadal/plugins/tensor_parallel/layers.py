"""Linear layers and embeddings that are sliced over tensor-parallel ranks.

A layer of the model becomes one of these in place, and its parameters get this rank's slices:
names, identities and `isinstance` are preserved. Parameters are plain tensors, marked
`tensor_model_parallel`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hadal.comm import Ranks
from hadal.comm.adjoint import across, gathered, same, sum_scattered, summed
from hadal.comm.functions import all_reduce, labelled
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
