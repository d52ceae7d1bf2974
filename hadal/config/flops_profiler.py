"""`flops_profiler`: operations, parameters and latency of one step."""

from typing import ClassVar

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Number, Text


class FlopsProfile(Section):
    """Counts the operations of one update per module, times the next, and reports both.

    Rank 0 reports; `engine.flops_profiler.profile` holds the figures. Other updates are not slowed
    down.
    """

    switch: ClassVar[str | None] = "enabled"

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
