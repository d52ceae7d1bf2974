"""Frozen values of `fp16`, `bf16`, `amp`, `torch_autocast` and `data_types`, and the casts."""

from __future__ import annotations

import copy
import logging
import pkgutil
import re
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hadal.config import Config
from hadal.device import emulates
from hadal.engine.policies import dtype_named, wire_dtype
from hadal.errors import Fault, raise_faults
from hadal.optim.norm import ScaleRule
from hadal.zero.policy import STAGES, Precision


class Casting(NamedTuple):
    """Casts around and inside a forward pass; None means no cast."""

    inputs: torch.dtype | None = None
    """Floating-point tensors among the arguments."""
    outputs: torch.dtype | None = None
    """Floating-point tensors in the module's output."""
    autocast: torch.dtype | None = None
    """Operations that are safe at lower precision, by torch's own list."""

    def run(
        self, module: nn.Module, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module."""
        if self.inputs is not None:
            args, kwargs = cast_floats(args, self.inputs), cast_floats(kwargs, self.inputs)
        with self._around(device):
            output = module(*args, **kwargs)
        return output if self.outputs is None else cast_floats(output, self.outputs)

    def _around(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        # Casts of weights are cached until the outermost autocast ends. If that is the caller's,
        # around several updates, a forward would compute with stale weights.
        torch.clear_autocast_cache()
        return torch.autocast(device.type, dtype=self.autocast)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in `value`, also those in nested lists, tuples and mappings.

    A container is copied if something in it changes; the caller's containers are never modified.
    Other values are returned unchanged.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        cast = [cast_floats(item, dtype) for item in value]
        if not _differ(value, cast):
            return value
        # A named tuple takes its fields one by one.
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    if isinstance(value, Mapping):
        changed = {key: cast_floats(item, dtype) for key, item in value.items()}
        return _updated(value, changed) if _differ(value.values(), changed.values()) else value
    return value


def _differ(before: Any, after: Any) -> bool:
    return any(one is not other for one, other in zip(before, after, strict=True))


def _updated(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a mapping of the same type, also if it is more than a dict (an output object)."""
    if not isinstance(value, MutableMapping):
        return changed
    twin = copy.copy(value)
    for key, item in changed.items():
        twin[key] = item
    return twin


_log = logging.getLogger(__name__)

SAFE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Torch requires their running statistics in their weights' dtype.
_WITH_STATISTICS = (*_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_SAFE_PATH = "torch_autocast.lower_precision_safe_modules"

# Apex's dynamic scale, unless the section sets another one.
_AMP_SCALE = 2.0**16
_AMP_WINDOW = 2000
_NO_FLOOR = 2.0**-126  # the smallest normal float32: a scale must never become zero


class _AmpLevel(NamedTuple):
    """Apex level with the section's changes."""

    cast: torch.dtype | None = None
    patches: bool = False
    keeps_batch_norm: bool = False
    keeps_masters: bool = False
    scale: float | None = 1.0
    """None is dynamic."""

    @property
    def uses_fp16(self) -> bool:
        return self.patches or self.cast is torch.float16


_LEVELS = {
    "O0": _AmpLevel(cast=torch.float32),
    "O1": _AmpLevel(patches=True, scale=None),
    "O2": _AmpLevel(torch.float16, keeps_batch_norm=True, keeps_masters=True, scale=None),
    "O3": _AmpLevel(torch.float16),
}


def _amp_level(config: Config) -> _AmpLevel | None:
    """Return the level of section `amp`, if it is enabled."""
    amp = config.amp
    if amp is None or not amp.enabled:
        return None
    level = _LEVELS[amp.opt_level]

    def chosen(said: bool | None, own: bool) -> bool:
        return own if said is None else said

    said = amp.loss_scale
    return _AmpLevel(
        cast=dtype_named(amp.cast_model_type) or level.cast,
        patches=chosen(amp.patch_torch_functions, level.patches),
        keeps_batch_norm=chosen(amp.keep_batchnorm_fp32, level.keeps_batch_norm),
        keeps_masters=chosen(amp.master_weights, level.keeps_masters),
        scale=level.scale if said is None else None if said == "dynamic" else float(said),
    )


def model_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype that weights are cast to; None means no cast."""
    if config.fp16.enabled:
        return torch.float16
    if config.bf16.enabled:
        return torch.bfloat16
    level = _amp_level(config)
    return level.cast if level else None


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast in the forward pass; None is no autocast."""
    level, autocast = _amp_level(config), config.torch_autocast
    if level and level.patches:
        return torch.float16
    if autocast is None or not autocast.enabled:
        return None
    return dtype_named(autocast.dtype) or torch.get_autocast_dtype(device.type)


def casting_of(config: Config, device: torch.device) -> Casting:
    """Return the casts around and inside the forward pass."""
    level, autocast = _amp_level(config), autocast_dtype(config, device)
    if level is None or config.amp is None:
        return Casting(torch.float16 if fp16_casts_inputs(config) else None, None, autocast)
    outputs = dtype_named(config.amp.cast_model_outputs) or (level.cast and torch.float32)
    return Casting(level.cast, outputs, autocast)


def fp16_casts_inputs(config: Config) -> bool:
    """Return whether `fp16.auto_cast` casts floating-point inputs."""
    return config.fp16.enabled and config.fp16.auto_cast


# ---- parameters and buffers ----------------------------------------------------------------------


def precisions_of(
    config: Config, model: nn.Module, device: torch.device
) -> Callable[[nn.Parameter], Precision]:
    """Return a function from a parameter to its dtypes, by its own dtype and its module.

    Raises:
        ConfigError: a class of `lower_precision_safe_modules` cannot be found.
    """
    level = _amp_level(config)
    exact = _own(model, _BATCH_NORMS) if level and level.keeps_batch_norm else set()
    lowered: set[nn.Parameter] = set()
    autocast = config.torch_autocast
    if autocast is not None and autocast.enabled:
        lowered = _own(model, _safe_classes(config))
    wire = autocast_dtype(config, device)
    if _exact_state(config) and config.bf16.enabled and config.bf16.bf16_optimizer_states:
        _log.warning(
            "optimizer.params.fp32_optimizer_states: true is overridden by"
            " bf16.bf16_optimizer_states: moments are kept in bf16"
        )

    def precision_of(parameter: nn.Parameter) -> Precision:
        # A frozen parameter has no gradient to send; it shares a bucket with its neighbours.
        low = wire if parameter.requires_grad and parameter in lowered else None
        cast = None if parameter in exact else model_dtype(config)
        return _precision(config, parameter.dtype, cast, low, device)

    return precision_of


def _own(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> set[nn.Parameter]:
    """Return the parameters that modules of these classes own directly."""
    modules = [module for module in model.modules() if isinstance(module, classes)]
    return {p for module in modules for p in module._parameters.values() if p is not None}


def _precision(
    config: Config,
    given: torch.dtype,
    cast: torch.dtype | None,
    wire: torch.dtype | None,
    device: torch.device,
) -> Precision:
    """Return the dtypes of a `given` parameter cast to `cast`; it may be sent in `wire`."""
    compute = cast or given
    accumulate = dtype_named(config.data_types.grad_accum_dtype) or _sums_of(config, compute)
    exact = torch.promote_types(given, torch.float32)
    master, state = given, None
    if cast is not None:
        master, state = (exact, None) if _keeps_masters(config) else (compute, exact)
        if config.bf16.enabled and config.bf16.bf16_optimizer_states:
            state = torch.bfloat16
        elif _exact_state(config) is False:
            state = None
    return Precision(
        compute=compute,
        master=master,
        accumulate=accumulate,
        reduce=wire_dtype(config) or _own_wire(accumulate, wire, device),
        state=state,
        rounds_early=cast is not None and bool(config.data_types.early_rounding),
    )


def _exact_state(config: Config) -> bool | None:
    """Return `fp32_optimizer_states`; None if it is not set."""
    if config.optimizer is None:
        return None
    said: bool | None = config.optimizer.params.get("fp32_optimizer_states")
    return said


def _sums_of(config: Config, compute: torch.dtype) -> torch.dtype:
    """Return the dtype of gradient sums if `data_types.grad_accum_dtype` is not set."""
    immediate = config.bf16.enabled and config.bf16.immediate_grad_update
    return torch.promote_types(compute, torch.float32) if immediate else compute


def _keeps_masters(config: Config) -> bool:
    """Return whether weights that are cast have fp32 masters."""
    level = _amp_level(config)
    if level is not None:
        return level.keeps_masters
    if config.fp16.enabled:
        return not config.fp16.fp16_master_weights_and_grads
    return not config.bf16.bf16_master_weights_and_grads


def _own_wire(
    accumulate: torch.dtype, lowered: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """Return the dtype on the wire if the config names none; autocast may name `lowered`.

    Ranks on CPUs send 16 bits and sum in fp32. The backend of an accelerator sums in the dtype
    that is sent, and would round after each rank: accelerators send sums in fp32.
    """
    if lowered is not None and lowered.itemsize < accumulate.itemsize:
        return lowered
    return accumulate if device.type == "cpu" else torch.promote_types(accumulate, torch.float32)


def _safe_classes(config: Config) -> tuple[type[nn.Module], ...]:
    """Import the classes of `lower_precision_safe_modules`."""
    autocast = config.torch_autocast
    paths = None if autocast is None else autocast.lower_precision_safe_modules
    if paths is None:
        return SAFE
    classes, faults = [], []
    for index, path in enumerate(paths):
        try:
            found = pkgutil.resolve_name(path)
            if not (isinstance(found, type) and issubclass(found, nn.Module)):
                raise TypeError(f"it is a {type(found).__name__}, not a module class")
            classes.append(found)
        except Exception as error:  # the imported module may raise any error
            message = f'"{path}" cannot be imported: {error}; set "package.module.Class"'
            faults.append(Fault(f"{_SAFE_PATH}[{index}]", message))
    raise_faults(faults)
    return tuple(classes)


class BufferRule(NamedTuple):
    """Dtype of each buffer of a model."""

    cast: torch.dtype | None
    """The dtype of all buffers; None casts none."""
    statistics: torch.dtype | None
    """The dtype of running statistics if `cast` is None; None does not cast them."""
    kept: re.Pattern[str] | None
    """The full names of buffers that are not cast."""
    keeps_batch_norm: bool

    def dtype_of(self, name: str, module: nn.Module, buffer: Tensor) -> torch.dtype:
        """Return the dtype of a module's buffer of this full name."""
        cast = self.cast
        if cast is None and isinstance(module, _WITH_STATISTICS):
            cast = self.statistics
        stays = (
            not buffer.is_floating_point()
            or (self.kept is not None and self.kept.search(name) is not None)
            or (self.keeps_batch_norm and isinstance(module, _BATCH_NORMS))
        )
        return buffer.dtype if stays or cast is None else cast


def buffer_rule_of(config: Config, model: nn.Module) -> BufferRule:
    """Return how buffers are cast."""
    patterns = config.data_types.keep_in_fp32_modules
    if patterns == "auto":
        # Hugging Face's models name the modules that must keep their precision.
        named = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        lists = [getattr(module, name, None) for module in model.modules() for name in named]
        patterns = tuple(pattern for found in lists for pattern in found or ())
    whole_parts = "|".join(rf"(?:^|\.)(?:{pattern})(?:\.|$)" for pattern in patterns)
    level = _amp_level(config)
    return BufferRule(
        dtype_named(config.data_types.buffer_dtype) or (level.cast if level else None),
        model_dtype(config),
        re.compile(whole_parts) if whole_parts else None,
        level is not None and level.keeps_batch_norm,
    )


# ---- the loss scale ------------------------------------------------------------------------------


def scale_rule_of(config: Config, device: torch.device) -> ScaleRule:
    """Return how the loss is scaled: only if something is computed in fp16."""
    level = _amp_level(config)
    if level is not None:
        return _amp_rule(config, level)
    fp16 = config.fp16
    if not fp16.enabled and autocast_dtype(config, device) is not torch.float16:
        return ScaleRule()
    with_zero = STAGES[config.zero_optimization.stage].optimizer
    return ScaleRule(
        initial=float(fp16.loss_scale) or 2.0**fp16.initial_scale_power,
        dynamic=fp16.loss_scale == 0,
        window=fp16.loss_scale_window,
        minimum=fp16.min_loss_scale,
        hysteresis=fp16.hysteresis if with_zero else 1,
        consecutive_hysteresis=fp16.consecutive_hysteresis and with_zero,
        ends_at_floor=with_zero,
    )


def _amp_rule(config: Config, level: _AmpLevel) -> ScaleRule:
    if level.scale is not None or config.amp is None:
        return ScaleRule(initial=level.scale or 1.0)
    low, high = config.amp.min_loss_scale or _NO_FLOOR, config.amp.max_loss_scale
    return ScaleRule(
        initial=max(low, min(_AMP_SCALE, high)),
        dynamic=True,
        window=_AMP_WINDOW,
        minimum=low,
        hysteresis=1,
        ends_at_floor=False,
        maximum=high,
    )


def skips_overflow(config: Config, device: torch.device) -> bool:
    """Return whether an update with non-finite gradients is skipped."""
    level = _amp_level(config)
    if level is not None:
        return level.uses_fp16 or level.scale is None
    return (
        config.fp16.enabled
        or autocast_dtype(config, device) is torch.float16
        or (config.bf16.enabled and config.bf16.check_grad_overflow)
    )


# ---- warnings ------------------------------------------------------------------------------------


def warn_16bit_weights(config: Config, model: nn.Module) -> None:
    """Warn of 16-bit weights that are not trained as their dtype suggests."""
    cast = model_dtype(config)
    if cast is torch.float16:
        _warn_bf16_weights(model)
    elif cast is None:
        for dtype in (torch.float16, torch.bfloat16):
            _warn_without_masters(model, dtype)


def _warn_bf16_weights(model: nn.Module) -> None:
    born = [name for name, p in model.named_parameters() if p.dtype is torch.bfloat16]
    if born:
        _log.warning(
            "%d parameters, the first of them %s, are in bfloat16 and will be trained in float16,"
            " whose maximum is 65504 where bfloat16's is 3e38: expect overflows. Train in"
            " bf16 (bf16.enabled true, fp16.enabled false), or load the weights in float32.",
            len(born),
            born[0],
        )


def _warn_without_masters(model: nn.Module, dtype: torch.dtype) -> None:
    named = model.named_parameters()
    born = [name for name, p in named if p.dtype is dtype and p.requires_grad]
    name, section = ("float16", "fp16") if dtype is torch.float16 else ("bfloat16", "bf16")
    lost = "without a loss scale and " if dtype is torch.float16 else ""
    if born:
        _log.warning(
            "%d trainable parameters, the first of them %s, are in %s, and the configuration"
            " enables neither fp16 nor bf16: they are trained %swithout fp32 master weights, so"
            " small updates are rounded away. Pass the model in float32, or enable %s"
            ' ("%s": {"enabled": true}), which keeps fp32 masters',
            len(born),
            born[0],
            name,
            lost,
            section,
            section,
        )


def warn_of_emulation(config: Config, device: torch.device) -> None:
    """Warn if the device has no instructions for the 16-bit dtype that a model computes in."""
    dtype = model_dtype(config) or autocast_dtype(config, device)
    if dtype is None or not emulates(dtype, device):
        return
    autocast, amp = config.torch_autocast, config.amp
    sections = {
        "fp16": config.fp16.enabled,
        "bf16": config.bf16.enabled,
        "amp": amp is not None and amp.enabled,
        "torch_autocast": autocast is not None and autocast.enabled,
    }
    section = next(name for name, is_on in sections.items() if is_on)
    _log.warning(
        "%s.enabled: this CPU has no %s instructions; torch emulates them, and a step takes ten"
        " times as long as in float32, or more. To train on this CPU, set %s.enabled to false",
        *(section, str(dtype).removeprefix("torch."), section),
    )
