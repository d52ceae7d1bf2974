"""The frozen values that a configuration comes to: what `assemble` hands to the rooms below."""

from __future__ import annotations

import torch

from hadal.config import Config
from hadal.optim.loss_scale import ScaleRule
from hadal.zero.policy import Limits, Precision

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def model_dtype(config: Config) -> torch.dtype | None:
    """The dtype that all weights are cast to; None leaves each its own."""
    if config.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else None


def precision_of(config: Config, given: torch.dtype) -> Precision:
    """The dtypes of a bucket whose parameters were given in dtype `given`."""
    compute = model_dtype(config) or given
    mixed = model_dtype(config) is not None
    accumulate = config.data_types.grad_accum_dtype
    wire = config.communication_data_type
    accumulated = _DTYPES[accumulate] if accumulate else compute
    return Precision(
        compute=compute,
        master=torch.promote_types(given, torch.float32) if mixed else given,
        accumulate=accumulated,
        reduce=_DTYPES[wire] if wire else accumulated,
    )


def limits_of(config: Config) -> Limits:
    """How buckets are cut, what stays gathered, and what may be under way."""
    zero = config.zero_optimization
    return Limits(
        bucket_numel=min(
            zero.reduce_bucket_size, zero.allgather_bucket_size or zero.reduce_bucket_size
        ),
        persistence_numel=zero.stage3_param_persistence_threshold,
        persistent_total_numel=zero.stage3_model_persistence_threshold,
        live_numel=zero.stage3_max_live_parameters,
        reuse_numel=zero.stage3_max_reuse_distance,
        # Reductions overlap backward unless the user wrote false: the numbers are the same.
        overlap=bool(zero.overlap_comm)
        or config.origins.get("zero_optimization.overlap_comm") != "you",
    )


def scale_rule_of(config: Config) -> ScaleRule:
    """How the loss is scaled: not at all but under fp16."""
    fp16 = config.fp16
    if not fp16.enabled:
        return ScaleRule()
    return ScaleRule(
        initial=float(fp16.loss_scale) or 2.0**fp16.initial_scale_power,
        dynamic=fp16.loss_scale == 0,
        window=fp16.loss_scale_window,
        minimum=fp16.min_loss_scale,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
    )
