"""Contradictions of fp16, bf16, amp and the dtypes that belong to them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hadal.config.rules.rule import reading
from hadal.config.top_level import Config
from hadal.errors import Fault

_FP16, _BF16, _AMP = "fp16.enabled", "bf16.enabled", "amp.enabled"
_AUTOCAST = "torch_autocast.enabled"
_STAGE = "zero_optimization.stage"
_NEEDS_ZERO = f"needs {_STAGE} 1, 2 or 3; raise the stage or leave it out"


def model_dtype(config: Config) -> str:
    """Return the dtype of the weights implied by fp16 and bf16."""
    if config.fp16.enabled:
        return "fp16"
    return "bf16" if config.bf16.enabled else "fp32"


def offloads_optimizer(config: Config) -> bool:
    """Return whether the optimizer's state is offloaded."""
    offload = config.zero_optimization.offload_optimizer
    return offload is not None and offload.device != "none"


def scales_by_fp16(config: Config) -> bool:
    """Return whether the numbers of section `fp16` are used, or may be, depending on the device."""
    autocast = config.torch_autocast
    if config.fp16.enabled:
        return True
    return autocast is not None and autocast.enabled and autocast.dtype != "bf16"


@reading(_FP16, _BF16)
def _both_halves(config: Config) -> Iterator[Fault]:
    if config.fp16.enabled and config.bf16.enabled:
        yield Fault(_BF16, "fp16.enabled is true too; keep one of the two")


@reading(_AMP, _FP16, _BF16, _AUTOCAST)
def _amp_and_others(config: Config) -> Iterator[Fault]:
    if config.amp is None or not config.amp.enabled:
        return
    autocast = config.torch_autocast
    others = (
        (_FP16, config.fp16.enabled),
        (_BF16, config.bf16.enabled),
        (_AUTOCAST, autocast is not None and autocast.enabled),
    )
    for path, is_on in others:
        if is_on:
            yield Fault(_AMP, f"{path} is true too; keep one of the two")


@reading(_AMP, _STAGE)
def _amp_and_zero(config: Config) -> Iterator[Fault]:
    stage = config.zero_optimization.stage
    if config.amp is not None and config.amp.enabled and stage > 0:
        yield Fault(_AMP, f"amp needs {_STAGE} 0, got {stage}; use bf16 or fp16 instead")


@reading(_FP16, _AUTOCAST, "fp16.loss_scale", "fp16.loss_scale_window", "fp16.min_loss_scale")
def _dynamic_scale(config: Config) -> Iterator[Fault]:
    if not scales_by_fp16(config) or config.fp16.loss_scale != 0:
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        value = getattr(config.fp16, name)
        if value <= 0:
            yield Fault(
                f"fp16.{name}",
                f"expected an integer > 0, got {value}; or fix the scale by fp16.loss_scale",
            )


@reading("fp16.fp16_master_weights_and_grads", _STAGE)
def _fp16_masters(config: Config) -> Iterator[Fault]:
    if config.fp16.fp16_master_weights_and_grads and config.zero_optimization.stage == 0:
        yield Fault("fp16.fp16_master_weights_and_grads", _NEEDS_ZERO)


@reading("bf16.bf16_master_weights_and_grads", _STAGE)
def _bf16_masters(config: Config) -> Iterator[Fault]:
    if config.bf16.bf16_master_weights_and_grads and config.zero_optimization.stage == 0:
        yield Fault("bf16.bf16_master_weights_and_grads", _NEEDS_ZERO)


@reading("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", _STAGE)
def _bf16_states(config: Config) -> Iterator[Fault]:
    path = "bf16.bf16_optimizer_states"
    if not config.bf16.bf16_optimizer_states:
        return
    if config.zero_optimization.stage == 0:
        yield Fault(path, _NEEDS_ZERO)
    elif not config.bf16.bf16_master_weights_and_grads:
        yield Fault(path, "needs bf16.bf16_master_weights_and_grads; enable that too")


@reading("bf16.immediate_grad_update", "data_types.grad_accum_dtype")
def _immediate_sums(config: Config) -> Iterator[Fault]:
    summed = config.data_types.grad_accum_dtype
    if config.bf16.enabled and config.bf16.immediate_grad_update and summed in ("fp16", "bf16"):
        yield Fault(
            "bf16.immediate_grad_update",
            f'sums in fp32, but data_types.grad_accum_dtype is "{summed}"; leave one of them out',
        )


@reading(_AMP, "amp.opt_level", "amp.cast_model_type", "amp.patch_torch_functions")
def _patched_and_cast(config: Config) -> Iterator[Fault]:
    amp = config.amp
    if amp is None or not amp.enabled:
        return
    is_patched = amp.patch_torch_functions
    if is_patched is None:
        is_patched = amp.opt_level == "O1"
    if is_patched and (amp.cast_model_type is not None or amp.opt_level != "O1"):
        yield Fault(
            "amp.patch_torch_functions" if amp.opt_level != "O1" else "amp.cast_model_type",
            "autocast casts where operations need it, so the model is not cast beforehand; use "
            "O1 without cast_model_type, or O2 without patch_torch_functions",
        )


@reading(_AMP, "amp.min_loss_scale", "amp.max_loss_scale")
def _amp_scales(config: Config) -> Iterator[Fault]:
    amp = config.amp
    if amp is not None and amp.min_loss_scale and amp.min_loss_scale > amp.max_loss_scale:
        yield Fault(
            "amp.min_loss_scale",
            f"{amp.min_loss_scale:g} is above amp.max_loss_scale {amp.max_loss_scale:g}; lower it",
        )


@reading("data_types.keep_in_fp32_modules")
def _kept_patterns(config: Config) -> Iterator[Fault]:
    patterns = config.data_types.keep_in_fp32_modules
    for index, pattern in enumerate(() if isinstance(patterns, str) else patterns):
        try:
            re.compile(pattern)
        except re.error as error:
            yield Fault(
                f"data_types.keep_in_fp32_modules[{index}]",
                f'"{pattern}" is not a valid regular expression ({error}); correct it',
            )


@reading("data_types.param_dtype", _FP16, _BF16)
def _weights_dtype(config: Config) -> Iterator[Fault]:
    wanted, model = config.data_types.param_dtype, model_dtype(config)
    if wanted not in (None, model):
        yield Fault(
            "data_types.param_dtype",
            f'"{wanted}" is not the "{model}" that fp16 and bf16 imply; leave it out',
        )


@reading("torch_autocast.enabled", "zero_optimization.zero_quantized_weights")
def _autocast_quantized(config: Config) -> Iterator[Fault]:
    autocast = config.torch_autocast
    is_on = autocast is not None and autocast.enabled
    if is_on and config.zero_optimization.zero_quantized_weights:
        yield Fault(
            "torch_autocast.enabled",
            "zero_optimization.zero_quantized_weights is true too; keep one of the two",
        )


RULES = (
    _both_halves,
    _amp_and_others,
    _amp_and_zero,
    _dynamic_scale,
    _fp16_masters,
    _bf16_masters,
    _bf16_states,
    _immediate_sums,
    _patched_and_cast,
    _amp_scales,
    _kept_patterns,
    _weights_dtype,
    _autocast_quantized,
)
