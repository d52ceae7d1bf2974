"""`autotuning`: the search for the fastest configuration, and the measurement of one experiment."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from annotated_types import MinLen
from pydantic import BeforeValidator

from hadal.config.section import NULL_IS_DEFAULT, Section, Switched, key, rule
from hadal.config.values import Boolean, Integer, Number, Spelled, Text
from hadal.errors import Fault

METRIC_PATH, MODEL_INFO_PATH = "autotuning_metric.json", "autotuning_model_info.json"
"""Default files for a run's measurements."""


class ModelInfo(Section):
    """Facts about the model that are known before the search."""

    profile: Boolean = key(
        False,
        "Measure one forward pass only: the run writes model_info_path and exits with code 0. "
        "The search sets this for its first run.",
    )
    num_params: Integer | None = key(
        None,
        "Number of elements in all parameters of the model; if given, the first run is skipped.",
        ge=0,
    )
    candidates: Text | None = key(
        None,
        "File with a JSON list of configurations to plan with the model and the first micro-batch, "
        "each as the keys that differ from this one; model_info_path gets the memory and time of "
        "each. The search sets this.",
    )
    hidden_size: Integer | None = key(
        None,
        "Hidden size of the model: with `fast` false, stage 3 also tries bucket sizes and "
        "thresholds derived from it.",
        ge=1,
    )
    num_layers: Integer | None = key(None, "Number of layers; recorded in model_info.json.", ge=0)


class Autotuning(Switched):
    """Measures a few updates under each of several configurations; see docs/autotuning.md.

    `hadal run --autotuning tune` searches; `--autotuning run` searches and then trains with the
    best configuration.
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "start_step": "start_profile_step",
        "end_step": "end_profile_step",
    }

    enabled: Boolean = key(
        False,
        "Let `hadal run --autotuning` search. Without that flag, the run is a single "
        "experiment: it measures, writes metric_path and exits with code 0 after "
        "end_profile_step.",
    )
    results_dir: Annotated[Text, MinLen(1)] = key(
        "autotuning_results",
        "Directory for results, with one subdirectory per experiment; null is the default. It "
        "must be visible on rank 0's host.",
        mark=NULL_IS_DEFAULT,
    )
    exps_dir: Annotated[Text, MinLen(1)] = key(
        "autotuning_exps",
        "Directory for the definitions of experiments; null is the default.",
        mark=NULL_IS_DEFAULT,
    )
    overwrite: Boolean = key(
        False,
        "Delete the experiments in both directories first. Otherwise an experiment already "
        "measured with the same configuration and command is not run again.",
    )
    metric: Annotated[
        Literal["latency", "throughput", "FLOPS_per_gpu"],
        BeforeValidator(Spelled({"FLOPS": "FLOPS_per_gpu"})),
    ] = key(
        "throughput",
        "Metric to compare. throughput: samples of all ranks per second, train_batch_size / "
        "latency (higher is better). latency: milliseconds of forward, backward and step of one "
        "update (lower is better). FLOPS_per_gpu: floating-point operations of one rank's "
        "forward and backward, as torch counts them in one update, / latency (higher is "
        "better). `FLOPS` means FLOPS_per_gpu.",
    )
    metric_path: Text | None = key(
        None, f"File for an experiment's measurements; null: {METRIC_PATH}. The search sets it."
    )
    start_profile_step: Integer = key(3, "First measured update.", ge=1)
    end_profile_step: Integer = key(5, "Last measured update; the experiment ends after it.", ge=1)
    experiment_timeout: Number | None = key(
        None,
        "Seconds after which an experiment is ended, and counts as failed; null: it may take as "
        "long as it needs.",
        gt=0,
    )
    value_to_beat: Number | None = key(
        None,
        "Best value of the metric so far: an experiment whose first measured update is worse by "
        "more than 25 % ends after it. The search sets this.",
        gt=0,
    )
    fast: Boolean = key(
        True,
        "Search the stage and the micro-batch only, in at most 3 measured experiments (times those "
        "that run side by side). If false, also search each stage's buckets and limits, offload, "
        "recomputation and overlap_comm, in at most 8. A listed key is searched either way.",
    )
    max_train_batch_size: Integer | None = key(
        None, "Largest train_batch_size to try; null: as large as memory allows.", gt=0
    )
    min_train_batch_size: Integer = key(1, "Smallest train_batch_size to try.", ge=1)
    max_train_micro_batch_size_per_gpu: Integer = key(1024, "Largest micro-batch to try.", ge=1)
    min_train_micro_batch_size_per_gpu: Integer = key(
        1, "Smallest micro-batch to try; the search starts here if no batch size is given.", ge=1
    )
    num_tuning_micro_batch_sizes: Integer = key(
        3,
        "Number of micro-batches (the fastest ones, as planned) with which a stage's other "
        "settings are tried.",
        ge=1,
    )
    mp_size: Integer = key(
        1,
        "Ranks that share one copy of the model: they count once in train_batch_size, and "
        "num_params is divided by them.",
        ge=1,
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = key(
        "model_based",
        "Order in which settings are tried: gridsearch takes them all as listed, random "
        "shuffles them (the same way each time), model_based tries next those that are the best by "
        "a plan of the model, corrected by the results so far, and ends when none is left that may "
        "win.",
    )
    tuner_early_stopping: Integer = key(
        5, "Leave a stage after this many experiments without an improvement.", ge=1
    )
    tuner_num_trials: Integer = key(50, "Maximum number of experiments per stage.", ge=1)
    arg_mappings: dict[str, Text] | None = key(
        None,
        "Maps a key of this configuration (nested keys with dots) to the program's command-line "
        'flag that must agree with it, such as {"train_micro_batch_size_per_gpu": '
        '"--per_device_train_batch_size"}. If the key is "auto", the search starts at the '
        "flag's value.",
    )
    model_info: ModelInfo | None = key(None, "Facts about the model.")
    model_info_path: Text | None = key(
        None,
        f"File for the measurements of model_info.profile; null: {MODEL_INFO_PATH}. The search "
        "sets it.",
    )

    @rule("start_profile_step", "end_profile_step")
    def _steps_in_order(self) -> Iterator[Fault]:
        first, last = self.start_profile_step, self.end_profile_step
        if last < first:
            yield Fault(
                "end_profile_step", f"{last} is before start_profile_step {first}; raise it"
            )
