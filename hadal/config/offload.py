"""`zero_optimization.offload_param` and `.offload_optimizer`: state that rests off the device."""

from typing import ClassVar, Literal, TypeAlias

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Integer, Number, Text

Tier: TypeAlias = Literal["none", "cpu", "nvme"]
_PATH = "Folder on the disk; needed where the device is nvme."
_PIN = "Use page-locked host memory: faster copies, scarcer memory."


class OffloadParam(Section):
    """Where stage 3's weights rest between uses."""

    switch: ClassVar[str | None] = "device"

    device: Tier = key("none", "Where the weights rest.", mark=UNBUILT)
    nvme_path: Text | None = key(None, _PATH)
    pin_memory: Boolean = key(True, _PIN)
    buffer_count: Integer = key(5, "Buffers that carry weights to and from the disk.", ge=0)
    buffer_size: Integer = key(100_000_000, "Elements of one such buffer.", ge=0)
    max_in_cpu: Integer = key(
        1_000_000_000, "Elements kept in host memory where the device is nvme.", ge=0
    )


class OffloadOptimizer(Section):
    """Where the optimizer's state rests, and so where the update runs."""

    switch: ClassVar[str | None] = "device"

    device: Tier = key("none", "Where the state rests; nvme needs stage 3.", mark=UNBUILT)
    nvme_path: Text | None = key(None, _PATH)
    buffer_count: Integer = key(
        4, "Buffers that carry state to and from the disk; Adam needs 4.", ge=0
    )
    pin_memory: Boolean = key(True, _PIN)
    pipeline_read: Boolean = key(False, "Read the next sub-group during the update.")
    pipeline_write: Boolean = key(False, "Write the last sub-group during the update.")
    fast_init: Boolean = key(False, "Create the state on the disk without a trial update.")
    ratio: Number = key(
        1.0, "Share of the sub-groups that the CPU updates; below 1 needs stage 3.", ge=0, le=1
    )
    super_offload: Boolean = key(False, "Update in a process of its own, for superchips.")
    cpuadam_cores_perc: Number = key(0.8, "Share of the cores for that process.", ge=0, le=1)
