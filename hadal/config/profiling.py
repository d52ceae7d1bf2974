"""`timers`, `flops_profiler` and `comms_logger`: measurements of a run."""

from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import BeforeValidator

from hadal.config.section import Section, Switched, key, section
from hadal.config.values import Boolean, Integer, Number, Spelled, Text


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
Operations: TypeAlias = tuple[Annotated[Operation, BeforeValidator(Spelled(KIND_OF))], ...]


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
        (),
        "Kinds to record when prof_all is false: all_reduce, all_gather, reduce_scatter, "
        "all_to_all, broadcast, reduce, gather, scatter, send, recv, barrier. Names of torch's "
        "functions are accepted for their kind.",
    )
