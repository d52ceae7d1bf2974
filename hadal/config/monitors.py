"""The sections of what a run measures (profiles, times, messages), and of the monitors."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, StringConstraints

from hadal.config.section import NULL_IS_DEFAULT, Section, Switched, key, rule, section, shown
from hadal.config.values import Boolean, Integer, Number, Spelled, Text
from hadal.errors import Fault


class ThroughputTiming(Switched):
    """Samples per second, logged with every progress line (`steps_per_print`).

    Measured from boundary to boundary, including everything in between. The first two updates,
    which allocate memory and compile code, are left out.
    """

    enabled: Boolean = key(True, "Measure the throughput.")
    synchronized: Boolean = key(
        True, "Synchronize with the device before reading the clock, once per progress line."
    )


class Timers(Section):
    """Timers of the engine."""

    throughput: ThroughputTiming = section(ThroughputTiming, "Samples per second.")


class FlopsProfile(Switched):
    """Counts the operations of one update per module, times the next, and reports both.

    Rank 0 reports; `engine.flops_profiler.profile` holds the figures. Other updates are not slowed
    down.
    """

    leftovers: ClassVar[Mapping[str, str]] = {"step": "ignored, as by DeepSpeed: use profile_step"}

    enabled: Boolean = key(False, "Profile one update; implies `wall_clock_breakdown`.")
    recompute_fwd_factor: Number = key(
        0.0,
        "Fraction of forward that the lines with a formula add to backward for recomputation. "
        "Operations that are actually recomputed are counted in addition.",
        ge=0,
    )
    profile_step: Integer = key(1, "Number of updates before the profiled one.", ge=0)
    module_depth: Integer = key(
        -1,
        "Number of depths whose largest modules are listed; -1 lists all but the deepest.",
        ge=-1,
    )
    top_modules: Integer = key(1, "Number of module classes listed at each depth.", ge=1)
    detailed: Boolean = key(True, "Report every module in a tree.")
    output_file: Text | None = key(
        None, "File for the report, as JSON if its name ends in `.json`; null prints it."
    )
    peak_tflops: Number | None = key(
        None,
        "Peak of the device in 10^12 operations per second, for the MFU; null looks up the "
        "device's name (a CPU is measured). Hadal's own key.",
        gt=0,
    )
    trace_file: Text | None = key(
        None,
        "File for a Chrome trace of the update after the timed one, by torch.profiler, with "
        "module names. Hadal's own key.",
    )


Operation = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]
OPERATIONS: tuple[str, ...] = get_args(Operation)
# The names of functions, of which several do one kind of thing.
_FUNCTIONS = {
    "all_reduce": "all_reduce_coalesced inference_all_reduce",
    "all_gather": "all_gather_into_tensor all_gather_single all_gather_coalesced all_gather_base"
    " all_gather_object allgather_fn",
    "reduce_scatter": "reduce_scatter_tensor reduce_scatter_single reduce_scatter_base"
    " reduce_scatter_fn",
    "all_to_all": "all_to_all_single",
    "broadcast": "broadcast_object_list",
    "gather": "gather_object",
    "scatter": "scatter_object_list",
    "send": "isend",
    "recv": "irecv",
    "barrier": "monitored_barrier",
}
KIND_OF: dict[str, str] = {
    name: kind for kind, names in _FUNCTIONS.items() for name in names.split()
}
"""Maps a function name to the kind of operation it performs."""
Operations: TypeAlias = list[Annotated[Operation, BeforeValidator(Spelled(KIND_OF))]]


class CommsLogging(Switched):
    """Records the count, size and speed of messages between ranks.

    Recording never waits for a collective. `hadal.comm.log_summary()` prints the log. A process has
    one log; the newest engine that enables it sets the kinds that it records.
    """

    enabled: Boolean = key(False, "Record collectives.")
    verbose: Boolean = key(False, "Log each collective once its end is known.")
    prof_all: Boolean = key(True, "Record all kinds; false records only prof_ops.")
    debug: Boolean = key(
        False,
        "Distinguish calls by their purpose (such as the gather of a given bucket) or by the "
        "calling function.",
    )
    prof_ops: Operations = key(
        [],
        "Kinds to record when prof_all is false: all_reduce, all_gather, reduce_scatter, "
        "all_to_all, broadcast, reduce, gather, scatter, send, recv, barrier. Names of torch's "
        "functions are accepted for their kind.",
    )


class MonitorScope(Section):
    """Selection of the scalars that the monitors write. Hadal's own section."""

    extra: Boolean = key(
        True,
        "Also write metrics that DeepSpeed does not write: gradient norm, samples and tokens per"
        " second, skipped updates, peak memory.",
    )


class _Files(Switched):
    """Files of a monitor."""

    enabled: Boolean = key(False, "Write scalars.")
    output_path: Text = key(
        "", "Parent directory; empty or null is the working directory.", mark=NULL_IS_DEFAULT
    )
    job_name: Text = key("DeepSpeedJobName", "Directory inside output_path.")

    @rule()
    def _folder(self) -> Iterator[Fault]:
        job = PurePosixPath(self.job_name)
        if self.enabled and (job.is_absolute() or ".." in job.parts):
            yield Fault(
                "job_name",
                f"{shown(self.job_name)} leads out of output_path; set a name without"
                ' ".." or a leading "/", and the directory in output_path',
            )


class TensorBoard(_Files):
    """Scalars of training in an event file for TensorBoard, written by rank 0.

    The step is the number of samples so far. Needs `pip install tensorboard`.
    """


class CsvMonitor(_Files):
    """Scalars of training in CSV files, one per name, written by rank 0.

    Each has a header, then lines with the number of samples so far and the value; later runs
    append.
    """


class Wandb(Switched):
    """Scalars of training in a Weights & Biases run, sent by rank 0.

    The step is the number of samples so far. Needs `pip install wandb`. wandb's own variables set
    everything else (WANDB_MODE, WANDB_DIR, WANDB_RUN_ID); a run that the program has started is
    used.
    """

    enabled: Boolean = key(False, "Send scalars.")
    group: Text | None = key(None, "Group of the run.")
    team: Text | None = key(None, "Owner of the run.")
    project: Text = key("deepspeed", "Project of the run.")


class Comet(Switched):
    """Scalars of training in a Comet experiment, sent by rank 0.

    The step is the number of samples so far. Needs `pip install comet_ml`.
    """

    enabled: Boolean = key(False, "Send scalars.")
    workspace: Text | None = key(None, "Workspace of the experiment.")
    project: Text | None = key(None, "Project of the experiment.")
    samples_log_interval: Integer = key(
        100, "Samples between two values of one name that are sent.", ge=1
    )
    experiment_name: Text | None = key(None, "Name given to the experiment.")
    api_key: Text | None = key(
        None, "API key, hidden wherever the configuration is logged; prefer COMET_API_KEY."
    )
    experiment_key: Annotated[Text, StringConstraints(pattern=r"^[A-Za-z0-9]{32,50}$")] | None = (
        key(None, "Existing experiment to continue: 32 to 50 letters and digits.")
    )
    online: Boolean | None = key(
        None,
        "true sends immediately, false writes to the disk for a later `comet upload`; null lets"
        " Comet decide.",
    )
    mode: Literal["get", "create", "get_or_create"] | None = key(
        None, "Whether the experiment must exist (get), must not (create), or may (get_or_create)."
    )


class JsonlMonitor(_Files):
    """Everything about a run in `events.jsonl`, one JSON object per line, written by rank 0.

    The first line describes the run (configuration, model, machine); each update adds a line with
    its scalars. A section of Hadal's own.
    """

    enabled: Boolean = key(False, "Write the file.")
    report: Boolean = key(
        False,
        "Also record warnings, checkpoints, memory, profile and communication, and write "
        "report.html next to the file when the program ends. `hadal report FOLDER` builds "
        "that page from any such file.",
    )
