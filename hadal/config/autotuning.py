"""`autotuning`: searching for the fastest configuration, and what one experiment of it measures."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from annotated_types import MinLen
from pydantic import BeforeValidator

from hadal.config.section import NULL_IS_DEFAULT, Section, key
from hadal.config.values import Boolean, Integer, Spelled, Text

METRIC_PATH, MODEL_INFO_PATH = "autotuning_metric.json", "autotuning_model_info.json"
"""Where a run leaves its numbers that is not told where."""


class ModelInfo(Section):
    """What is known of the model before the search."""

    profile: Boolean = key(
        False,
        "Measure one forward only: the run writes model_info_path and leaves with exit code 0. The "
        "search sets it for its first run.",
    )
    num_params: Integer | None = key(
        None, "Elements of the whole model's parameters; given, the first run is left out.", ge=0
    )
    hidden_size: Integer | None = key(
        None,
        "Width of the model: with `fast` false, stage 3 also tries the buckets and thresholds that "
        "suit it.",
        ge=1,
    )
    num_layers: Integer | None = key(None, "Depth of the model; noted in model_info.json.", ge=0)


class Autotuning(Section):
    """Measures a few updates under each of several configurations; docs/autotuning.md tells how.

    `hadal run --autotuning tune` searches, `--autotuning run` then trains with the best.
    """

    switch: ClassVar[str | None] = "enabled"
    renamed: ClassVar[Mapping[str, str]] = {
        "start_step": "start_profile_step",
        "end_step": "end_profile_step",
    }

    enabled: Boolean = key(
        False,
        "Let `hadal run --autotuning` search. A run without that flag is one experiment: it "
        "measures, writes metric_path and leaves after end_profile_step with exit code 0.",
    )
    results_dir: Annotated[Text, MinLen(1)] = key(
        "autotuning_results",
        "Folder of results, with one for each experiment; null is the default. Rank 0's host must "
        "see it.",
        mark=NULL_IS_DEFAULT,
    )
    exps_dir: Annotated[Text, MinLen(1)] = key(
        "autotuning_exps",
        "Folder of what each experiment is; null is the default.",
        mark=NULL_IS_DEFAULT,
    )
    overwrite: Boolean = key(
        False,
        "Remove the experiments in both folders first. Otherwise one that was measured with the "
        "same configuration and command is not run again.",
    )
    metric: Annotated[
        Literal["latency", "throughput", "FLOPS_per_gpu"],
        BeforeValidator(Spelled({"FLOPS": "FLOPS_per_gpu"})),
    ] = key(
        "throughput",
        "What is compared. throughput: samples of all ranks per second, train_batch_size / latency "
        "(more is better). latency: milliseconds of forward, backward and step of one update (less "
        "is better). FLOPS_per_gpu: operations of a rank's forward and backward, as torch counts "
        "them in one update, / latency (more is better). `FLOPS` means FLOPS_per_gpu.",
    )
    metric_path: Text | None = key(
        None,
        f"File in which an experiment leaves its numbers; null: {METRIC_PATH}. The search sets it.",
    )
    start_profile_step: Integer = key(3, "First measured update.", ge=1)
    end_profile_step: Integer = key(5, "Last measured update; the experiment ends with it.", ge=1)
    fast: Boolean = key(
        True,
        "Search stage and micro-batch only. false: each stage's buckets and limits too. What is "
        "given as a list under zero_optimization is tried either way.",
    )
    max_train_batch_size: Integer | None = key(
        None, "Largest train_batch_size tried; null: what memory admits.", gt=0
    )
    min_train_batch_size: Integer = key(1, "Smallest train_batch_size tried.", ge=1)
    max_train_micro_batch_size_per_gpu: Integer = key(1024, "Largest micro-batch tried.", ge=1)
    min_train_micro_batch_size_per_gpu: Integer = key(
        1, "Smallest micro-batch tried; the search starts here where the batch says nothing.", ge=1
    )
    num_tuning_micro_batch_sizes: Integer = key(
        3, "Micro-batches, the fastest, with which a stage's other settings are tried.", ge=1
    )
    mp_size: Integer = key(
        1,
        "Ranks that share one copy of the model: they count once in train_batch_size, and "
        "num_params is divided by them.",
        ge=1,
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = key(
        "model_based",
        "Order in which a stage's settings are tried: as they are listed, at random (the same "
        "order each time), or next what a linear model of the results so far finds best.",
    )
    tuner_early_stopping: Integer = key(
        5, "Experiments without a better one, after which a stage is left.", ge=1
    )
    tuner_num_trials: Integer = key(50, "Experiments of one stage at most.", ge=1)
    arg_mappings: dict[str, Text] | None = key(
        None,
        "Key of this configuration (nested ones with dots) to the program's flag that must agree "
        "with it, as "
        '{"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}. Where the key is '
        '"auto", the search starts at the flag\'s value.',
    )
    model_info: ModelInfo | None = key(None, "What is known of the model.")
    model_info_path: Text | None = key(
        None,
        f"File in which model_info.profile leaves its numbers; null: {MODEL_INFO_PATH}. The search "
        "sets it.",
    )
