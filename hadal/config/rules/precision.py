"""Contradictions of fp16, bf16, amp and the dtypes that go with them."""

from __future__ import annotations

from collections.abc import Iterator

from hadal.config.rules.rule import reading
from hadal.config.top_level import Config
from hadal.errors import Fault

_FP16, _BF16, _AMP = "fp16.enabled", "bf16.enabled", "amp.enabled"
_STAGE = "zero_optimization.stage"
_OFFLOAD = "zero_optimization.offload_optimizer.device"
_TYPE = "optimizer.type"


def model_dtype(config: Config) -> str:
    """Return the dtype of the weights that fp16 and bf16 imply."""
    if config.fp16.enabled:
        return "fp16"
    return "bf16" if config.bf16.enabled else "fp32"


def offloads_optimizer(config: Config) -> bool:
    """Tell whether the optimizer's state rests off the device."""
    offload = config.zero_optimization.offload_optimizer
    return offload is not None and offload.device != "none"


def _offloads_adam(config: Config) -> bool:
    is_adam = config.optimizer is None or config.optimizer.type in ("Adam", "AdamW")
    return offloads_optimizer(config) and is_adam


@reading(_FP16, _BF16)
def _both_halves(config: Config) -> Iterator[Fault]:
    if config.fp16.enabled and config.bf16.enabled:
        yield Fault(_BF16, "fp16.enabled is true too; keep one of the two")


@reading(_AMP, _FP16, _BF16)
def _amp_and_halves(config: Config) -> Iterator[Fault]:
    if config.amp is None or not config.amp.enabled:
        return
    for path, is_on in ((_FP16, config.fp16.enabled), (_BF16, config.bf16.enabled)):
        if is_on:
            yield Fault(_AMP, f"{path} is true too; keep one of the two")


@reading(_AMP, _STAGE)
def _amp_and_zero(config: Config) -> Iterator[Fault]:
    stage = config.zero_optimization.stage
    if config.amp is not None and config.amp.enabled and stage > 0:
        yield Fault(_AMP, f"amp needs {_STAGE} 0, got {stage}; use bf16 or fp16 instead")


@reading(_FP16, "fp16.loss_scale", "fp16.loss_scale_window", "fp16.min_loss_scale")
def _dynamic_scale(config: Config) -> Iterator[Fault]:
    if not config.fp16.enabled or config.fp16.loss_scale != 0:
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        value = getattr(config.fp16, name)
        if value <= 0:
            yield Fault(
                f"fp16.{name}",
                f"expected an integer > 0, got {value}; or fix the scale by fp16.loss_scale",
            )


@reading("fp16.fp16_master_weights_and_grads", _STAGE, _OFFLOAD, _TYPE)
def _fp16_masters(config: Config) -> Iterator[Fault]:
    path = "fp16.fp16_master_weights_and_grads"
    if not config.fp16.fp16_master_weights_and_grads:
        return
    if config.zero_optimization.stage == 0:
        yield Fault(path, f"needs {_STAGE} 1, 2 or 3; raise the stage or leave it out")
    elif not _offloads_adam(config):
        yield Fault(path, f'needs Adam and {_OFFLOAD} "cpu"; add them or leave it out')


@reading("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", _STAGE, _OFFLOAD)
def _bf16_masters(config: Config) -> Iterator[Fault]:
    path = "bf16.bf16_master_weights_and_grads"
    if not config.bf16.bf16_master_weights_and_grads:
        return
    if config.zero_optimization.stage == 0:
        yield Fault(path, f"needs {_STAGE} 1, 2 or 3; raise the stage or leave it out")
    elif not config.bf16.bf16_optimizer_states and not _offloads_adam(config):
        yield Fault(
            path,
            f'needs bf16.bf16_optimizer_states, or Adam and {_OFFLOAD} "cpu"; add one of them',
        )


@reading("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", _STAGE)
def _bf16_states(config: Config) -> Iterator[Fault]:
    path = "bf16.bf16_optimizer_states"
    if not config.bf16.bf16_optimizer_states:
        return
    if config.zero_optimization.stage == 0:
        yield Fault(path, f"needs {_STAGE} 1, 2 or 3; raise the stage or leave it out")
    elif not config.bf16.bf16_master_weights_and_grads:
        yield Fault(path, "needs bf16.bf16_master_weights_and_grads; switch that on too")


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
    _amp_and_halves,
    _amp_and_zero,
    _dynamic_scale,
    _fp16_masters,
    _bf16_masters,
    _bf16_states,
    _weights_dtype,
    _autocast_quantized,
)
