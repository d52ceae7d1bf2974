"""`timers`: the throughput timer."""

from hadal.config.section import Section, key, section
from hadal.config.values import Boolean


class ThroughputTiming(Section):
    """Samples per second, logged with every progress line (`steps_per_print`).

    Measured from boundary to boundary, including everything in between. The first two updates,
    which allocate memory and compile code, are left out.
    """

    switch = "enabled"

    enabled: Boolean = key(True, "Measure the throughput.")
    synchronized: Boolean = key(
        True, "Synchronize with the device before reading the clock, once per progress line."
    )


class Timers(Section):
    """Timers of the engine."""

    throughput: ThroughputTiming = section(ThroughputTiming, "Samples per second.")
