"""Notes on valid settings that do less than their author may expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadal.config.compression import ActivationQuantizationSection
from hadal.config.data_efficiency import DataEfficiency
from hadal.config.offload import Aio
from hadal.config.precision import Amp
from hadal.config.report import Report
from hadal.config.rules import scales_by_fp16
from hadal.config.section import Section, default_of
from hadal.config.sparse_attention import KEYS, SparseAttention
from hadal.config.top_level import Config

_DISK_KEYS = (
    "nvme_path",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
)


def report_advice(config: Config, prepared: Mapping[str, Any], report: Report) -> None:
    """Report keys that have no effect because of other keys."""
    _advise_hysteresis(config, _written(prepared, "fp16"), report)
    if config.amp is not None and config.amp.enabled:
        _advise_amp(config.amp, _written(prepared, "amp"), report)
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        report.note_idle(
            "gradient_predivide_factor",
            "has no effect: prescale_gradients does the whole division before the sum",
        )
    shared, key = config.sequence_parallel_size, "communication_data_type"
    other = f"seq_parallel_{key}"
    if shared > 1 and prepared.get(key) is not None:
        report.note_idle(
            key, f"has no effect when {shared} ranks share a sequence; {other} applies"
        )
    if shared == 1 and config.seq_parallel_communication_data_type != "fp32":
        report.note_idle(other, "has no effect when no ranks share a sequence")
    _advise_disk_keys(config, report)
    logger = config.comms_logger
    if logger is not None and logger.enabled and logger.prof_all and logger.prof_ops:
        report.note_idle(
            "comms_logger.prof_ops", "has no effect unless prof_all, which records all, is false"
        )
    recomputed = config.activation_checkpointing
    if recomputed.number_checkpoints and not recomputed.contiguous_memory_optimization:
        report.note_idle(
            "activation_checkpointing.number_checkpoints",
            "has no effect without contiguous_memory_optimization",
        )
    staging = config.checkpoint.staging
    for name in type(staging).model_fields if not saves_behind(config) else ():
        if _is_set(staging, name):
            report.note_idle(f"checkpoint.staging.{name}", "has no effect without async_save")
    _advise_other_modes(config.sparse_attention, report)
    _advise_sampling(config.data_efficiency, report)
    _advise_calibration(config.compression_training.activation_quantization, report)


def _advise_sampling(section: DataEfficiency, report: Report) -> None:
    """Report keys of a sampler that is not there."""
    sampling = section.data_sampling
    is_off = any(
        "enabled" in one.model_fields_set and not one.enabled for one in (section, sampling)
    )
    if is_off or sampling.curriculum_learning.enabled or sampling.dynamic_batching.enabled:
        return
    path = "data_efficiency"
    keys: list[tuple[str, Section, str]] = [(path, section, "seed")]
    inner = ("num_epochs", "num_workers", "pin_memory")
    keys += [(f"{path}.data_sampling", sampling, name) for name in inner]
    for here, one, name in keys:
        if _is_set(one, name):
            report.note_idle(
                f"{here}.{name}",
                "has no effect without curriculum_learning or dynamic_batching in data_sampling",
            )


def _advise_disk_keys(config: Config, report: Report) -> None:
    """Report keys for a disk that are set although no state is on one."""
    zero = config.zero_optimization
    sections = (
        ("offload_param", zero.offload_param),
        ("offload_optimizer", zero.offload_optimizer),
    )
    if not any(section and section.device == "nvme" for _, section in sections):
        asked = [f"aio.{name}" for name in Aio.model_fields if _is_set(config.aio, name)]
        if _is_set(zero, "sub_group_size"):
            asked.insert(0, "zero_optimization.sub_group_size")
        for path in asked:
            report.note_idle(path, 'has no effect without an offload device "nvme"')
    for name, section in sections:
        if section is None or section.device != "cpu":
            continue
        for key in _DISK_KEYS:
            if key in type(section).model_fields and _is_set(section, key):
                report.note_idle(
                    f"zero_optimization.{name}.{key}",
                    'has no effect with device "cpu": it is for a disk ("nvme")',
                )


def saves_behind(config: Config) -> bool:
    """Return whether saves are asynchronous, by any of the keys that say so."""
    section = config.checkpoint
    is_decoupled = section.writer is not None and section.writer.decoupled
    return section.async_save or is_decoupled or config.datastates_ckpt is not None


def _advise_other_modes(section: SparseAttention | None, report: Report) -> None:
    """Report keys of the layout that belong to other modes."""
    if section is None:
        return
    for name in type(section).model_fields:
        if name not in ("mode", *KEYS[section.mode]) and _is_set(section, name):
            report.note_idle(
                f"sparse_attention.{name}", f'has no effect with mode "{section.mode}"'
            )


def _advise_calibration(section: ActivationQuantizationSection, report: Report) -> None:
    """Report a range that is calibrated otherwise than DeepSpeed's documentation says."""
    shared = section.shared_parameters
    if shared.enabled and "range_calibration" not in shared.model_fields_set:
        report.note(
            "compression_training.activation_quantization.shared_parameters.range_calibration",
            'not set: "dynamic", as in DeepSpeed\'s code (its documentation says "static")',
        )


def _is_set(section: Section, name: str) -> bool:
    """Return whether a key's value differs from its default."""
    return bool(getattr(section, name) != default_of(type(section).model_fields[name]))


def _written(prepared: Mapping[str, Any], name: str) -> set[str]:
    """Return the keys of a section that the JSON sets to values other than null."""
    section = prepared.get(name)
    keys = section.items() if isinstance(section, Mapping) else ()
    return {key for key, value in keys if value is not None}


def _advise_hysteresis(config: Config, written: set[str], report: Report) -> None:
    is_dynamic = scales_by_fp16(config) and config.fp16.loss_scale == 0
    if is_dynamic and config.zero_optimization.stage == 0:
        for name in ("hysteresis", "consecutive_hysteresis"):
            if name in written:
                report.note_idle(
                    f"fp16.{name}",
                    "has no effect at zero_optimization.stage 0, where every overflow halves the"
                    " loss scale",
                )


def _advise_amp(amp: Amp, written: set[str], report: Report) -> None:
    cast = amp.cast_model_type or {"O2": "fp16", "O3": "fp16"}.get(amp.opt_level, "fp32")
    scale = amp.loss_scale or {"O1": "dynamic", "O2": "dynamic"}.get(amp.opt_level, 1)
    if cast == "fp32":
        for name in sorted(written & {"keep_batchnorm_fp32", "master_weights"}):
            report.note_idle(f"amp.{name}", "has no effect with fp32 weights")
    if scale != "dynamic":
        for name in sorted(written & {"min_loss_scale", "max_loss_scale"}):
            report.note_idle(f"amp.{name}", "has no effect unless the loss scale is dynamic")
