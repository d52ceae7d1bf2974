"""Contradictions in curricula, dynamic batching, and dropping of tokens and layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hadal.config.data_efficiency import (
    CurriculumLearning,
    CurriculumMetric,
    DataEfficiency,
    DataRouting,
    DataSampling,
    DynamicBatching,
    LtdSchedule,
    LtdScheduleConfig,
    PaceConfig,
)
from hadal.config.plain import shown
from hadal.config.rules.rule import missing, reading
from hadal.config.top_level import Config
from hadal.errors import Fault

_SAMPLING = "data_efficiency.data_sampling"
_LTD = "data_efficiency.data_routing.random_ltd"
_PACE_NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def _pace(section: CurriculumLearning | CurriculumMetric, path: str) -> Iterator[Fault]:
    """Check a difficulty schedule, whose required keys depend on its type."""
    yield from missing(section, path, "min_difficulty", "max_difficulty", "schedule_type")
    here, pace = f"{path}.schedule_config", section.schedule_config or PaceConfig()
    yield from missing(pace, here, *_PACE_NEEDS[section.schedule_type or "custom"])
    yield from _pace_levels(pace, here)
    first, last = section.min_difficulty, section.max_difficulty
    if first is not None and last is not None and first > last:
        yield Fault(
            f"{path}.max_difficulty", f"{last} is less than min_difficulty {first}; raise it"
        )
    step, kind = pace.difficulty_step, section.schedule_type
    if kind in ("fixed_linear", "fixed_root") and step and last is not None and step > last > 0:
        yield Fault(
            f"{here}.difficulty_step",
            f"{step} is more than max_difficulty {last}, so that nothing would grow; lower it",
        )


def _pace_levels(pace: PaceConfig, here: str) -> Iterator[Fault]:
    levels, steps = pace.difficulty, pace.max_step
    if levels is not None and steps is not None and len(levels) != len(steps) + 1:
        yield Fault(
            f"{here}.difficulty",
            f"expected one level more than the {len(steps)} steps of max_step, got {len(levels)}",
        )
    if any(before >= after for before, after in pairwise(steps or ())):
        yield Fault(f"{here}.max_step", f"expected ascending steps, got {shown(list(steps or ()))}")


@reading("curriculum_learning")
def _curriculum(config: Config) -> Iterator[Fault]:
    section = config.curriculum_learning
    if section is not None and section.enabled:
        yield from missing(section, "curriculum_learning", "curriculum_type")
        yield from _pace(section, "curriculum_learning")


@reading("data_efficiency")
def _sampling(config: Config) -> Iterator[Fault]:
    path = _SAMPLING
    sampling = config.data_efficiency.data_sampling
    curriculum, batching = sampling.curriculum_learning, sampling.dynamic_batching
    if curriculum.enabled:
        yield from missing(curriculum, f"{path}.curriculum_learning", "curriculum_metrics")
        if curriculum.curriculum_metrics is not None and not curriculum.curriculum_metrics:
            yield Fault(
                f"{path}.curriculum_learning.curriculum_metrics",
                "has none; set at least one metric, or disable the section",
            )
        for name, metric in (curriculum.curriculum_metrics or {}).items():
            here = f"{path}.curriculum_learning.curriculum_metrics.{name}"
            yield from _pace(metric, here)
            yield from missing(metric, here, "difficulty_type", "clustering_type")
            yield from _metric_levels(metric, here)
            if metric.clustering_type == "schedule_based":
                yield from missing(metric, here, "index_to_sample_path")
            if (metric.clustering_type, metric.difficulty_type) == ("schedule_based", "value"):
                yield from missing(metric, here, "index_to_metric_path")
    if batching.enabled:
        yield from _batching(batching, f"{path}.dynamic_batching")
        if curriculum.enabled:
            yield Fault(
                f"{path}.dynamic_batching.enabled",
                f"{path}.curriculum_learning chooses the samples of each batch, too; switch one of"
                " the two off",
            )


def _metric_levels(metric: CurriculumMetric, path: str) -> Iterator[Fault]:
    """Check difficulties that admit samples: once admitted, a sample stays so."""
    last = metric.max_difficulty
    if metric.difficulty_type == "percentile" and last is not None and last < 1:
        yield Fault(
            f"{path}.max_difficulty",
            f"expected 1 or more for percentiles, of which it is the number, got {last}",
        )
    levels = (metric.schedule_config or PaceConfig()).difficulty or ()
    # A level that reaches the maximum is the last one.
    end = next((n for n, level in enumerate(levels) if last is not None and level >= last), None)
    used = levels[: None if end is None else end + 1]
    admits = metric.clustering_type == "schedule_based"
    if admits and any(before > after for before, after in pairwise(used)):
        yield Fault(
            f"{path}.schedule_config.difficulty",
            f"expected levels that do not fall, got {shown(list(levels))}",
        )


def _batching(batching: DynamicBatching, path: str) -> Iterator[Fault]:
    yield from missing(batching, path, "max_tokens")
    least, most = batching.min_batch_size, batching.max_batch_size
    if most is not None and most < least:
        yield Fault(f"{path}.max_batch_size", f"{most} is less than min_batch_size {least}")


@reading("data_efficiency")
def _token_dropping(config: Config) -> Iterator[Fault]:
    ltd, path = config.data_efficiency.data_routing.random_ltd, _LTD
    if not ltd.enabled:
        return
    yield from missing(ltd, path, "random_ltd_layer_id", "model_type", "hidden_state_order")
    yield from missing(ltd, path, "random_ltd_schedule")
    ids, count, total = ltd.random_ltd_layer_id, ltd.random_ltd_layer_num, ltd.total_layer_num
    if ids is not None:
        if count is not None and len(ids) != count:
            yield Fault(
                f"{path}.random_ltd_layer_num",
                f"{count} differs from the {len(ids)} layers of random_ltd_layer_id;"
                f" set {len(ids)}",
            )
        if not ids or min(ids) < 0 or any(a >= b for a, b in pairwise(ids)):
            yield Fault(
                f"{path}.random_ltd_layer_id",
                f"expected ascending numbers of layers, got {shown(list(ids))}",
            )
        if total is not None and total < len(ids):
            yield Fault(
                f"{path}.total_layer_num",
                f"{total} is less than the {len(ids)} layers of random_ltd_layer_id; raise it",
            )
    if ltd.random_ltd_schedule is not None:
        yield from _kept_tokens(ltd.random_ltd_schedule, f"{path}.random_ltd_schedule")


def _kept_tokens(schedule: LtdSchedule, path: str) -> Iterator[Fault]:
    yield from missing(schedule, path, "min_value", "max_value", "schedule_type")
    pace, first, last = schedule.schedule_config, schedule.min_value, schedule.max_value
    here = f"{path}.schedule_config"
    yield from missing(pace or LtdScheduleConfig(), here, "require_steps", "seq_per_step")
    if first is not None and last is not None and first > last:
        yield Fault(f"{path}.max_value", f"{last} is less than min_value {first}; raise it")


@reading("data_efficiency")
def _outer_switches(config: Config) -> Iterator[Fault]:
    """Refuse a switch that is off around a technique that is on."""
    outer = config.data_efficiency
    sampling, routing = outer.data_sampling, outer.data_routing
    inner: dict[str, tuple[DataSampling | DataRouting, bool]] = {
        f"{_SAMPLING}.curriculum_learning": (sampling, sampling.curriculum_learning.enabled),
        f"{_SAMPLING}.dynamic_batching": (sampling, sampling.dynamic_batching.enabled),
        _LTD: (routing, routing.random_ltd.enabled),
    }
    for path, (middle, is_on) in inner.items():
        around: tuple[tuple[str, DataEfficiency | DataSampling | DataRouting], ...]
        around = (("data_efficiency", outer), (path.rpartition(".")[0], middle))
        for where, section in around:
            is_off = "enabled" in section.model_fields_set and not section.enabled
            if is_on and is_off:
                yield Fault(
                    f"{where}.enabled",
                    f"false contradicts {path}.enabled, which is true; change one of the two",
                )


@reading("progressive_layer_drop")
def _layer_drop(config: Config) -> Iterator[Fault]:
    section = config.progressive_layer_drop
    if section is not None and section.enabled:
        yield from missing(section, "progressive_layer_drop", "theta", "gamma")


RULES = (_curriculum, _sampling, _token_dropping, _outer_switches, _layer_drop)
