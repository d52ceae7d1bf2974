"""`hadal_sparse`: an attention function for transformers models.

Any model whose layers use `ALL_ATTENTION_FUNCTIONS` can use it, decoders and encoders. The
pattern is `config.sparse_attention`, a dict as in the JSON, which is saved in the model's
config.json. Random blocks are drawn for each layer from its index, so they are the same on all
ranks, after a restart and in every program that loads the model.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hadal.config.sparse_attention import SparseAttention
from hadal.device import is_host_memory
from hadal.errors import ModelError, NotBuiltYetError, UsageError, needed
from hadal.plugins.sparse_attention.attention import BlockLayout, sparse_attention
from hadal.plugins.sparse_attention.flex import Scores, attend
from hadal.plugins.sparse_attention.layouts import (
    SparsityConfig,
    from_config,
    get_sparse_attention_config,
)
from hadal.plugins.sparse_attention.masks import Masks, PairMask, key_mask
from hadal.plugins.sparse_attention.modules import SparseSelfAttention

NAME = "hadal_sparse"
"""The value of `attn_implementation`."""

_log = logging.getLogger("hadal")
Model = TypeVar("Model", bound=nn.Module)
# Arguments of other attention functions that change the result.
_UNKNOWN = ("head_mask", "block_table")


def register_with_transformers() -> None:
    """Register `attn_implementation="hadal_sparse"` with transformers; may be called again.

    Raises:
        MissingPackageError: transformers is not installed.
    """
    user, release = f"attn_implementation {NAME!r}", "'transformers>=5'"
    masks = needed("transformers.masking_utils", user, release)
    masks.AttentionMaskInterface.register(NAME, _mask_of)
    needed("transformers", user, release).AttentionInterface.register(NAME, hadal_sparse)


def use_sparse_attention(model: Model, source: Any = None) -> Model:
    """Make a transformers model compute its attention over a pattern; return the model.

    Args:
        model: any model whose layers use `ALL_ATTENTION_FUNCTIONS`.
        source: the pattern: a section as a dict, a configuration, or an engine. By default
            `initialize` sets the pattern of its configuration.

    Raises:
        ModelError: the model has no choice of attention functions.
        UsageError: the configuration has no section `sparse_attention`.
        MissingPackageError: transformers is not installed.
    """
    register_with_transformers()
    config = getattr(model, "config", None)
    can_set = getattr(model, "_can_set_attn_implementation", None)
    if not hasattr(config, "_attn_implementation") or can_set is None or not can_set():
        raise ModelError(
            f"{type(model).__name__} has no choice of attention functions (config."
            "_attn_implementation of transformers); put a hadal.sparse_attention."
            "SparseSelfAttention into its layers"
        )
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    if source is not None:
        values = get_sparse_attention_config(source)
        if values is None:
            raise UsageError(
                'the configuration has no section "sparse_attention"; add one, such as'
                ' {"sparse_attention": {"mode": "fixed"}}'
            )
        give_pattern(PatternPlan(values, _configs(model)))
    return model


class PatternPlan(NamedTuple):
    """A pattern, and the parts of a model that use `hadal_sparse`."""

    values: dict[str, Any]
    configs: list[Any]
    """Their configurations, each once."""


def plan_pattern(model: nn.Module, section: SparseAttention) -> PatternPlan:
    """Find the parts of a model that read a configuration's pattern; nothing is changed."""
    plan = PatternPlan(section.of_the_mode(), _configs(model))
    if not plan.configs and not any(isinstance(m, SparseSelfAttention) for m in model.modules()):
        _log.info(
            "sparse_attention: no part of %s uses it; a transformers model does after"
            " hadal.sparse_attention.use_sparse_attention(model), and others read it with"
            " hadal.sparse_attention.from_config(config, num_heads)",
            type(model).__name__,
        )

    return plan


def give_pattern(plan: PatternPlan) -> None:
    """Set the pattern on the parts of a model that use `hadal_sparse`."""
    for config in plan.configs:
        config.sparse_attention = dict(plan.values)


def _configs(model: nn.Module) -> list[Any]:
    found = [getattr(module, "config", None) for module in model.modules()]
    used = [one for one in found if getattr(one, "_attn_implementation", None) == NAME]
    return list({id(config): config for config in used}.values())


def hadal_sparse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention, as transformers calls it.

    Args:
        module: the layer's attention; its `config.sparse_attention` is the pattern.
        query: [batch, heads, rows, D]; if there are fewer rows than keys (generation), they are
            the last ones in the mask, or the last of all.
        key, value: [batch, heads or fewer, L, D].
        attention_mask: [batch, L] (true where keys are seen) or [batch, 1 or heads, rows, L]. If
            a cache has dropped the first keys, its columns are all positions, and the keys the
            last ones.
        dropout: must be 0.
        scaling: factor of the scores.
        is_causal: whether later tokens are not seen; by default the module's attribute.
        others: arguments of other attention functions. `position_bias`, [batch or 1, heads, rows,
            L], is added to the scores, and may need a gradient; `softcap` limits them; `s_aux`,
            [heads], are the scores of sinks. `head_range` is (first head, number of all heads), if
            ranks share them.

    Returns:
        [batch, rows, heads, D] and None.

    Raises:
        UsageError: dropout, or no pattern.
        NotBuiltYetError: a feature of other attention functions is requested.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    _check_call(module, dropout, others)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    rows, dropped = query.shape[2], _dropped(attention_mask, key.shape[2])
    length = dropped + key.shape[2]
    is_cross = _is_cross(module, causal=causal) or (rows != length and not causal)
    first = _first_row(attention_mask, rows, length)
    if dropped and attention_mask is not None:
        attention_mask = attention_mask[..., dropped:]
    masks = _masks(attention_mask, key, causal and not is_cross, others.get("position_bias"))
    heads = query.shape[1]
    first_head, all_heads = others.get("head_range") or (0, heads)
    softcap, sinks = others.get("softcap"), others.get("s_aux")
    if sinks is not None:
        sinks = sinks[first_head : first_head + heads]
    if is_cross:
        _tell_cross(type(module).__name__)
        added = masks.of_tokens(torch.arange(rows, device=query.device), length, query)
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = attend(query, key, value, added, Scores(factor, softcap, sinks))
    else:
        layout = _layout(module, length, all_heads, range(first_head, first_head + heads))
        places = {"first_row": first, "first_key": dropped}
        out = _disabled(
            query, key, value, layout, masks, scaling, **places, softcap=softcap, sinks=sinks
        )
    return out.transpose(1, 2).contiguous(), None


# Sequence parallelism determines the heads of a pattern that a rank computes.
hadal_sparse.takes_head_range = True  # type: ignore[attr-defined]

# A plan is not a tensor, so compiled models break the graph here.
_disabled: Callable[..., Tensor] = torch.compiler.disable(sparse_attention)


def _masks(given: Tensor | None, key: Tensor, causal: bool, bias: Tensor | None) -> Masks:
    added = () if bias is None else (PairMask(bias, multiplies=False),)
    if given is None or given.dim() == 2:
        keys = None if given is None else key_mask(given, "mul", key)
        return Masks(keys, added, causal)
    # A whole mask includes causality.
    return Masks(None, (*added, PairMask(given, multiplies=given.dtype is torch.bool)), False)


def _dropped(mask: Tensor | None, length: int) -> int:
    """Return the number of earlier keys that a cache has dropped."""
    return 0 if mask is None or mask.dim() != 4 else max(0, mask.shape[-1] - length)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _first_row(mask: Tensor | None, rows: int, length: int) -> int | None:
    """Return the position of the first query if a cache has room for more keys than it holds.

    The last query sees itself and no later key.
    """
    if mask is None or mask.dim() != 4 or mask.dtype is not torch.bool or rows == length:
        return None
    seen = mask[:, :, -1].flatten(0, 1).any(0).nonzero()
    return max(0, int(seen[-1]) + 1 - rows) if len(seen) else None


def _check_call(module: nn.Module, dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise UsageError(
            f"{NAME} has no dropout, but {type(module).__name__} requests {dropout}; set"
            " attention_dropout or attention_probs_dropout_prob of the model's config to 0"
        )
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if unknown:
        raise NotBuiltYetError(
            f"{NAME} with {unknown[0]} ({type(module).__name__}) is not built yet; choose another"
            " attn_implementation for this model"
        )


def _is_cross(module: nn.Module, *, causal: bool) -> bool:
    """Return whether a module attends to another sequence."""
    says = "Cross" in type(module).__name__ or getattr(module, "is_cross_attention", False)
    return bool(says or (getattr(module, "is_decoder", False) and not causal))


@cache
def _tell_cross(name: str) -> None:
    """Log it once for each class."""
    _log.info(
        "%s: %s attends to another sequence, so all of it is computed; the pattern applies to"
        " self-attention",
        NAME,
        name,
    )


def _layout(module: nn.Module, length: int, heads: int, mine: range) -> BlockLayout:
    values = getattr(getattr(module, "config", None), "sparse_attention", None)
    if values is None:
        raise UsageError(
            f"{type(module).__name__} uses {NAME}, but its config has no pattern; set one with"
            ' hadal.sparse_attention.use_sparse_attention(model, {"mode": "fixed"}) or the section'
            ' "sparse_attention" of the configuration'
        )
    written = json.dumps(dict(values), sort_keys=True)
    layer = int(getattr(module, "layer_idx", None) or 0)
    if len(mine) == heads:
        return _made(written, heads, length, layer)
    return _some_heads(written, heads, length, layer, mine)


@lru_cache(maxsize=256)
def _some_heads(written: str, heads: int, length: int, layer: int, mine: range) -> BlockLayout:
    whole = _made(written, heads, length, layer)
    if len(whole.layout) == 1:
        return whole
    return BlockLayout(whole.layout[mine.start : mine.stop], whole.block)


@lru_cache(maxsize=256)
def _made(written: str, heads: int, length: int, layer: int) -> BlockLayout:
    pattern = _pattern(written, heads)
    padded = -(-length // pattern.block) * pattern.block
    if not pattern.is_random and (layer or length != padded):
        return _made(written, heads, padded, 0)  # one for all layers
    pattern.draws = random.Random(layer)
    # A short prompt has fewer blocks than a window: it uses the first ones of a longer layout.
    fits = max(padded, pattern.fewest_blocks * pattern.block)
    layout = pattern.distinct_layout(fits)
    count = padded // pattern.block
    return BlockLayout(layout[:, :count, :count], pattern.block)


@lru_cache(maxsize=32)
def _pattern(written: str, heads: int) -> SparsityConfig:
    return from_config(json.loads(written), heads)


def _mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """Return the padding as [batch, L] if the mask is plain, otherwise the whole mask.

    The whole mask has a column for each position, including those whose keys a cache has dropped:
    it tells the attention function the positions of the keys in the pattern.
    """
    from transformers import masking_utils as known

    plain = (known.causal_mask_function, known.bidirectional_mask_function)
    whole = mask_function is not known.bidirectional_mask_function
    has_room = isinstance(q_offset, Tensor) or q_offset + q_length != kv_length
    # Sliding windows, packed sequences, a program's own mask, or a cache with spare room.
    if mask_function not in plain or (whole and (has_room or kv_offset)):
        others.pop("allow_is_causal_skip", None)
        others.pop("allow_is_bidirectional_skip", None)
        found: Tensor | None = known.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            allow_is_causal_skip=False,
            **others,
        )
        if found is not None and whole and kv_offset:
            return functional.pad(found, (kv_offset, 0))
        return found
    if attention_mask is None or (
        is_host_memory(attention_mask.device) and bool(attention_mask.all())
    ):
        return None
    return attention_mask[:, -kv_length:]
