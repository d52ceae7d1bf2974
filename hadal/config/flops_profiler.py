"""`flops_profiler`: operations, parameters and latency of one step."""

from typing import ClassVar

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Integer, Number, Text


class FlopsProfiler(Section):
    """Counts the floating-point operations of one step per module."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Profile one step; implies wall_clock_breakdown.", mark=UNBUILT)
    recompute_fwd_factor: Number = key(0.0, "Fraction of forward charged for recomputation.", ge=0)
    profile_step: Integer = key(1, "Update to profile, on rank 0.", ge=0)
    module_depth: Integer = key(-1, "Depth of the table; -1 is the deepest.", ge=-1)
    top_modules: Integer = key(1, "Number of modules shown at each depth.", ge=1)
    detailed: Boolean = key(True, "Print every module.")
    output_file: Text | None = key(None, "File to print to; null is standard output.")
