"""`autotuning`: searching for the fastest configuration."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from annotated_types import MinLen
from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, NULL_IS_DEFAULT, UNBUILT, Section, key
from hadal.config.values import Boolean, Integer, Spelled, Text


class ModelInfo(Section):
    """What is known of the model before the search."""

    profile: Boolean = key(False, "Only measure parameters and activations.")
    num_params: Integer | None = key(None, "Parameters of the model; saves measuring.", ge=0)
    hidden_size: Integer | None = key(None, "Width of the model; scales stage 3's buckets.", ge=1)
    num_layers: Integer | None = key(None, "Depth of the model; noted only.", ge=0)


class Autotuning(Section):
    """Runs short experiments and keeps the best configuration."""

    switch: ClassVar[str | None] = "enabled"
    renamed: ClassVar[Mapping[str, str]] = {
        "start_step": "start_profile_step",
        "end_step": "end_profile_step",
    }

    enabled: Boolean = key(False, "Search before training.", mark=UNBUILT)
    results_dir: Annotated[Text, MinLen(1)] = key(
        "autotuning_results", "Folder of results; null is the default.", mark=NULL_IS_DEFAULT
    )
    exps_dir: Annotated[Text, MinLen(1)] = key(
        "autotuning_exps", "Folder of experiments; null is the default.", mark=NULL_IS_DEFAULT
    )
    overwrite: Boolean = key(True, "Delete both folders first.")
    metric: Annotated[
        Literal["latency", "throughput", "FLOPS_per_gpu"],
        BeforeValidator(Spelled({"FLOPS": "FLOPS_per_gpu"})),
    ] = key("throughput", "What is compared; `FLOPS` means FLOPS_per_gpu.")
    metric_path: Text | None = key(None, "File in which an experiment leaves its numbers.")
    start_profile_step: Integer = key(3, "First measured update.", ge=1)
    end_profile_step: Integer = key(5, "Last measured update.", ge=1)
    fast: Boolean = key(True, "Search stage and micro-batch only.")
    max_train_batch_size: Integer | None = key(None, "Largest batch; null: what can run.", gt=0)
    min_train_batch_size: Integer = key(1, "Smallest batch.", ge=1, mark=NO_EFFECT)
    max_train_micro_batch_size_per_gpu: Integer = key(1024, "Largest micro-batch tried.", ge=1)
    min_train_micro_batch_size_per_gpu: Integer = key(1, "Smallest micro-batch tried.", ge=1)
    num_tuning_micro_batch_sizes: Integer = key(3, "Micro-batches carried on.", ge=1)
    mp_size: Integer = key(1, "Ranks that share one copy of the model.", ge=1)
    tuner_type: Literal["gridsearch", "random", "model_based"] = key(
        "gridsearch", "Order of the search."
    )
    tuner_early_stopping: Integer = key(5, "Experiments without gain before the end.", ge=1)
    tuner_num_trials: Integer = key(50, "Experiments per space at most.", ge=1)
    arg_mappings: dict[str, Text] | None = key(
        None, "Key of this configuration to flag of the script that must agree with it."
    )
    model_info: ModelInfo | None = key(None, "What is known of the model.")
    model_info_path: Text | None = key(None, "File in which measuring leaves its numbers.")
