"""`timers`: the throughput timer."""

from hadal.config.section import Section, key, section
from hadal.config.values import Boolean


class ThroughputTimer(Section):
    """Samples per second, told with every line of progress (`steps_per_print`).

    Counted from boundary to boundary, with all that lies between; the first two updates, in which
    memory is taken and code compiled, are left out.
    """

    switch = "enabled"

    enabled: Boolean = key(True, "Measure the throughput.")
    synchronized: Boolean = key(
        True, "Wait for the device before looking at the clock, once for each line of progress."
    )


class Timers(Section):
    """Clocks of the engine."""

    throughput: ThroughputTimer = section(ThroughputTimer, "Samples per second.")
