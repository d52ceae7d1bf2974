"""Rules over two sections or more, and the check of all rules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from hadal.config.optimizer import KINDS, Optimizer, OptimizerKind
from hadal.config.prepare import Report, join
from hadal.config.scheduler import Scheduler
from hadal.config.section import Rule, Section, rule, under
from hadal.config.top_level import Config
from hadal.errors import Fault, nearest

_ZERO = "zero_optimization"
_STAGE, _SCATTER = f"{_ZERO}.stage", f"{_ZERO}.reduce_scatter"
_FP16, _BF16, _AMP = "fp16.enabled", "bf16.enabled", "amp.enabled"
_AUTOCAST = "torch_autocast.enabled"
_NEEDS_ZERO = f"needs {_STAGE} 1, 2 or 3; raise the stage or leave it out"
_MANAGED, _OVERLAP = "managed_gradient_accumulation", f"{_ZERO}.overlap_comm"
_OP = "gradient_allreduce_op"
_TYPE = "optimizer.type"


def report_contradictions(config: Config, report: Report) -> None:
    """Report every contradiction except those that a faulty key may have caused."""
    across = ((one.reads, one.check(config)) for one in RULES)
    for fault in [*_trusted(across, "", report), *_inside(config, "", report)]:
        report.fault(fault.path, fault.message)


def _inside(section: Section, path: str, report: Report) -> Iterator[Fault]:
    """Yield the contradictions inside a section, and inside the sections below it."""
    yield from _trusted(section.faults(), path, report)
    for name, child in section.children():
        yield from _inside(child, join(path, name), report)


def _trusted(
    checks: Iterable[tuple[tuple[str, ...], Iterable[Fault]]], path: str, report: Report
) -> Iterator[Fault]:
    """Yield the faults of checks that read valid keys only, with their whole paths."""
    for reads, faults in checks:
        if not report.is_faulty([join(path, name) for name in reads] or (path,)):
            yield from under(path, faults)


# ---- the batch -----------------------------------------------------------------------------------


@rule(_MANAGED, _STAGE, _OVERLAP)
def _unmanaged_overlap(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    if not config.managed_gradient_accumulation and zero.overlap_comm and zero.stage < 2:
        yield Fault(_MANAGED, f"false needs stage 2 or 3, or {_OVERLAP} false")


@rule(_MANAGED, "compile.deepcompile", _AMP)
def _unmanaged_elsewhere(config: Config) -> Iterator[Fault]:
    others = (("compile.deepcompile", config.compile.deepcompile), (_AMP, _uses_amp(config)))
    for path, is_on in others:
        if is_on and not config.managed_gradient_accumulation:
            yield Fault(_MANAGED, f"false cannot be combined with {path}; change one of them")
            return


# ---- precision -----------------------------------------------------------------------------------


def model_dtype(config: Config) -> str:
    """Return the dtype of the weights implied by fp16 and bf16."""
    if config.fp16.enabled:
        return "fp16"
    return "bf16" if config.bf16.enabled else "fp32"


def scales_by_fp16(config: Config) -> bool:
    """Return whether the numbers of section `fp16` are used, or may be, depending on the device."""
    autocast = config.torch_autocast
    return config.fp16.enabled or (
        autocast is not None and autocast.enabled and autocast.dtype != "bf16"
    )


def _uses_amp(config: Config) -> bool:
    return config.amp is not None and config.amp.enabled


def _uses_autocast(config: Config) -> bool:
    return config.torch_autocast is not None and config.torch_autocast.enabled


@rule(_FP16, _BF16)
def _both_halves(config: Config) -> Iterator[Fault]:
    if config.fp16.enabled and config.bf16.enabled:
        yield Fault(_BF16, "fp16.enabled is true too; keep one of the two")


@rule(_AMP, _FP16, _BF16, _AUTOCAST)
def _amp_and_others(config: Config) -> Iterator[Fault]:
    others = (
        (_FP16, config.fp16.enabled),
        (_BF16, config.bf16.enabled),
        (_AUTOCAST, _uses_autocast(config)),
    )
    for path, is_on in others:
        if is_on and _uses_amp(config):
            yield Fault(_AMP, f"{path} is true too; keep one of the two")


@rule(_AMP, _STAGE)
def _amp_and_zero(config: Config) -> Iterator[Fault]:
    stage = config.zero_optimization.stage
    if _uses_amp(config) and stage > 0:
        yield Fault(_AMP, f"amp needs {_STAGE} 0, got {stage}; use bf16 or fp16 instead")


@rule(_FP16, _AUTOCAST, "fp16.loss_scale", "fp16.loss_scale_window", "fp16.min_loss_scale")
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


def _half_masters(half: str) -> Rule:
    name = f"{half}_master_weights_and_grads"

    @rule(f"{half}.{name}", _STAGE)
    def check(config: Config) -> Iterator[Fault]:
        if getattr(getattr(config, half), name) and config.zero_optimization.stage == 0:
            yield Fault(f"{half}.{name}", _NEEDS_ZERO)

    return check


_FP16_MASTERS, _BF16_MASTERS = _half_masters("fp16"), _half_masters("bf16")


@rule("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", _STAGE)
def _bf16_states(config: Config) -> Iterator[Fault]:
    path = "bf16.bf16_optimizer_states"
    if not config.bf16.bf16_optimizer_states:
        return
    if config.zero_optimization.stage == 0:
        yield Fault(path, _NEEDS_ZERO)
    elif not config.bf16.bf16_master_weights_and_grads:
        yield Fault(path, "needs bf16.bf16_master_weights_and_grads; enable that too")


@rule("bf16.immediate_grad_update", "data_types.grad_accum_dtype")
def _immediate_sums(config: Config) -> Iterator[Fault]:
    summed = config.data_types.grad_accum_dtype
    if config.bf16.enabled and config.bf16.immediate_grad_update and summed in ("fp16", "bf16"):
        yield Fault(
            "bf16.immediate_grad_update",
            f'sums in fp32, but data_types.grad_accum_dtype is "{summed}"; leave one of them out',
        )


@rule("data_types.param_dtype", _FP16, _BF16)
def _weights_dtype(config: Config) -> Iterator[Fault]:
    wanted, model = config.data_types.param_dtype, model_dtype(config)
    if wanted not in (None, model):
        yield Fault(
            "data_types.param_dtype",
            f'"{wanted}" is not the "{model}" that fp16 and bf16 imply; leave it out',
        )


@rule(_AUTOCAST, f"{_ZERO}.zero_quantized_weights")
def _autocast_quantized(config: Config) -> Iterator[Fault]:
    if _uses_autocast(config) and config.zero_optimization.zero_quantized_weights:
        message = f"{_ZERO}.zero_quantized_weights is true too; keep one of the two"
        yield Fault(_AUTOCAST, message)


# ---- gradients -----------------------------------------------------------------------------------


@rule(_STAGE, _SCATTER, _OP, "prescale_gradients", "gradient_predivide_factor")
def _scaling_before_scatter(config: Config) -> Iterator[Fault]:
    zero, factor = config.zero_optimization, config.gradient_predivide_factor
    is_mean = config.gradient_allreduce_op == "mean"
    if not (zero.reduce_scatter and (zero.stage == 3 or (zero.stage == 2 and is_mean))):
        return
    remedy = f"with {_SCATTER} at stage {zero.stage}; remove it or disable {_SCATTER}"
    if config.prescale_gradients:
        yield Fault("prescale_gradients", f"true cannot be combined {remedy}")
    if factor != 1.0:
        yield Fault("gradient_predivide_factor", f"{factor} cannot be combined {remedy}")


@rule(_OP, _STAGE, f"{_ZERO}.zenflow", "compile.deepcompile")
def _sum(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    clashes = (
        (zero.stage == 3, f"{_STAGE} 3"),
        (zero.zenflow is not None, f"{_ZERO}.zenflow"),
        (config.compile.deepcompile, "compile.deepcompile"),
    )
    for is_on, what in clashes:
        if is_on and config.gradient_allreduce_op == "sum":
            yield Fault(_OP, f'"sum" cannot be combined with {what}; use "mean"')


@rule(
    _STAGE,
    "gradient_clipping",
    f"{_ZERO}.compute_grad_norm",
    f"{_ZERO}.zenflow",
    f"{_ZERO}.offload_optimizer.device",
)
def _no_norm(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    clashes = (
        (zero.stage not in (1, 2), f"needs {_STAGE} 1 or 2, got {zero.stage}"),
        (config.gradient_clipping > 0, "needs gradient_clipping 0"),
        (zero.zenflow is not None, f"cannot be combined with {_ZERO}.zenflow"),
        (zero.offloads_optimizer, f"cannot be combined with {_ZERO}.offload_optimizer"),
    )
    for is_on, what in clashes:
        if is_on and not zero.compute_grad_norm:
            yield Fault(f"{_ZERO}.compute_grad_norm", f"false {what}; change that or leave it out")


# ---- compiled graphs -----------------------------------------------------------------------------


@rule("compile", _STAGE, "tensor_parallel", "sequence_parallel_size")
def _passes(config: Config) -> Iterator[Fault]:
    stage, passes = config.zero_optimization.stage, config.compile.passes or ()
    parts = config.tensor_parallel
    needs = {
        "z1": (stage in (1, 2), f"{_STAGE} 1 or 2, got {stage}"),
        "z3": (stage == 3, f"{_STAGE} 3, got {stage}"),
        "autotp": (parts is not None and parts.is_on, "tensor_parallel.autotp_size"),
        "autosp": (config.sequence_parallel_size > 1, "sequence_parallel_size"),
    }
    for name in passes if config.compile.deepcompile else ():
        is_met, need = needs[name]
        if not is_met:
            yield Fault("compile.passes", f'"{name}" needs {need}; set that or remove it')


# ---- curvature and quantization ------------------------------------------------------------------


@rule("eigenvalue", "quantize_training")
def _eigenvalue(config: Config) -> Iterator[Fault]:
    section, old = config.eigenvalue, config.quantize_training
    found = {"eigenvalue": section} if section is not None and section.enabled else {}
    if old is not None and old.enabled and old.eigenvalue.enabled:
        if found:
            yield Fault(
                "quantize_training.eigenvalue.enabled",
                "true contradicts eigenvalue, which is on; switch one off",
            )
        found["quantize_training.eigenvalue"] = old.eigenvalue
    for path, each in found.items():
        if not each.layer_num:
            yield Fault(
                f"{path}.layer_num",
                "required if the section is enabled; set the number of blocks in layer_name",
            )


@rule("quantize_training", "compression_training")
def _two_quantizations(config: Config) -> Iterator[Fault]:
    old = config.quantize_training
    if old is not None and old.enabled and config.compression_training.weight_quantization.is_on:
        yield Fault(
            "quantize_training.enabled",
            "true contradicts compression_training.weight_quantization, which is on; switch one"
            " off",
        )


# ---- optimizers and schedules --------------------------------------------------------------------


_CHECKS = f"{_ZERO}.enable_sanity_checks"
_TORCH_ONLY = ("foreach", "fused", "maximize", "capturable", "differentiable")


def _type(config: Config) -> str:
    return "" if config.optimizer is None else config.optimizer.type


def _kind(config: Config) -> OptimizerKind | None:
    return KINDS.get(_type(config))


@rule(_TYPE, "fp16.loss_scale")
def _fixed_scale(config: Config) -> Iterator[Fault]:
    kind = _kind(config)
    if kind is not None and kind.needs_dynamic_scale and config.fp16.loss_scale != 0:
        yield Fault("fp16.loss_scale", f"{_type(config)} needs a dynamic scale; set 0")


@rule(_TYPE, _STAGE)
def _high_stage(config: Config) -> Iterator[Fault]:
    stage, kind = config.zero_optimization.stage, _kind(config)
    if kind is not None and stage > kind.max_stage:
        needed = f"{_STAGE} {kind.max_stage}"
        yield Fault(_TYPE, f"{kind.name} needs {needed}, got {stage}; lower the stage")


@rule(_TYPE, "optimizer.params.local_step_clipper", _CHECKS)
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


@rule(_TYPE, "optimizer.params", "optimizer.params.torch_adam")
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


@rule(_TYPE, "scheduler.params", "scheduler.params.total_num_steps")
def _no_training(config: Config) -> Iterator[Fault]:
    # The Hugging Face Trainer asks for 0 updates, without an optimizer, to evaluate at stage 3.
    if config.optimizer is None or config.scheduler is None:
        return
    if config.scheduler.params.get("total_num_steps") == 0:
        yield Fault("scheduler.params.total_num_steps", "expected an integer > 0, got 0")


@rule(_TYPE, "scheduler.type")
def _no_type(config: Config) -> Iterator[Fault]:
    for name, section in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        if section is not None and section.type == "auto":
            yield Fault(f"{name}.type", f'"auto" was not replaced by any program; name the {name}')


def is_class_of(module: str, name: str) -> bool:
    """Return whether a torch module, if imported, has a class: newer releases have more."""
    return isinstance(getattr(sys.modules.get(module), name, None), type)


def bad_types(config: Config, skip: tuple[str, ...]) -> Iterator[Fault]:
    """Yield a fault for each type that does not exist, and check the params of the likely one.

    `skip` are sections that have another fault, or that an object of the program replaces.
    """
    for name, section in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        if section is None or name in skip:
            continue
        kind, names = section.type, (*section.types, *section.torch_types, "auto")
        refused = KINDS[kind].refused if name == "optimizer" and kind in KINDS else ""
        if refused:
            yield Fault(f"{name}.type", f"{kind} cannot be used: {refused}")
        elif kind not in names and not is_class_of(section.home, kind):
            yield from under(name, _unknown(section))


def _unknown(section: Optimizer | Scheduler) -> Iterator[Fault]:
    meant = nearest(section.type, (*section.types, *section.torch_types))
    hint = f'did you mean "{meant}"?' if meant else f"name one of {', '.join(section.types)}"
    yield Fault(
        "type", f'"{section.type}" is neither built in nor a class of {section.home}; {hint}'
    )
    own = section.types.get(meant or "")
    fields = own.model_fields if own is not None else {}
    for key in section.params if fields else ():
        near = nearest(key, fields)
        if key not in fields and near is not None:
            yield Fault(f"params.{key}", f'unknown key of {meant}; did you mean "{near}"?')


RULES = tuple(one for one in tuple(globals().values()) if isinstance(one, Rule))
