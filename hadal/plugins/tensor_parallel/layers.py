"""Linear layers and embeddings that are sliced over tensor-parallel ranks, and how they are cut.

A layer of the model becomes one of these in place, and its parameters get this rank's slices:
names, identities and `isinstance` are preserved. Parameters are plain tensors, marked
`tensor_model_parallel`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hadal.comm import Ranks
from hadal.comm.adjoint import across, gathered, same, sum_scattered, summed
from hadal.comm.functions import all_reduce, labelled
from hadal.config.parallelism import Shape, shape_fault
from hadal.errors import ModelError, UsageError

# Layers of a feed-forward block, and output layers, are not multiples of heads.
_FEED_FORWARD = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
HEAD_NAMES = ("lm_head", "embed_out")


def shard_sizes(
    total: int, ranks: int, *, heads: int | None = None, grain: int = 1, name: str = ""
) -> list[int]:
    """Return how many of `total` rows each rank gets; the first ranks get more.

    Args:
        total: the length of the dimension.
        ranks: the number of ranks.
        heads: key-value heads; rows of an attention are cut between them.
        grain: other rows are cut at multiples of this, and the last rank gets the rest.
        name: the layer's name, which distinguishes attentions from other layers.
    """
    if heads and total % heads == 0 and not _is_headless(name):
        return [count * (total // heads) for count in _even(heads, ranks)]
    if total < grain:
        grain = 1
    sizes = [count * grain for count in _even(total // grain, ranks)]
    sizes[-1] += total % grain
    return sizes


def _is_headless(name: str) -> bool:
    words = name.split(".")
    return "mlp" in name or any(word in _FEED_FORWARD or word in HEAD_NAMES for word in words)


def _even(total: int, ranks: int) -> list[int]:
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def subparameter_sizes(length: int, shape: Shape | None, dim: int) -> tuple[int, ...]:
    """Return the sizes of the parts that are fused along a dimension; one if nothing is fused.

    A shape splits the dimension into equal parts (`(3, -1)`) or parts of given sizes
    (`((16, 4, 4), -1)`).

    Raises:
        ModelError: the parts do not add up to `length`.
    """
    if shape is None:
        return (length,)
    fault = shape_fault(shape, dim)
    if fault is not None:
        raise ModelError(fault)
    entry = shape[dim]
    if isinstance(entry, tuple):
        if sum(entry) != length:
            raise ModelError(
                f"the parts {list(entry)} have {sum(entry):,} rows, but the weight {length:,}; set"
                " the rows of each part"
            )
        return entry
    if entry == -1:
        return (length,)
    if length % entry:
        raise ModelError(
            f"{length:,} rows do not split into {entry} equal parts; set the rows of each part, as"
            " [[a, b, c], -1]"
        )
    return (length // entry,) * entry


@dataclass(frozen=True, slots=True)
class WeightCut:
    """A dimension of a weight, and the parts of it that each rank holds."""

    dim: int
    parts: tuple[tuple[int, ...], ...]
    """For each fused part (one if nothing is fused), the size of every rank's slice of it."""

    @classmethod
    def of(cls, dim: int, parts: Sequence[Sequence[int]]) -> WeightCut:
        """Return the cut of parts along a dimension."""
        return cls(dim, tuple(tuple(sizes) for sizes in parts))

    @property
    def length(self) -> int:
        """The length of the whole dimension."""
        return sum(map(sum, self.parts))

    @property
    def sizes(self) -> list[int]:
        """The number of rows that each rank holds."""
        return [sum(shares) for shares in zip(*self.parts, strict=True)]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """Return first row and number of rows of each range that a rank holds, in its order."""
        starts = accumulate((sum(sizes) for sizes in self.parts), initial=0)
        return [
            (start + sum(sizes[:rank]), sizes[rank])
            for start, sizes in zip(starts, self.parts, strict=False)
        ]

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's slice of a whole weight, as a copy."""
        pieces = [whole.narrow(self.dim, *span) for span in self.spans(rank)]
        return (
            pieces[0].clone(memory_format=torch.contiguous_format)
            if len(pieces) == 1
            else torch.cat(pieces, self.dim)
        )

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """Return the whole weight from all ranks' slices."""
        cut = [
            share.split([sizes[rank] for sizes in self.parts], self.dim)
            for rank, share in enumerate(shares)
        ]
        return torch.cat([piece for part in zip(*cut, strict=True) for piece in part], self.dim)


# ---- attention heads -----------------------------------------------------------------------------

# Forward code reshapes by attributes of its module (`num_heads`, `hidden_size`), or by its
# configuration. On a rank they are set to this rank's numbers.

_KEY_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads"),
    *("num_attention_heads", "n_heads", "attention_heads", "n_head", "num_heads"),
)
_COUNTS = (
    *("n_heads", "num_heads", "num_kv", "num_attention_heads", "num_attn_heads"),
    *("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_attention_heads_per_partition"),
    "num_multi_query_groups_per_partition",
)
_WIDTHS = ("inner_dim", "all_head_size", "embed_dim", "hidden_size", "d_model")
_WIDTHS_PER_RANK = ("hidden_size_per_partition",)
_IN_CONFIG = ("num_attention_heads", "num_key_value_heads")


def text_config_of(model: Any) -> Any:
    """Return the configuration of a model's text part; None if it has no configuration."""
    config = getattr(model, "config", None)
    return getattr(config, "text_config", None) or config


def key_heads_of(model: Any) -> int | None:
    """Return the number of key-value heads of a model's attentions; None if it is unknown.

    Query heads that share keys and values stay together, so cuts are between key-value heads.
    """
    config = text_config_of(model)
    for name in _KEY_HEADS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def is_attention(module: nn.Module) -> bool:
    """Return whether a module counts heads."""
    return any(isinstance(getattr(module, name, None), int) for name in _COUNTS)


def head_size_of(module: nn.Module, config: Any) -> int | None:
    """Return the size of an attention's heads; None if it is unknown."""
    for owner in (module, config):
        for name in ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_kv"):
            found = getattr(owner, name, None)
            if isinstance(found, int):
                return found
    heads, width = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    return width // heads if isinstance(heads, int) and isinstance(width, int) else None


def show_share(
    module: nn.Module, heads: int | None, size: int, rank: int, configs: dict[int, Any]
) -> None:
    """Set an attention's attributes to this rank's heads.

    Args:
        module: the module whose layers were cut.
        heads: key-value heads of the model.
        size: tensor-parallel ranks.
        rank: this rank's index among them.
        configs: this rank's copies of configurations, by the model's own.
    """

    def share(total: int) -> int:
        return shard_sizes(total, size, heads=heads)[rank]

    all_heads = [getattr(module, name, None) for name in ("num_heads", "num_attention_heads")]
    total = next((one for one in all_heads if isinstance(one, int)), None)
    if total is not None and "alibi" in inspect.signature(module.forward).parameters:
        _take_alibi(module, shard_sizes(total, size, heads=heads), rank)
    for name in (*_COUNTS, *_WIDTHS, *_WIDTHS_PER_RANK):
        found = getattr(module, name, None)
        if isinstance(found, int) and not isinstance(found, bool) and found > 1:
            setattr(module, name, share(found))
    config = getattr(module, "config", None)
    if config is None or not any(isinstance(getattr(config, n, None), int) for n in _IN_CONFIG):
        return
    if id(config) not in configs:
        # The model's own configuration describes the whole model, and is saved with it.
        configs[id(config)] = copy.copy(config)
        for name in _IN_CONFIG:
            found = getattr(config, name, None)
            if isinstance(found, int):
                setattr(configs[id(config)], name, share(found))
    module.config = configs[id(config)]


def _take_alibi(module: nn.Module, sizes: list[int], rank: int) -> None:
    """Reduce the biases of an attention to its own heads: the model computes those of all."""
    first, total = sum(sizes[:rank]), sum(sizes)

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        alibi = kwargs.get("alibi")
        if not isinstance(alibi, Tensor):
            return None
        by_head = alibi.view(-1, total, *alibi.shape[1:])
        mine = by_head[:, first : first + sizes[rank]].reshape(-1, *alibi.shape[1:])
        return args, {**kwargs, "alibi": mine}

    module.register_forward_pre_hook(take, with_kwargs=True)


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

    @classmethod
    def become(cls, layer: Any, group: TensorGroup, cut: WeightCut, name: str) -> None:
        """Turn a layer into this one; all ranks hold the same values."""
        layer.__class__ = cls
        layer.tensor_group, layer.cut, layer.label = group, cut, name
        take_slice(layer.weight, cut, group.ranks)

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
    def become(cls, layer: Any, group: TensorGroup, cut: WeightCut, name: str) -> None:
        """Turn a layer into this one; all ranks hold the same values."""
        super().become(layer, group, cut, name)
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
    def become(cls, layer: Any, group: TensorGroup, cut: WeightCut, name: str) -> None:
        """Turn a layer into this one; all ranks hold the same values."""
        super().become(layer, group, cut, name)
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
