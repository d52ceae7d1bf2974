"""`zero_optimization.offload_param` and `.offload_optimizer`: where state is stored."""

from typing import ClassVar, Literal, TypeAlias

from hadal.config.section import UNBUILT, Section, key, unbuilt_beside
from hadal.config.values import Boolean, Integer, Number, Text

Tier: TypeAlias = Literal["none", "cpu", "nvme"]
_PATH = (
    "Folder on the disk; needed where the device is nvme. Each process has a folder of its own in "
    "it, which goes when the engine does. Ranks may name different ones."
)
_PIN = (
    "Use page-locked host memory where there is an accelerator: copies go on beside its work; else "
    "each one stops the thread that launches that."
)


class OffloadParam(Section):
    """Where stage 3's weights are stored between uses.

    At lower stages every rank uses whole weights, and the section has no effect. If a CPU
    computes, "cpu" is where they are anyway.
    """

    switch: ClassVar[str | None] = "device"

    device: Tier = key(
        "none",
        "Where the weights are stored: none is the memory that computes, cpu the host's, nvme the "
        "disk. Parameters that stay whole on every rank (stage3_param_persistence_threshold) stay "
        "there.",
    )
    nvme_path: Text | None = key(None, _PATH)
    pin_memory: Boolean = key(True, _PIN)
    buffer_count: Integer = key(
        5,
        "Buffers that weights are read into ahead of their use, from the second step on; 0 reads "
        "each when it is used.",
        ge=0,
    )
    buffer_size: Integer = key(
        100_000_000,
        "Elements of one such buffer. Weights share a bucket up to it; a rank's part of a single "
        "larger parameter is refused.",
        ge=0,
    )
    max_in_cpu: Integer = key(
        1_000_000_000,
        "Where the device is nvme: elements of each rank that stay in host memory all the same, "
        "those of the first buckets.",
        ge=0,
    )


class OffloadOptimizer(Section):
    """Where masters and the optimizer's state are stored, and so where the update runs.

    Off the device the host makes the update, and gradients leave for its memory. On the disk
    state takes twice its size: an update that fails, because the disk does, changes nothing.
    """

    switch: ClassVar[str | None] = "device"

    device: Tier = key(
        "none",
        "Where the state is stored: none is the memory that computes, cpu the host's, nvme the "
        "disk (stages 1 to 3; DeepSpeed: 3, and Adam alone). Optimizers that look at more than "
        "single elements have more of it in host memory during an update: docs/offload.md.",
    )
    nvme_path: Text | None = key(None, _PATH)
    buffer_count: Integer = key(
        4,
        "The host memory of an update on the disk: so many times `sub_group_size` elements in "
        "fp32 (of which 2^24 count at most), for all that is read, worked on and written. A part "
        "is 2^19 elements long at least, with several threads up to 2^22. Muon, Adafactor and "
        "optimizers of your own take whole buckets, however many that are.",
        ge=0,
    )
    pin_memory: Boolean = key(True, _PIN)
    accumulate_on: Literal["device", "host"] | None = key(
        None,
        "Where an accelerator's gradients are summed up over micro-steps at stages 2 and 3 "
        "(Hadal's own). device keeps a rank's sums there until the update; host brings each sum "
        "back at every micro-step and sends it out again, which saves the memory and costs the "
        "copies. null keeps them on the device, bucket by bucket, while they take less than an "
        "eighth of its free memory. The numbers are the same.",
    )
    pipeline_read: Boolean = key(
        True,
        "Read the next part of the state during the update of this one. DeepSpeed's default is "
        "false; the numbers are the same.",
    )
    pipeline_write: Boolean = key(
        True,
        "Write the last part during the update of this one. DeepSpeed's default is false; the "
        "numbers are the same.",
    )
    fast_init: Boolean = key(
        False,
        "Begin the optimizer's state as zeros that are in no file yet. false writes them in the "
        "first update, before it, so that a disk which fails does so there.",
    )
    ratio: Number = key(
        1.0,
        "Share of the elements that the host updates, by whole buckets; the device updates the "
        "rest at the same time, and keeps its state. Below 1 needs stage 3, and where the device "
        "is nvme an optimizer that looks at single elements (Adam, AdamW, Lion, Adagrad, SGD).",
        ge=0,
        le=1,
    )
    super_offload: Boolean = key(
        False, "Update in a process of its own, for superchips.", mark=UNBUILT
    )
    cpuadam_cores_perc: Number = key(
        0.8,
        "Share of the cores for that process. Without it updates on the host use the process's "
        "threads (OMP_NUM_THREADS).",
        ge=0,
        le=1,
        mark=unbuilt_beside("super_offload"),
    )
