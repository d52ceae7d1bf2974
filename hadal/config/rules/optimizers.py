"""Contradictions between the optimizer or schedule and other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hadal.config import torch_names
from hadal.config.optimizer import Optimizer
from hadal.config.optimizer_kinds import KINDS, OptimizerKind, built_in
from hadal.config.rules.rule import reading
from hadal.config.scheduler import PARAMS as SCHEDULES
from hadal.config.scheduler import Scheduler
from hadal.config.section import Section
from hadal.config.top_level import Config
from hadal.errors import Fault, nearest

_TYPE = "optimizer.type"
_STAGE = "zero_optimization.stage"
_CHECKS = "zero_optimization.enable_sanity_checks"
_TORCH_ONLY = ("foreach", "fused", "maximize", "capturable", "differentiable")


def _type(config: Config) -> str:
    return "" if config.optimizer is None else config.optimizer.type


def _kind(config: Config) -> OptimizerKind | None:
    return KINDS.get(_type(config))


@reading(_TYPE, "fp16.loss_scale")
def _fixed_scale(config: Config) -> Iterator[Fault]:
    kind = _kind(config)
    if kind is not None and kind.needs_dynamic_scale and config.fp16.loss_scale != 0:
        yield Fault("fp16.loss_scale", f"{_type(config)} needs a dynamic scale; set 0")


@reading(_TYPE, _STAGE)
def _high_stage(config: Config) -> Iterator[Fault]:
    stage, kind = config.zero_optimization.stage, _kind(config)
    if kind is not None and stage > kind.max_stage:
        needed = f"{_STAGE} {kind.max_stage}"
        yield Fault(_TYPE, f"{kind.name} needs {needed}, got {stage}; lower the stage")


@reading(_TYPE, "optimizer.params.local_step_clipper", _CHECKS)
def _local_steps(config: Config) -> Iterator[Fault]:
    if config.optimizer is None or _type(config) != "ZeroOneAdam":
        return
    if config.optimizer.params.get("local_step_clipper") == 1:
        return
    if config.zero_optimization.enable_sanity_checks:
        yield Fault(
            _CHECKS,
            "reports weights that differ between ranks, which ZeroOneAdam allows between"
            " exchanges; set false, or optimizer.params.local_step_clipper 1",
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
                "an engine's update cannot be differentiated; remove it",
            )
        return
    for name in _TORCH_ONLY:
        if name in params:
            yield Fault(f"optimizer.params.{name}", "is torch's keyword; add torch_adam: true")


@reading(_TYPE, "scheduler.params", "scheduler.params.total_num_steps")
def _no_training(config: Config) -> Iterator[Fault]:
    # The Hugging Face Trainer asks for 0 updates, without an optimizer, to evaluate at stage 3.
    if config.optimizer is None or config.scheduler is None:
        return
    if config.scheduler.params.get("total_num_steps") == 0:
        yield Fault("scheduler.params.total_num_steps", "expected an integer > 0, got 0")


@reading(_TYPE, "scheduler.type")
def _no_type(config: Config) -> Iterator[Fault]:
    for name, section in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        if section is not None and section.type == "auto":
            yield Fault(f"{name}.type", f'"auto" was not replaced by any program; name the {name}')


_Section = Optimizer | Scheduler
_Params = Mapping[str, type[Section]]


def bad_types(config: Config, skip: tuple[str, ...]) -> Iterator[Fault]:
    """Yield a fault for each type that does not exist, and check the params of the likely one.

    `skip` are sections that have another fault, or that an object of the program replaces.
    """
    kinds: tuple[tuple[str, _Section | None, _Params, tuple[str, ...], str], ...] = (
        ("optimizer", config.optimizer, built_in(), tuple(KINDS), "torch.optim"),
        (
            "scheduler",
            config.scheduler,
            SCHEDULES,
            torch_names.SCHEDULES,
            "torch.optim.lr_scheduler",
        ),
    )
    for name, section, own, of_torch, home in kinds:
        if section is None or name in skip:
            continue
        kind = section.type
        refused = KINDS[kind].refused if section is config.optimizer and kind in KINDS else ""
        if refused:
            yield Fault(f"{name}.type", f"{kind} cannot be used: {refused}")
        elif kind not in (*own, *of_torch, "auto") and not torch_names.is_class_of(home, kind):
            yield from _unknown(name, section, own, of_torch, home)


def _unknown(
    name: str, section: _Section, own: _Params, of_torch: tuple[str, ...], home: str
) -> Iterator[Fault]:
    meant = nearest(section.type, (*own, *of_torch))
    hint = f'did you mean "{meant}"?' if meant else f"name one of {', '.join(own)}"
    yield Fault(
        f"{name}.type", f'"{section.type}" is neither built in nor a class of {home}; {hint}'
    )
    fields = own[meant].model_fields if meant is not None and meant in own else {}
    for key in section.params if fields else ():
        near = nearest(key, fields)
        if key not in fields and near is not None:
            yield Fault(f"{name}.params.{key}", f'unknown key of {meant}; did you mean "{near}"?')


RULES = (_fixed_scale, _high_stage, _local_steps, _torch_keywords, _no_training, _no_type)
