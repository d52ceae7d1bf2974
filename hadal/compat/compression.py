"""The helpers of `deepspeed.compression` that programs use besides `init_compression`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hadal.compat.tools import recursive_getattr
from hadal.config.compression import CompressionTraining
from hadal.config.reading import read
from hadal.config.section import Section, child_of
from hadal.errors import ConfigError, Fault, UsageError, expect_one_of
from hadal.plugins.compression.compress import (
    init_compression,
    redundancy_clean as _redundancy_clean,
    section_of,
)
from hadal.plugins.compression.layers import change, compressible, why_not
from hadal.plugins.compression.quantizers import in_steps, largest, quantize, quantize_in_range

_TECHNIQUES = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
)
_BLOCK_KEYS = (
    "schedule_offset_end",
    "schedule_offset_stride",
    "block_pattern",
    "dense_ratio",
    "excluded_modules",
)
_HELPER = "deepspeed.compression.helper"

# ---- quantizers ----------------------------------------------------------------------------------


def _stepped(x: Tensor, bits: int, low: Any, high: Any, groups: int, *, symmetric: bool) -> Tensor:
    if (low is None) != (high is None):
        raise UsageError("min_value and max_value are a range: pass both, or neither")
    if low is None:
        _expect_groups(x, groups)
        return in_steps(x, bits, groups, symmetric=symmetric)
    if groups != 1:
        raise UsageError(
            f"num_groups is {groups}, but min_value and max_value set one range; expected"
            " num_groups 1, or no range"
        )
    first, last = (torch.as_tensor(each, device=x.device).reshape(()) for each in (low, high))
    return quantize_in_range(x, bits, first, last, symmetric=symmetric)


def _few(x: Tensor, bits: int, low: Any, high: Any, groups: int, *, expected: int) -> Tensor:
    if bits != expected:
        raise UsageError(
            f"num_bits is {bits}, but this quantizer has {expected}; SymQuantizer has any number"
        )
    if low is not None or high is not None:
        raise UsageError(
            "min_value and max_value have no meaning with 1 or 2 bits: leave them out, or use"
            " SymQuantizer"
        )
    _expect_groups(x, groups)
    return quantize(x, bits, groups)


def _expect_groups(x: Tensor, groups: int) -> None:
    if groups < 1 or x.numel() % groups:
        raise UsageError(
            f"num_groups is {groups}, which does not divide the {x.numel():,} elements of the"
            f" input {tuple(x.shape)}; expected a divisor"
        )


def _rounding(rounded: Callable[..., Tensor]) -> Any:
    """Return the forward of a quantizer, with the arguments that DeepSpeed's quantizers have."""

    def forward(
        ctx: Any,
        input: Tensor,
        num_bits: int,
        min_value: Any = None,
        max_value: Any = None,
        num_groups: int = 1,
    ) -> Tensor:
        """Return `input` with few values in each group, or in one given range."""
        del ctx
        return rounded(input, num_bits, min_value, max_value, num_groups)

    return staticmethod(forward)


class _Quantizer(torch.autograd.Function):
    """Rounds in forward; the gradient passes unchanged."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as that of the input."""
        del ctx
        return gradients[0], None, None, None, None


class SymQuantizer(_Quantizer):
    """Rounds to `2 ** num_bits` values around zero."""

    forward = _rounding(partial(_stepped, symmetric=True))


class AsymQuantizer(_Quantizer):
    """Rounds to `2 ** num_bits` values from the smallest to the largest."""

    forward = _rounding(partial(_stepped, symmetric=False))


class TernaryQuantizer(_Quantizer):
    """Quantizes to three levels: -a, 0 and a."""

    forward = _rounding(partial(_few, expected=2))


class BinaryQuantizer(_Quantizer):
    """Quantizes to two levels, -a and a; zeros stay zeros."""

    forward = _rounding(partial(_few, expected=1))


class TopKBinarizer(torch.autograd.Function):
    """The mask of the largest scores; its gradient goes to the scores unchanged."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, threshold: Any, sigmoid: bool) -> Tensor:
        """Return 1 for the fraction `threshold` of the largest scores, and 0 for the others.

        Args:
            ctx: autograd's context.
            inputs: scores.
            threshold: the fraction to keep.
            sigmoid: whether the fraction is the sigmoid of `threshold`.
        """
        del ctx
        ratio = torch.as_tensor(threshold, dtype=torch.float64)
        return largest(inputs, float(ratio.sigmoid() if sigmoid else ratio))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as that of the scores."""
        del ctx
        return gradients[0], None, None


# ---- configurations ------------------------------------------------------------------------------


def check_deepspeed_config(config: Any) -> Mapping[str, Any]:
    """Return the configuration of a dict or of a file.

    Raises:
        ConfigError: it is neither.
    """
    return config if isinstance(config, Mapping) else read(config)[1]


def get_compression_config(param_dict: Any) -> dict[str, Any]:
    """Return all seven sections of a configuration with the defaults filled in, as plain values.

    `fp16_mixed_quantize` becomes two keys, whether it is on and `quantize_change_ratio`. Techniques
    that are off have no groups.

    Raises:
        ConfigError: the section has faults.
    """
    section = section_of(param_dict)
    found: dict[str, Any] = {name: _plain(getattr(section, name)) for name in _TECHNIQUES}
    reduction = section.layer_reduction
    values = reduction.model_dump(mode="json", exclude_none=True) if reduction.is_on else {}
    return {**found, "layer_reduction": {**values, "enabled": reduction.is_on}}


def _plain(wanted: Any) -> dict[str, Any]:
    shared = wanted.shared_parameters.model_dump(mode="json")
    mixed = shared.pop("fp16_mixed_quantize", None)
    if mixed is not None:
        shared["fp16_mixed_quantize"] = mixed["enabled"]
        shared["quantize_change_ratio"] = mixed["quantize_change_ratio"]
    if shared.get("method") != "snip_momentum":
        shared = {key: value for key, value in shared.items() if key not in _BLOCK_KEYS}
    elif shared["schedule_offset_end"] is None:
        shared["schedule_offset_end"] = shared["schedule_offset"]
    shared = {key: value for key, value in shared.items() if value is not None}
    groups = wanted.different_groups if wanted.is_on else None
    return {
        "shared_parameters": shared,
        "different_groups": {name: _group(group) for name, group in (groups or {}).items()},
    }


def _group(group: Section) -> dict[str, Any]:
    values = group.model_dump(mode="json")
    params = {key: value for key, value in (values["params"] or {}).items() if value is not None}
    return {**values, "params": params}


def get_quantize_enabled(param_dict: Any) -> bool:
    """Return whether the weights of some modules are quantized."""
    return section_of(param_dict).weight_quantization.is_on


# ---- modules -------------------------------------------------------------------------------------


def is_module_compressible(module: nn.Module, mpu: Any = None) -> bool:
    """Return whether a module is of a class that some technique knows."""
    names = ("ColumnParallelLinear", "RowParallelLinear")
    cut = tuple(getattr(mpu, name) for name in names if isinstance(getattr(mpu, name, None), type))
    return compressible(module) or isinstance(module, (nn.BatchNorm2d, *cut))


def get_module_name(
    group_name: str,
    model: nn.Module,
    key_word: str,
    exist_module_name: set[str],
    mpu: Any = None,
    verbose: bool = True,
) -> tuple[list[str], set[str]]:
    """Return the names of the modules that a pattern finds, and all names found so far.

    Args:
        group_name: for the message.
        model: whose modules are searched.
        key_word: a regular expression; `*` is every module.
        exist_module_name: names found before; gets the new ones.
        mpu: the program's object for its model parallelism.
        verbose: whether a name that was found before is an error; else it is left out.

    Raises:
        ConfigError: the pattern is no regular expression, or finds a name again.
    """
    try:
        search = re.compile(".*" if key_word == "*" else key_word).search
    except re.error as error:
        message = f"{key_word!r} is not a regular expression: {error}"
        raise ConfigError(f"{group_name}: {message}", (Fault(group_name, message),)) from error
    found = []
    for name, module in model.named_modules():
        if not search(name) or not is_module_compressible(module, mpu):
            continue
        if name not in exist_module_name:
            exist_module_name.add(name)
            found.append(name)
        elif verbose:
            message = f"{key_word!r} names {name}, which another pattern of the technique names too"
            raise ConfigError(f"{group_name}: {message}", (Fault(group_name, message),))
    return found, exist_module_name


def get_compress_methods(
    model: nn.Module, compress_methods: Mapping[str, Any], mpu: Any = None
) -> list[list[Any]]:
    """Return the modules of a model that each group of a configuration selects.

    Args:
        model: its modules are searched.
        compress_methods: from `get_compression_config`.
        mpu: the program's object for its model parallelism.

    Returns:
        For each group the names of each pattern, the names of each pattern's related modules, and
        the technique with its settings.
    """
    found: list[list[Any]] = []
    for technique in _TECHNIQUES:
        section = compress_methods.get(technique) or {}
        seen: set[str] = set()
        for group, values in (section.get("different_groups") or {}).items():
            related = values.get("related_modules") or []
            names = [get_module_name(group, model, one, seen, mpu)[0] for one in values["modules"]]
            others = [
                [get_module_name(group, model, one, set(), mpu)[0] for one in patterns]
                for patterns in related
            ]
            settings = {**(section.get("shared_parameters") or {}), **values["params"]}
            found.append([names, others, {technique: settings}])
    return found


def compression_preparation(
    model: nn.Module, compression_technique_list: Iterable[Any], mpu: Any = None
) -> nn.Module:
    """Prepare the modules that `get_compress_methods` returned; return the model."""
    for names, _, techniques in compression_technique_list:
        for name in dict.fromkeys(each for of_pattern in names for each in of_pattern):
            module_replacement(model, name, techniques, mpu)
    return model


def module_replacement(
    model: nn.Module,
    module_name: str,
    compression_technique: Mapping[str, Mapping[str, Any]] | None = None,
    mpu: Any = None,
) -> None:
    """Apply techniques to the weight and input of one module.

    The module stays the same object; its class changes.

    Args:
        model: changed in place.
        module_name: the module's full name.
        compression_technique: settings by technique, shared and group settings merged; None only
            changes the class. Techniques with `enabled` false do nothing.
        mpu: ignored; modules are always this rank's.

    Raises:
        ConfigError: the settings have faults, or do not fit the module.
        UsageError: the module is of a class that cannot be changed.
    """
    del mpu
    module = recursive_getattr(model, module_name)
    if isinstance(module, nn.BatchNorm2d) and not compression_technique:
        return  # a batch normalization needs no change to be shrunk
    reason = why_not(module) if isinstance(module, nn.Module) else "it is no module"
    if reason is not None:
        raise UsageError(f"module_replacement: {module_name} cannot be changed: {reason}")
    change(module)
    for technique, settings in (compression_technique or {}).items():
        init_compression(model, _of_one(technique, settings, module_name))


def _of_one(technique: str, settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the configuration of one technique for one module."""
    expect_one_of(_TECHNIQUES, "module_replacement: a technique of modules", technique)
    if settings.get("method") == "snip_momentum":
        raise UsageError(
            "module_replacement: snip_momentum chooses the blocks of all modules together; call"
            " init_compression(model, config)"
        )
    section = _below(CompressionTraining, technique)
    of_group = _below(_below(section, "different_groups"), "params").model_fields
    shared = {key: value for key, value in settings.items() if key not in of_group}
    if isinstance(shared.get("fp16_mixed_quantize"), bool):
        ratio = shared.pop("quantize_change_ratio", None)
        mixed = {"enabled": shared["fp16_mixed_quantize"]}
        more = {} if ratio is None else {"quantize_change_ratio": ratio}
        shared["fp16_mixed_quantize"] = {**mixed, **more}
    params = {key: value for key, value in settings.items() if key in of_group}
    group = {"params": params, "modules": [f"^{re.escape(name)}$"]}
    values = {"shared_parameters": shared, "different_groups": {"one": group}}
    return {"compression_training": {technique: values}}


def _below(section: type[Section], key: str) -> type[Section]:
    child = child_of(section.model_fields[key])
    assert child is not None
    return child.model


def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: Any = None) -> nn.Module:
    """Make the compressed weights permanent, as `hadal.compression.redundancy_clean` does.

    Attention modules and the model's configuration keep their number of heads: as with DeepSpeed,
    the program sets it afterwards.
    """
    return _redundancy_clean(model, deepspeed_config, mpu, counts_heads=False)


# ---- done by the engine instead ------------------------------------------------------------------


def _refused(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise UsageError(f"{_HELPER}.{name} has no counterpart here: {remedy}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Refused: {remedy}."
    return refused


_PRUNERS = (
    'the engine prunes by momentum itself; set "method": "snip_momentum" in sparse_pruning, and'
    " call init_compression before initialize"
)
fix_compression = _refused(
    "fix_compression",
    "redundancy_clean(model, config) finishes all modules, and those that get smaller along",
)
generate_pruners = _refused("generate_pruners", _PRUNERS)
register_on_step_begin = _refused("register_on_step_begin", _PRUNERS)
rewrite_optimizer_step = _refused("rewrite_optimizer_step", _PRUNERS)
get_mpu = _refused("get_mpu", "no mpu is stored; use the one that the program gave to initialize")
