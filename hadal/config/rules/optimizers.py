"""Contradictions between the optimizer or schedule and other settings."""

from __future__ import annotations

from collections.abc import Iterator

from hadal.config.rules.rule import reading
from hadal.config.scheduler import PARAMS as SCHEDULES
from hadal.config.top_level import Config
from hadal.errors import Fault

_TYPE = "optimizer.type"
_STAGE = "zero_optimization.stage"
_CHECKS = "zero_optimization.enable_sanity_checks"
_ONE_BIT = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
_TORCH_ONLY = ("foreach", "fused", "maximize", "capturable", "differentiable")


def _type(config: Config) -> str:
    return "" if config.optimizer is None else config.optimizer.type


@reading(_TYPE, "fp16.loss_scale")
def _lamb_scale(config: Config) -> Iterator[Fault]:
    if _type(config) in ("Lamb", "OneBitLamb") and config.fp16.loss_scale != 0:
        yield Fault("fp16.loss_scale", f"{_type(config)} needs a dynamic scale; give 0")


@reading(_TYPE, _STAGE)
def _one_bit_stage(config: Config) -> Iterator[Fault]:
    stage = config.zero_optimization.stage
    if _type(config) in _ONE_BIT and stage > 0:
        yield Fault(_TYPE, f"{_type(config)} needs {_STAGE} 0, got {stage}; lower the stage")


@reading(_TYPE, "optimizer.params.local_step_clipper", _CHECKS)
def _local_steps(config: Config) -> Iterator[Fault]:
    if config.optimizer is None or _type(config) != "ZeroOneAdam":
        return
    if config.optimizer.params.get("local_step_clipper") == 1:
        return
    if config.zero_optimization.enable_sanity_checks:
        yield Fault(
            _CHECKS,
            "takes it for a fault that ranks' weights differ, which ZeroOneAdam lets them do"
            " between exchanges; give false, or optimizer.params.local_step_clipper 1",
        )


@reading(_TYPE, "optimizer.params", "optimizer.params.torch_adam")
def _torch_keywords(config: Config) -> Iterator[Fault]:
    if config.optimizer is None or _type(config) not in ("Adam", "AdamW"):
        return
    params = config.optimizer.params
    if params.get("torch_adam"):
        if params.get("bias_correction") is False:
            yield Fault(
                "optimizer.params.bias_correction",
                "torch's own classes always correct; leave torch_adam out",
            )
        if params.get("differentiable"):
            yield Fault(
                "optimizer.params.differentiable",
                "nothing can be differentiated through the update of an engine; leave it out",
            )
        return
    for name in _TORCH_ONLY:
        if name in params:
            yield Fault(f"optimizer.params.{name}", "is torch's keyword; add torch_adam true")


@reading(_TYPE, "scheduler.type")
def _no_type(config: Config) -> Iterator[Fault]:
    for name, section in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        if section is not None and section.type == "auto":
            yield Fault(f"{name}.type", f'"auto" is filled in by nobody; name the {name}')


@reading("scheduler.type")
def _schedule_case(config: Config) -> Iterator[Fault]:
    if config.scheduler is None or config.scheduler.type in SCHEDULES:
        return
    written = {name.lower(): name for name in SCHEDULES}
    meant = written.get(config.scheduler.type.lower())
    if meant is not None:
        yield Fault(
            "scheduler.type", f'"{config.scheduler.type}" is unknown; did you mean "{meant}"?'
        )


RULES = (_lamb_scale, _one_bit_stage, _local_steps, _torch_keywords, _no_type, _schedule_case)
