"""`data_efficiency`, `curriculum_learning` and `progressive_layer_drop`: less data."""

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

from hadal.config.section import NO_EFFECT, Section, key, section
from hadal.config.values import Boolean, Integer, Integers, Number, Text

Pace: TypeAlias = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


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


class CurriculumLearning(Section):
    """Short sequences first (the older form; see also `data_efficiency`)."""

    switch: ClassVar[str | None] = "enabled"
    required: ClassVar[tuple[str, ...]] = ("enabled",)

    enabled: Boolean = key(False, "Increase the difficulty during training. Required.")
    curriculum_type: Literal["seqlen"] | None = key(
        None, "Measure of difficulty: the sequence length. Required."
    )
    min_difficulty: Integer | None = key(None, "Length at the start, in tokens. Required.", ge=1)
    max_difficulty: Integer | None = key(None, "Length at the end, in tokens. Required.", ge=1)
    schedule_type: Pace | None = key(
        None,
        "Kind of schedule; for custom, pass the function to"
        " engine.set_custom_curriculum_learning_schedule. Required.",
    )
    schedule_config: PaceConfig | None = key(None, "Settings of the schedule.")
    truncate: Boolean | None = key(
        None,
        "true: Hadal truncates the inputs of forward; false: forward is given the length as"
        " curriculum_seqlen; null: the latter if the model takes it, else the former. Hadal's own"
        " key.",
    )


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
        " difficulty that only engine.set_data_post_process_func uses. Required.",
    )
    min_difficulty: Integer | None = key(None, "Difficulty at the start. Required.")
    max_difficulty: Integer | None = key(None, "Difficulty at the end. Required.")
    schedule_type: Pace | None = key(
        None,
        "Kind of schedule; for custom, pass the function to"
        " engine.set_custom_curriculum_learning_schedule. Required.",
    )
    schedule_config: PaceConfig | None = key(None, "Settings of the schedule.")


class MetricCurriculum(Section):
    """A sampler that admits harder samples over time."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Sample by difficulty.")
    data_cluster_path: Text | None = key(
        None, "Directory to which rank 0 writes the samples of each difficulty; null: nowhere."
    )
    curriculum_metrics: dict[str, CurriculumMetric] | None = key(
        None, "Metrics, keyed by name; with several, each must admit a sample."
    )


class DynamicBatching(Section):
    """Batches with about the same number of tokens, with the learning rate scaled to match."""

    switch: ClassVar[str | None] = "enabled"

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


class DataSampling(Section):
    """Options of the sampler."""

    enabled: Boolean = key(False, _MASTER)
    num_epochs: Integer = key(1000, "Maximum number of passes over the data.", ge=1)
    num_workers: Integer = key(0, "Number of data-loading processes.", ge=0)
    pin_memory: Boolean = key(False, "Load into pinned memory.")
    curriculum_learning: MetricCurriculum = section(MetricCurriculum, "Sampling by difficulty.")
    dynamic_batching: DynamicBatching = section(DynamicBatching, "Batching by tokens.")


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


class LayerTokenLrSchedule(Section):
    """A learning rate by tokens, which DeepSpeed never implemented."""

    enabled: Literal[False] = key(False, "Must be false.")
    total_layer_tokens: Integer | None = key(None, _RESERVED, mark=NO_EFFECT)
    warmup_type: Text | None = key(None, _RESERVED, mark=NO_EFFECT)
    warmup_layer_tokens: Integer | None = key(None, _RESERVED, mark=NO_EFFECT)


class RandomLtd(Section):
    """Layers that process a random subset of the tokens, which grows over time."""

    switch: ClassVar[str | None] = "enabled"

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


class DataRouting(Section):
    """Routing of tokens inside the model."""

    enabled: Boolean = key(False, _MASTER)
    random_ltd: RandomLtd = section(RandomLtd, "Dropping tokens.")


class DataEfficiency(Section):
    """Techniques that reach the same quality with less data."""

    moved: ClassVar[Mapping[str, str]] = {
        "curriculum_learning": "curriculum_learning",
        "random_ltd": "data_efficiency.data_routing.random_ltd",
    }

    enabled: Boolean = key(False, _MASTER)
    seed: Integer = key(1234, "Seed of the sampler.", ge=0)
    data_sampling: DataSampling = section(DataSampling, "The sampler.")
    data_routing: DataRouting = section(DataRouting, "Tokens inside the model.")


class ProgressiveLayerDrop(Section):
    """Passes the model a keep probability that falls from 1 to theta."""

    switch: ClassVar[str | None] = "enabled"
    required: ClassVar[tuple[str, ...]] = ("enabled",)

    enabled: Boolean = key(False, "Skip layers. Required.")
    theta: Number | None = key(None, "Final keep probability. Required.", gt=0, le=1)
    gamma: Number | None = key(None, "Rate of the decrease, per update. Required.", gt=0)
