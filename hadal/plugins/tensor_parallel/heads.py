"""Attention heads: their number in a model, and the attributes of an attention with some of them.

Forward code of models reshapes by attributes of its module (`num_heads`, `hidden_size`), or by its
configuration. On a rank they are set to this rank's numbers.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor, nn

from hadal.plugins.tensor_parallel.cut import shard_sizes

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
