"""`timers`: the throughput timer."""

from hadal.config.section import Section, key, section
from hadal.config.values import Boolean


class ThroughputTimer(Section):
    """Samples per second."""

    enabled: Boolean = key(True, "Measure the throughput.")
    synchronized: Boolean = key(True, "Wait for the device before looking at the clock.")


class Timers(Section):
    """Clocks of the engine."""

    throughput: ThroughputTimer = section(ThroughputTimer, "Samples per second.")
