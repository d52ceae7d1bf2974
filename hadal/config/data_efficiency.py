"""`data_efficiency`, `curriculum_learning` and `progressive_layer_drop`: less data."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import ClassVar, Literal, TypeAlias

from hadal.config.section import (
    NO_EFFECT,
    Moved,
    Section,
    Switched,
    key,
    rule,
    section,
    shown,
    under,
)
from hadal.config.values import Boolean, Integer, Integers, Number, Text
from hadal.errors import Fault

Pace: TypeAlias = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


_PACE_NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class PaceConfig(Section):
    """Pace at which the difficulty grows; the required keys depend on the schedule type."""

    total_curriculum_step: Integer | None = key(
        None, "fixed_linear, fixed_root: updates until the full difficulty.", gt=0
    )
    difficulty_step: Integer | None = key(
        None, "fixed_linear, fixed_root: the difficulty is a multiple of this.", gt=0
    )
    root_degree: Number | None = key(None, "fixed_root: degree of the root.", gt=0)
    difficulty: Integers | None = key(None, "fixed_discrete: levels, in order.")
    max_step: Integers | None = key(
        None, "fixed_discrete: last update of each level except the last."
    )

    def contradictions(self) -> Iterator[Fault]:
        """Yield the faults of the levels and their steps."""
        levels, steps = self.difficulty, self.max_step
        if levels is not None and steps is not None and len(levels) != len(steps) + 1:
            yield Fault(
                "difficulty",
                f"expected one level more than the {len(steps)} steps of max_step, got"
                f" {len(levels)}",
            )
        if any(before >= after for before, after in pairwise(steps or ())):
            yield Fault("max_step", f"expected ascending steps, got {shown(list(steps or ()))}")


def _pace(section: "CurriculumLearning | CurriculumMetric") -> Iterator[Fault]:
    """Check a difficulty schedule, whose required keys depend on its type."""
    yield from section.needs("min_difficulty", "max_difficulty", "schedule_type")
    pace, kind = section.schedule_config or PaceConfig(), section.schedule_type
    yield from under("schedule_config", pace.needs(*_PACE_NEEDS[kind or "custom"]))
    yield from under("schedule_config", pace.contradictions())
    first, last = section.min_difficulty, section.max_difficulty
    if first is not None and last is not None and first > last:
        yield Fault("max_difficulty", f"{last} is less than min_difficulty {first}; raise it")
    step = pace.difficulty_step
    if kind in ("fixed_linear", "fixed_root") and step and last is not None and step > last > 0:
        yield Fault(
            "schedule_config.difficulty_step",
            f"{step} is more than max_difficulty {last}, so that nothing would grow; lower it",
        )


class CurriculumLearning(Switched):
    """Short sequences first (the older form; see also `data_efficiency`)."""

    required = ("enabled",)

    enabled: Boolean = key(False, "Increase the difficulty during training. Required.")
    curriculum_type: Literal["seqlen"] | None = key(
        None, "Measure of difficulty: the sequence length. Required."
    )
    min_difficulty: Integer | None = key(None, "Length at the start, in tokens. Required.", ge=1)
    max_difficulty: Integer | None = key(None, "Length at the end, in tokens. Required.", ge=1)
    schedule_type: Pace | None = key(
        None,
        "Kind of schedule; for custom, pass the function to"
        " hadal.data_efficiency.ordered.set_custom_schedules. Required.",
    )
    schedule_config: PaceConfig | None = key(None, "Settings of the schedule.")
    truncate: Boolean | None = key(
        None,
        "true: Hadal truncates the inputs of forward; false: forward is given the length as"
        " curriculum_seqlen; null: the latter if the model takes it, else the former. Hadal's own"
        " key.",
    )

    @rule()
    def _schedule(self) -> Iterator[Fault]:
        if self.enabled:
            yield from self.needs("curriculum_type")
            yield from _pace(self)


_MASTER = (
    "Does nothing by itself: enable the techniques below one by one. false is refused if one of"
    " them is enabled."
)
_RESERVED = "Reserved."


class CurriculumMetric(Section):
    """One measure of difficulty."""

    index_to_sample_path: Text | None = key(
        None,
        "File with samples ordered by difficulty, without .bin. Required, but for single_cluster.",
    )
    index_to_metric_path: Text | None = key(
        None,
        "File with the values of the measure, without .bin. Required for values, but for"
        " single_cluster.",
    )
    difficulty_type: Literal["value", "percentile"] | None = key(
        None, "Unit of the difficulty; max_difficulty is the number of percentiles. Required."
    )
    clustering_type: Literal["schedule_based", "single_cluster"] | None = key(
        None,
        "schedule_based admits samples by their difficulty; single_cluster admits all, for a"
        " difficulty that only a function given to loader.set_post_process uses. Required.",
    )
    min_difficulty: Integer | None = key(None, "Difficulty at the start. Required.")
    max_difficulty: Integer | None = key(None, "Difficulty at the end. Required.")
    schedule_type: Pace | None = key(
        None,
        "Kind of schedule; for custom, pass the function to"
        " hadal.data_efficiency.ordered.set_custom_schedules. Required.",
    )
    schedule_config: PaceConfig | None = key(None, "Settings of the schedule.")

    def contradictions(self) -> Iterator[Fault]:
        """Yield the faults of a measure that is used."""
        yield from _pace(self)
        yield from self.needs("difficulty_type", "clustering_type")
        yield from self._levels()
        if self.clustering_type == "schedule_based":
            yield from self.needs("index_to_sample_path")
            if self.difficulty_type == "value":
                yield from self.needs("index_to_metric_path")

    def _levels(self) -> Iterator[Fault]:
        """Check difficulties that admit samples: once admitted, a sample stays so."""
        last = self.max_difficulty
        if self.difficulty_type == "percentile" and last is not None and last < 1:
            yield Fault(
                "max_difficulty",
                f"expected 1 or more for percentiles, of which it is the number, got {last}",
            )
        levels = (self.schedule_config or PaceConfig()).difficulty or ()
        # A level that reaches the maximum is the last one.
        ends = (n for n, level in enumerate(levels, 1) if last is not None and level >= last)
        used = levels[: next(ends, None)]
        admits = self.clustering_type == "schedule_based"
        if admits and any(before > after for before, after in pairwise(used)):
            yield Fault(
                "schedule_config.difficulty",
                f"expected levels that do not fall, got {shown(list(levels))}",
            )


class MetricCurriculum(Switched):
    """A sampler that admits harder samples over time."""

    enabled: Boolean = key(False, "Sample by difficulty.")
    data_cluster_path: Text | None = key(
        None, "Directory to which rank 0 writes the samples of each difficulty; null: nowhere."
    )
    curriculum_metrics: dict[str, CurriculumMetric] | None = key(
        None, "Metrics, keyed by name; with several, each must admit a sample."
    )

    @rule()
    def _metrics(self) -> Iterator[Fault]:
        if not self.enabled:
            return
        yield from self.needs("curriculum_metrics")
        if self.curriculum_metrics is not None and not self.curriculum_metrics:
            yield Fault(
                "curriculum_metrics", "has none; set at least one metric, or disable the section"
            )
        for name, metric in (self.curriculum_metrics or {}).items():
            yield from under(f"curriculum_metrics.{name}", metric.contradictions())


class DynamicBatching(Switched):
    """Batches with about the same number of tokens, with the learning rate scaled to match."""

    enabled: Boolean = key(
        False, "Batch by tokens: the batch sizes count packs of samples. Requires max_tokens."
    )
    metrics_path: Text | None = key(
        None,
        "Directory of lengths (seqlen/seqlen_sample_to_metric); measured and written if missing."
        " Not read if the data set has an attribute lengths or sizes. null: not kept.",
    )
    lr_scaling_method: Literal["linear", "sqrt", "none"] = key(
        "linear", "Scaling of the learning rate with the samples of each update."
    )
    base_batch_size: Integer | None = key(
        None,
        "Samples of an update with the configured learning rate; null: the mean of the first"
        " epoch. DeepSpeed takes train_batch_size.",
        ge=1,
    )
    loss_weighting: Literal["tokens", "samples", "none"] = key(
        "tokens",
        "Weight of each micro-batch in the mean gradient: its tokens (for a loss that is a mean"
        " over tokens), its samples, or the same weight for all, as in DeepSpeed.",
    )
    min_batch_size: Integer = key(1, "Smallest pack, in samples.", ge=1)
    max_batch_size: Integer | None = key(None, "Largest pack, in samples.", ge=1)
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = key(
        "dataloader",
        "Order in which samples are packed: that of the data set, shuffled by seed and epoch, or"
        " ascending by length.",
    )
    max_tokens: Integer | None = key(None, "Maximum number of tokens in a pack.", gt=0)
    verbose: Boolean = key(False, "Log each update's samples and tokens.")

    @rule()
    def _limits(self) -> Iterator[Fault]:
        if not self.enabled:
            return
        yield from self.needs("max_tokens")
        least, most = self.min_batch_size, self.max_batch_size
        if most is not None and most < least:
            yield Fault("max_batch_size", f"{most} is less than min_batch_size {least}")


class DataSampling(Section):
    """Options of the sampler."""

    enabled: Boolean = key(False, _MASTER)
    num_epochs: Integer = key(1000, "Maximum number of passes over the data.", ge=1)
    num_workers: Integer = key(0, "Number of data-loading processes.", ge=0)
    pin_memory: Boolean = key(False, "Load into pinned memory.")
    curriculum_learning: MetricCurriculum = section(MetricCurriculum, "Sampling by difficulty.")
    dynamic_batching: DynamicBatching = section(DynamicBatching, "Batching by tokens.")

    @rule()
    def _two_samplers(self) -> Iterator[Fault]:
        if self.dynamic_batching.enabled and self.curriculum_learning.enabled:
            yield Fault(
                "dynamic_batching.enabled",
                "data_efficiency.data_sampling.curriculum_learning chooses the samples of each"
                " batch, too; switch one of the two off",
            )


class LtdScheduleConfig(Section):
    """Pace at which the number of kept tokens grows."""

    require_steps: Integer | None = key(None, "Updates until all tokens are kept. Required.", gt=0)
    seq_per_step: Integer | None = key(
        None, "The number of tokens is a multiple of this. Required.", gt=0
    )


class LtdSchedule(Section):
    """Schedule for the number of kept tokens."""

    min_value: Integer | None = key(None, "Tokens kept at the start. Required.", ge=1)
    max_value: Integer | None = key(
        None, "Tokens kept at the end: the whole sequence. Required.", ge=1
    )
    schedule_type: Literal["fixed_linear"] | None = key(None, "Kind of schedule. Required.")
    schedule_config: LtdScheduleConfig | None = key(None, "Settings of the schedule.")

    def contradictions(self) -> Iterator[Fault]:
        """Yield the faults of a schedule that is used."""
        yield from self.needs("min_value", "max_value", "schedule_type")
        pace = self.schedule_config or LtdScheduleConfig()
        yield from under("schedule_config", pace.needs("require_steps", "seq_per_step"))
        first, last = self.min_value, self.max_value
        if first is not None and last is not None and first > last:
            yield Fault("max_value", f"{last} is less than min_value {first}; raise it")


class LayerTokenLrSchedule(Section):
    """A learning rate by tokens, which DeepSpeed never implemented."""

    enabled: Literal[False] = key(False, "Must be false.")
    total_layer_tokens: Integer | None = key(None, _RESERVED, mark=NO_EFFECT)
    warmup_type: Text | None = key(None, _RESERVED, mark=NO_EFFECT)
    warmup_layer_tokens: Integer | None = key(None, _RESERVED, mark=NO_EFFECT)


class RandomLtd(Switched):
    """Layers that process a random subset of the tokens, which grows over time."""

    enabled: Boolean = key(False, "Drop tokens.")
    total_layer_num: Integer | None = key(None, "Number of layers in the model.", ge=1)
    random_ltd_layer_num: Integer | None = key(
        None, "Number of layers that drop tokens: as many as random_ltd_layer_id has.", ge=0
    )
    random_ltd_layer_id: Integers | None = key(
        None,
        "Numbers of these layers, ascending: the last number in each one's full name. Required.",
    )
    model_mask_name: Text | None = key(
        None, "Name of the layers' argument that holds the attention mask; null: there is none."
    )
    model_type: Literal["encoder", "decoder"] | None = key(
        None,
        "Kind of model; a decoder's mask may be one for all sequences, [length, length]. Required.",
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = key(
        None, "Order of the hidden states' dimensions. Required."
    )
    random_ltd_schedule: LtdSchedule | None = key(
        None, "Schedule for the number of kept tokens. Required."
    )
    layer_token_lr_schedule: LayerTokenLrSchedule = section(LayerTokenLrSchedule, _RESERVED)
    global_batch_size: Integer | None = key(None, "Set from train_batch_size.", mark=NO_EFFECT)
    micro_batch_size: Integer | None = key(
        None, "Set from train_micro_batch_size_per_gpu.", mark=NO_EFFECT
    )

    @rule()
    def _layers(self) -> Iterator[Fault]:
        if not self.enabled:
            return
        yield from self.needs("random_ltd_layer_id", "model_type", "hidden_state_order")
        yield from self.needs("random_ltd_schedule")
        ids, count = self.random_ltd_layer_id, self.random_ltd_layer_num
        if ids is None:
            return
        if count is not None and len(ids) != count:
            yield Fault(
                "random_ltd_layer_num",
                f"{count} differs from the {len(ids)} layers of random_ltd_layer_id;"
                f" set {len(ids)}",
            )
        if not ids or min(ids) < 0 or any(a >= b for a, b in pairwise(ids)):
            yield Fault(
                "random_ltd_layer_id",
                f"expected ascending numbers of layers, got {shown(list(ids))}",
            )
        if self.total_layer_num is not None and self.total_layer_num < len(ids):
            yield Fault(
                "total_layer_num",
                f"{self.total_layer_num} is less than the {len(ids)} layers of"
                " random_ltd_layer_id; raise it",
            )

    @rule()
    def _kept_tokens(self) -> Iterator[Fault]:
        if self.enabled and self.random_ltd_schedule is not None:
            yield from under("random_ltd_schedule", self.random_ltd_schedule.contradictions())


class DataRouting(Section):
    """Routing of tokens inside the model."""

    enabled: Boolean = key(False, _MASTER)
    random_ltd: RandomLtd = section(RandomLtd, "Dropping tokens.")


class DataEfficiency(Section):
    """Techniques that reach the same quality with less data."""

    moved: ClassVar[Mapping[str, Moved]] = {
        "curriculum_learning": Moved("curriculum_learning"),
        "random_ltd": Moved("data_efficiency.data_routing.random_ltd"),
    }

    enabled: Boolean = key(False, _MASTER)
    seed: Integer = key(1234, "Seed of the sampler.", ge=0)
    data_sampling: DataSampling = section(DataSampling, "The sampler.")
    data_routing: DataRouting = section(DataRouting, "Tokens inside the model.")

    @rule()
    def _outer_switches(self) -> Iterator[Fault]:
        """Refuse a switch that is off around a technique that is on."""
        techniques = (
            ("data_sampling", "curriculum_learning"),
            ("data_sampling", "dynamic_batching"),
            ("data_routing", "random_ltd"),
        )
        for name, technique in techniques:
            middle = getattr(self, name)
            for where, outer in (("enabled", self), (f"{name}.enabled", middle)):
                is_off = "enabled" in outer.model_fields_set and not outer.enabled
                if is_off and getattr(middle, technique).enabled:
                    path = f"data_efficiency.{name}.{technique}.enabled"
                    message = f"false contradicts {path}, which is true; change one of the two"
                    yield Fault(where, message)


class ProgressiveLayerDrop(Switched):
    """Passes the model a keep probability that falls from 1 to theta."""

    required = ("enabled",)

    enabled: Boolean = key(False, "Skip layers. Required.")
    theta: Number | None = key(None, "Final keep probability. Required.", ge=0, le=1)
    gamma: Number | None = key(None, "Rate of the decrease, per update. Required.", gt=0)

    @rule()
    def _numbers(self) -> Iterator[Fault]:
        yield from self.needs("theta", "gamma") if self.enabled else ()
