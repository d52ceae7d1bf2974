"""`flops_profiler`: operations, parameters and latency of one step."""

from typing import ClassVar

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Number, Text


class FlopsProfiler(Section):
    """Counts the floating-point operations of one update by module, times the next, and reports.

    Rank 0 reports; `engine.flops_profiler.profile` holds the figures. Nothing is slower outside
    these updates.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Profile one update; implies `wall_clock_breakdown`.")
    recompute_fwd_factor: Number = key(
        0.0,
        "The share of forward that the lines with a formula charge backward with, for"
        " recomputation. Recomputed operations are counted beside it.",
        ge=0,
    )
    profile_step: Integer = key(1, "Updates before the one that is profiled.", ge=0)
    module_depth: Integer = key(
        -1, "Depths whose largest modules are listed; -1 lists all but the deepest.", ge=-1
    )
    top_modules: Integer = key(1, "Classes of modules listed at each depth.", ge=1)
    detailed: Boolean = key(True, "Report every module in a tree.")
    output_file: Text | None = key(
        None, "File of the report, as JSON if it ends in `.json`; null prints it."
    )
    peak_tflops: Number | None = key(
        None,
        "Hadal's own: the device's peak in 10^12 operations a second, for the MFU; null looks up"
        " the device's name (a CPU is measured).",
        gt=0,
    )
    trace_file: Text | None = key(
        None,
        "Hadal's own: Chrome trace of the update after the timed one, by torch.profiler, with the"
        " modules' names.",
    )
