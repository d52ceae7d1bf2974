"""Keys that do nothing as given, and keys that request something that is not built yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from hadal.config.data_efficiency import DataEfficiency
from hadal.config.not_built import NOT_BUILT
from hadal.config.offload import Aio
from hadal.config.prepare import Report
from hadal.config.rules import scales_by_fp16
from hadal.config.section import Mark, Section, default_of, mark_of, shown
from hadal.config.sparse_attention import KEYS
from hadal.config.top_level import Config


class _Reports(NamedTuple):
    report: Report
    stage: int
    idle: Report
    """Gets the keys that do nothing; below a switch turned off on purpose it is not read."""


def report_unbuilt(config: Section, report: Report, *, stage: int, skip: tuple[str, ...]) -> None:
    """Report every key whose value would change something that this version does not do.

    A key that requests something and gets nothing is noted: one without effect, one that acts at
    other stages only, and one below a switch that is not given. A switch that is given and off
    means that silence is wanted.
    """
    reports = _Reports(report, stage, report)
    for name in type(config).model_fields:
        if name not in skip:
            _report_key(reports, config, name, "")


def _report_key(reports: _Reports, section: Section, name: str, path: str) -> None:
    field = type(section).model_fields[name]
    mark, value = mark_of(field), getattr(section, name)
    here = f"{path}.{name}" if path else name
    if value is None or here in reports.report.faults:
        return
    default = default_of(field)
    if reports.stage not in mark.stages:
        is_off = isinstance(value, Section) and not value.is_on
        if mark.asks(value, default) and not is_off:
            only = _stages(mark)
            reports.idle.note_idle(here, f"has no effect at stage {reports.stage}, only at {only}")
    elif mark.status == "acts":
        child = type(section).child(name, {"type": getattr(section, "type", None)})
        for where, inner in child.sections(here, value) if child is not None else ():
            _report_section(reports, inner, where)
    elif not mark.asks(value, default):
        return
    elif mark.status == "no effect":
        reports.idle.note_idle(here, f"{shown(value)} has no effect")
    elif mark.serves:
        reports.idle.note_idle(here, f"has no effect without {mark.serves}, which is not built yet")
    else:
        reports.report.not_built(here, _refusal(here, value, default))


def _stages(mark: Mark) -> str:
    *most, last = (str(stage) for stage in mark.stages)
    return f"stages {', '.join(most)} and {last}" if most else f"stage {last}"


def _refusal(path: str, value: Any, default: Any) -> str:
    what = "the section" if isinstance(value, Section) else shown(value)
    why, remedy = NOT_BUILT[path]
    because = f": {why}" if why else ""
    return f"{what} is not built yet{because}; {remedy or f'leave it out or set {shown(default)}'}"


def _report_section(reports: _Reports, section: Section, path: str) -> None:
    """Visit the switch first: a section that is off or refused as a whole requests nothing else."""
    if section.switch is not None:
        owner, _, switch = section.switch.rpartition(".")
        before = len(reports.report.unbuilt)
        where = f"{path}.{owner}" if owner else path
        _report_key(reports, attrgetter(owner)(section) if owner else section, switch, where)
        if len(reports.report.unbuilt) > before:
            return
        here = f"{path}.{section.switch}"
        if not section.is_on:
            if not section.is_switched and here not in reports.report.autos:
                _note_without(reports, section, path, here)
            return
    elif "enabled" in section.model_fields_set and not section.enabled:  # type: ignore[attr-defined]
        reports = reports._replace(idle=Report())
    for name in type(section).model_fields:
        if name != section.switch:
            _report_key(reports, section, name, path)


def _note_without(reports: _Reports, section: Section, path: str, switch: str) -> None:
    """Note each key below that requests something, although the section's switch is not given."""
    for name in [n for n in type(section).model_fields if n in section.model_fields_set]:
        field, value = type(section).model_fields[name], getattr(section, name)
        here = f"{path}.{name}"
        if isinstance(value, Section):
            _note_without(reports, value, here, switch)
        elif mark_of(field).asks(value, default_of(field)):
            reports.idle.note_idle(here, f"has no effect without {switch}")


# ---- keys without effect because of other keys ---------------------------------------------------


def report_advice(config: Config, prepared: Mapping[str, Any], report: Report) -> None:
    """Report keys that have no effect because of other keys, and surprising defaults."""
    notes = (*_gradients(config, prepared), *_precision(config, prepared), *_disk_keys(config))
    for path, message in (*notes, *_sampling(config.data_efficiency), *_others(config)):
        report.note_idle(path, message)
    shared = config.compression_training.activation_quantization.shared_parameters
    if shared.enabled and "range_calibration" not in shared.model_fields_set:
        report.note(
            "compression_training.activation_quantization.shared_parameters.range_calibration",
            'not set: "dynamic", as in DeepSpeed\'s code (its documentation says "static")',
        )
    size = config.vocabulary_size
    if size is not None and size % 8:
        message = f"{size} is not a multiple of 8; a multiple of 8 would be faster"
        report.note("vocabulary_size", message)


_DISK_KEYS = (
    *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
    *("pipeline_read", "pipeline_write", "fast_init"),
)
Notes = Iterator[tuple[str, str]]
"""Keys that do nothing, and why."""


def _gradients(config: Config, prepared: Mapping[str, Any]) -> Notes:
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        message = "has no effect: prescale_gradients does the whole division before the sum"
        yield "gradient_predivide_factor", message
    shared, key = config.sequence_parallel_size, "communication_data_type"
    if shared > 1 and prepared.get(key) is not None:
        other = f"seq_parallel_{key}"
        yield key, f"has no effect when {shared} ranks share a sequence; {other} applies"
    if shared == 1 and config.seq_parallel_communication_data_type != "fp32":
        yield f"seq_parallel_{key}", "has no effect when no ranks share a sequence"


def _precision(config: Config, prepared: Mapping[str, Any]) -> Notes:
    is_dynamic = scales_by_fp16(config) and config.fp16.loss_scale == 0
    if is_dynamic and config.zero_optimization.stage == 0:
        for name in ("hysteresis", "consecutive_hysteresis"):
            if name in _written(prepared, "fp16"):
                yield (
                    f"fp16.{name}",
                    "has no effect at zero_optimization.stage 0, where every overflow halves the"
                    " loss scale",
                )
    amp, written = config.amp, _written(prepared, "amp")
    if amp is None or not amp.enabled:
        return
    cast = amp.cast_model_type or {"O2": "fp16", "O3": "fp16"}.get(amp.opt_level, "fp32")
    scale = amp.loss_scale or {"O1": "dynamic", "O2": "dynamic"}.get(amp.opt_level, 1)
    if cast == "fp32":
        for name in sorted(written & {"keep_batchnorm_fp32", "master_weights"}):
            yield f"amp.{name}", "has no effect with fp32 weights"
    if scale != "dynamic":
        for name in sorted(written & {"min_loss_scale", "max_loss_scale"}):
            yield f"amp.{name}", "has no effect unless the loss scale is dynamic"


def _disk_keys(config: Config) -> Notes:
    """Find keys for a disk that are set although no state is on one."""
    zero, path = config.zero_optimization, "zero_optimization"
    sections = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
    if not any(section and section.device == "nvme" for section in sections.values()):
        asked = [f"{path}.sub_group_size"] if _is_set(zero, "sub_group_size") else []
        asked += [f"aio.{name}" for name in Aio.model_fields if _is_set(config.aio, name)]
        for key in asked:
            yield key, 'has no effect without an offload device "nvme"'
    for name, section in sections.items():
        if section is None or section.device != "cpu":
            continue
        for key in _DISK_KEYS:
            if key in type(section).model_fields and _is_set(section, key):
                message = 'has no effect with device "cpu": it is for a disk ("nvme")'
                yield f"{path}.{name}.{key}", message


def _sampling(section: DataEfficiency) -> Notes:
    """Find keys of a sampler that is not there."""
    sampling = section.data_sampling
    switches = (section, sampling)
    is_off = any("enabled" in one.model_fields_set and not one.enabled for one in switches)
    if is_off or sampling.curriculum_learning.enabled or sampling.dynamic_batching.enabled:
        return
    message = "has no effect without curriculum_learning or dynamic_batching in data_sampling"
    if _is_set(section, "seed"):
        yield "data_efficiency.seed", message
    for name in ("num_epochs", "num_workers", "pin_memory"):
        if _is_set(sampling, name):
            yield f"data_efficiency.data_sampling.{name}", message


def _others(config: Config) -> Notes:
    logger, recomputed = config.comms_logger, config.activation_checkpointing
    if logger is not None and logger.enabled and logger.prof_all and logger.prof_ops:
        message = "has no effect unless prof_all, which records all, is false"
        yield "comms_logger.prof_ops", message
    if recomputed.number_checkpoints and not recomputed.contiguous_memory_optimization:
        path = "activation_checkpointing.number_checkpoints"
        yield path, "has no effect without contiguous_memory_optimization"
    compiled, offload = config.compile, config.zero_optimization.offload_optimizer
    keeps_all = config.zero_optimization.offloads_optimizer and offload and offload.ratio == 1
    if compiled.deepcompile and compiled.offload_opt_states and keeps_all:
        message = "has no effect with zero_optimization.offload_optimizer, which keeps all states"
        yield "compile.offload_opt_states", f"{message} off the device in updates too"
    staging, layout = config.checkpoint.staging, config.sparse_attention
    for name in type(staging).model_fields if not saves_behind(config) else ():
        if _is_set(staging, name):
            yield f"checkpoint.staging.{name}", "has no effect without async_save"
    for name in type(layout).model_fields if layout is not None else ():
        if (
            layout is not None
            and name not in ("mode", *KEYS[layout.mode])
            and _is_set(layout, name)
        ):
            yield f"sparse_attention.{name}", f'has no effect with mode "{layout.mode}"'


def saves_behind(config: Config) -> bool:
    """Return whether saves are asynchronous, by any of the keys that say so."""
    section = config.checkpoint
    is_decoupled = section.writer is not None and section.writer.decoupled
    return section.async_save or is_decoupled or config.datastates_ckpt is not None


def _is_set(section: Section, name: str) -> bool:
    """Return whether a key's value differs from its default."""
    return bool(getattr(section, name) != default_of(type(section).model_fields[name]))


def _written(prepared: Mapping[str, Any], name: str) -> set[str]:
    """Return the keys of a section that the JSON sets to values other than null."""
    section = prepared.get(name)
    keys = section.items() if isinstance(section, Mapping) else ()
    return {key for key, value in keys if value is not None}
