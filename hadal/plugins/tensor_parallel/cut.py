"""Cuts of one dimension of a weight over ranks: sizes, whole heads, fused parts. Arithmetic."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hadal.config.parallelism import Shape, shape_fault
from hadal.errors import ModelError

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
