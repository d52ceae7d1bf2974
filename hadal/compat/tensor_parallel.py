"""Names of `deepspeed.module_inject` that programs use besides `tensor_parallel.autotp_size`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hadal.comm import get_rank, get_world_size
from hadal.comm.adjoint import gathered
from hadal.compat.kinds import recognized
from hadal.config.parallelism import SplitLayer
from hadal.errors import ModelError, NotBuiltYetError, expect_one_of
from hadal.plugins.tensor_parallel.layers import (
    ColumnLinear,
    RowLinear,
    SlicedLayer,
    key_heads_of,
    shard_sizes,
    text_config_of,
)
from hadal.plugins.tensor_parallel.rules import (
    PRESETS,
    LayerRule,
    pattern_of,
    preset,
    rules_of_plan,
)
from hadal.zero import GatheredParameters

_log = logging.getLogger(__name__)


def set_autotp_mode(training: bool = False) -> None:
    """Accept the mode in which layers are cut; it is training.

    Raises:
        NotBuiltYetError: it is inference.
    """
    if not training:
        raise NotBuiltYetError(
            "set_autotp_mode(training=False): tensor parallelism for inference is not built yet;"
            " pass training=True"
        )


def is_autotp_training_mode() -> bool:
    """Return True: layers are cut for training."""
    return True


class AutoTPPresets:
    """The rules of families of models, keyed by name."""

    @staticmethod
    def get_preset(model_type: str) -> tuple[LayerRule, ...]:
        """Return the rules of a family.

        Raises:
            UsageError: there is none of that name.
        """
        expect_one_of(PRESETS, "the family of models", model_type)
        return preset(model_type)


@dataclass
class AutoTPConfig:
    """Rules for the layers of a model: `tensor_parallel.partition_config` as an object."""

    tp_size: int = 1
    layer_specs: Sequence[LayerRule] = ()
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> Any:
        """Return the first rule for a parameter; None if there is none."""
        found = [rule for rule in self.layer_specs if rule.matches(param_name, model_type)]
        if len(found) > 1:
            _log.warning("%d rules match %s; the first applies", len(found), param_name)
        return found[0] if found else None

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """Return the rules of a JSON object.

        Raises:
            ValueError: a rule has faults.
        """
        given = {name: value for name, value in config_dict.items() if name in cls.__annotations__}
        specs = [SplitLayer(**spec) for spec in given.pop("layer_specs", ())]
        rules = [LayerRule.of(spec, f"layer_specs[{at}]") for at, spec in enumerate(specs)]
        return cls(layer_specs=rules, **given)


class TPPlanConverter:
    """The tensor-parallel plans of transformers as rules."""

    @staticmethod
    def convert(hf_tp_plan: Mapping[str, str]) -> list[LayerRule] | None:
        """Return the rules of a plan; None if it is empty.

        Raises:
            ModelError: the plan has a style without a rule.
        """
        rules = rules_of_plan(hf_tp_plan)
        return None if rules is None else list(rules)

    @staticmethod
    def _wildcard_to_regex(pattern: str) -> str:
        return pattern_of(pattern).removesuffix(r"\.weight$")


class GatherReplacedLayerParams:
    """Inside the context, parameters of layers that were cut are whole, on every rank.

    All ranks of the tensor-parallel group must enter it. Changes are kept, each rank its slice.

    Args:
        params: one parameter, or several.
        module: the module that holds them.
        enabled: False does nothing.
    """

    def __init__(
        self, params: Iterable[Tensor] | Tensor, module: nn.Module, enabled: bool = True
    ) -> None:
        wanted = {id(each) for each in ([params] if isinstance(params, Tensor) else params)}
        self._cut: list[tuple[nn.Parameter, SlicedLayer, Tensor | None]] = [
            (parameter, layer, None)
            for layer in module.modules()
            if isinstance(layer, SlicedLayer) and enabled
            for parameter in layer.parameters(recurse=False)
            if id(parameter) in wanted and getattr(parameter, "tensor_model_parallel", False)
        ]
        self.enabled = bool(self._cut)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        parameters = [parameter for parameter, _, _ in self._cut]
        self._stack.enter_context(GatheredParameters(parameters, modifier_rank=None))
        for at, (parameter, layer, _) in enumerate(self._cut):
            mine, cut = parameter.data, layer.cut
            ranks = layer.tensor_group.ranks
            whole = gathered(mine, cut.dim, cut.sizes, ranks, f"{layer.label}: the whole weight")
            parameter.data = cut.join(whole.split(cut.sizes, cut.dim))
            self._cut[at] = parameter, layer, mine

    def __exit__(self, *exc_info: object) -> None:
        for parameter, layer, mine in self._cut:
            assert mine is not None  # the context was entered
            changed = layer.cut.take(parameter.data, layer.tensor_group.ranks.rank)
            parameter.data = mine
            if not torch.equal(changed, mine):
                with torch.no_grad():
                    parameter.copy_(changed)
        self._stack.close()


def _sliced(name: str, doc: str, base: type[SlicedLayer], parts: int = 1) -> Any:
    """Return the class of layers that were cut so, with at least so many fused parts."""
    return recognized(
        name,
        doc,
        lambda thing: isinstance(thing, base) and len(thing.cut.parts) >= parts,
        "tensor_parallel.autotp_size cuts the layers of a model, and a rule of"
        " tensor_parallel.partition_config.layer_specs with a shape cuts a fused one",
        base,
    )


LinearLayer = _sliced("LinearLayer", "A layer that is cut by its outputs.", ColumnLinear)
LinearAllreduce = _sliced("LinearAllreduce", "A layer that is cut by its inputs.", RowLinear)
SubParamLinearLayer = _sliced(
    "SubParamLinearLayer", "A layer with fused parts, each cut by its outputs.", ColumnLinear, 2
)
SubParamLinearAllreduce = _sliced(
    "SubParamLinearAllreduce", "A layer with fused parts, each cut by its inputs.", RowLinear, 2
)


# ---- sizes of slices -----------------------------------------------------------------------------


@dataclass
class AutoTPMeta:
    """The numbers of a model between which its layers are cut."""

    num_kv_heads: int | None = None
    num_attention_heads: int | None = None
    n_embd: int | None = None
    tp_grain_size: int = 1

    @classmethod
    def from_model_config(cls, model_config: Any, tp_grain_size: int = 1) -> AutoTPMeta:
        """Return the numbers of a model's configuration, or of its text part."""
        if model_config is None:
            return cls(tp_grain_size=tp_grain_size)
        holder = type("Holder", (), {"config": model_config})
        config = text_config_of(holder)
        names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
        heads = (getattr(config, name, None) for name in names)
        widths = (getattr(config, name, None) for name in ("n_embd", "hidden_size"))
        return cls(
            key_heads_of(holder),
            next((one for one in heads if one is not None), None),
            next((one for one in widths if one is not None), None),
            tp_grain_size,
        )


_shards = AutoTPMeta()
"""The numbers that programs of older releases set once for all calls."""


def set_num_kv_heads(num: int | None) -> None:
    """Set the key-value heads between which attentions are cut."""
    _shards.num_kv_heads = num


def set_tp_grain_size(num: int) -> None:
    """Set the rows of which slices of other layers are multiples."""
    _shards.tp_grain_size = num


def set_n_embd(num: int) -> None:
    """Set the model's width."""
    _shards.n_embd = num


def get_num_kv_heads() -> int | None:
    """Return the key-value heads that were set."""
    return _shards.num_kv_heads


def get_n_embd() -> int | None:
    """Return the width that was set."""
    return _shards.n_embd


def get_shard_size_list(
    total_size: int,
    mp_size: int,
    meta: AutoTPMeta | str | None = None,
    name: str | None = None,
    num_kv_heads: int | None = None,
) -> list[int]:
    """Return how many of `total_size` rows each of `mp_size` ranks has.

    In older releases the third argument is the layer's name, and the numbers were set before,
    or the key-value heads are given.
    """
    numbers = meta if isinstance(meta, AutoTPMeta) else _shards
    layer = meta if isinstance(meta, str) else name
    heads = numbers.num_kv_heads if num_kv_heads is None else num_kv_heads
    grain = numbers.tp_grain_size
    return shard_sizes(total_size, mp_size, heads=heads, grain=grain, name=layer or "")


def shard_widths(
    subparam_sizes: Sequence[int], tp_world_size: int, name: str | None = None
) -> list[list[int]]:
    """Return how many rows of each fused part each rank has."""
    return [get_shard_size_list(size, tp_world_size, name) for size in subparam_sizes]


def get_shard_size(
    total_size: int,
    mp_size: int,
    meta: AutoTPMeta | str | None = None,
    name: str | int | None = None,
    rank: int | None = None,
    mp_group: dist.ProcessGroup | None = None,
    num_kv_heads: int | None = None,
) -> int:
    """Return how many rows a rank of the tensor-parallel group has; this one, if none is given.

    In older releases the arguments after `mp_size` are the layer's name and the rank.

    Raises:
        ModelError: neither a rank nor a group is given, and there are other ranks than `mp_size`.
    """
    if isinstance(name, int):
        name, rank = None, name
    if rank is None and mp_group is None and get_world_size() != mp_size:
        raise ModelError(
            f"get_shard_size: which of {mp_size} tensor-parallel ranks; this one is of"
            f" {get_world_size()} in all. Pass its group-local rank or process group"
        )
    mine = get_rank(mp_group) if rank is None else rank
    return get_shard_size_list(total_size, mp_size, meta, name, num_kv_heads)[mine]


# ---- biases of attentions by position (ALiBi), of this rank's heads ------------------------------


def _own_heads(
    count: int,
    mp_group: dist.ProcessGroup | None = None,
    head_shard_sizes: Sequence[int] | None = None,
    total_num_heads: int | None = None,
) -> tuple[int, slice]:
    """Return the heads of all ranks, and the range of this one's; by default they are even."""
    heads, ranks, rank = total_num_heads or count, get_world_size(mp_group), get_rank(mp_group)
    sizes = head_shard_sizes or get_shard_size_list(heads, ranks, AutoTPMeta())
    if (len(sizes), sum(sizes)) != (ranks, heads):
        raise ValueError(
            f"head_shard_sizes {sizes} do not divide {heads} heads among {ranks} ranks"
        )
    return heads, slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def install_head_sharded_helper(
    module: nn.Module,
    name: str,
    wrapper: Callable[..., Tensor],
    meta: AutoTPMeta,
    mp_group: dist.ProcessGroup | None = None,
) -> None:
    """Let one of the functions below replace a method of this module, which stays `<name>_orig`."""
    if f"{name}_orig" not in vars(module):
        setattr(module, f"{name}_orig", getattr(module, name))
    heads, ranks = meta.num_attention_heads, get_world_size(mp_group)
    sizes = None if heads is None else get_shard_size_list(heads, ranks, meta)
    choices = {"mp_group": mp_group, "head_shard_sizes": sizes, "total_num_heads": heads}
    setattr(module, name, partial(wrapper, module, **choices))


def build_bloom_alibi_tensor(
    attention_mask: Tensor, num_heads: int, dtype: torch.dtype, *ranks: Any, **of_ranks: Any
) -> Tensor:
    """Return Bloom's biases [batch * own heads, 1, length]; `_own_heads` has the last arguments."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    (heads, own), (batch, length) = _own_heads(num_heads, *ranks, **of_ranks), attention_mask.shape
    whole = build_alibi_tensor(attention_mask, heads, dtype).view(batch, heads, 1, length)
    return whole[:, own].reshape(-1, 1, length)


def build_mpt_alibi_tensor(
    self: Any,
    num_heads: int,
    sequence_length: int,
    alibi_bias_max: int = 8,
    device: Any = None,
    *ranks: Any,
    **of_ranks: Any,
) -> Tensor:
    """Return the biases [own heads, ...] of the method that this one replaces."""
    heads, own = _own_heads(num_heads, *ranks, **of_ranks)
    whole: Tensor = self.build_mpt_alibi_tensor_orig(heads, sequence_length, alibi_bias_max, device)
    return whole[own]


def get_alibi_mask(
    self: Any, tensor: Tensor, seq_length_with_past: int, *ranks: Any, **of_ranks: Any
) -> Tensor:
    """Return the mask [own heads, length, length] of Baichuan's method, which this one replaces."""
    mine, (heads, own) = self.n_head, _own_heads(self.n_head, *ranks, **of_ranks)
    self.n_head = heads
    try:
        mask: Tensor = self.get_alibi_mask_orig(tensor, seq_length_with_past)
    finally:
        self.n_head = mine
    return mask[own, :seq_length_with_past, :seq_length_with_past]
