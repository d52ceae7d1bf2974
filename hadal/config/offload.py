"""`offload_param`, `offload_optimizer` and `aio`: the tier that stores state, and disk requests."""

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

from hadal.config.optimizer import in_blocks
from hadal.config.section import UNBUILT, Mark, Section, key
from hadal.config.values import Boolean, Integer, Number, Text

Tier: TypeAlias = Literal["none", "cpu", "nvme"]
_PATH = (
    "Directory on the disk; required when the device is nvme. Each process creates its own "
    "directory in it, which is removed with the engine. Ranks may name different "
    "directories."
)
_PIN = (
    "Use pinned host memory when there is an accelerator, so that copies overlap with "
    "computation; otherwise each copy blocks the thread that launches kernels."
)


class _Offload(Section):
    """A section that its device turns on."""

    switch = "device"
    required = ("device",)
    may_be_empty = True


class OffloadParam(_Offload):
    """Storage of stage 3's weights between uses.

    Below stage 3 every rank uses whole weights, and the section has no effect. If the model trains
    on a CPU, "cpu" has no effect either.
    """

    device: Tier = key(
        "none",
        "Tier that stores the weights: none keeps them in the compute device's memory, cpu in "
        "host memory, nvme on the disk. Required unless the section is empty. Parameters that "
        "every rank keeps whole (stage3_param_persistence_threshold) are not offloaded.",
    )
    nvme_path: Text | None = key(None, _PATH)
    pin_memory: Boolean = key(True, _PIN)
    buffer_count: Integer = key(
        5,
        "Buffers for reading weights ahead of their use, from the second step on; 0 reads each "
        "weight when it is used.",
        ge=0,
    )
    buffer_size: Integer = key(
        100_000_000,
        "Elements in one such buffer. Weights share a bucket up to this size; a single "
        "parameter whose slice on a rank is larger is refused.",
        ge=0,
    )
    max_in_cpu: Integer = key(
        1_000_000_000,
        "If the device is nvme: elements of each rank that stay in host memory all the same, "
        "those of the first buckets.",
        ge=0,
    )


class OffloadOptimizer(_Offload):
    """Storage of the masters and the optimizer's state, and therefore the place of the update.

    If they are offloaded, the host updates them, and gradients are copied to its memory. On the
    disk state takes twice its size, so that an update that fails because the disk does changes
    nothing.
    """

    device: Tier = key(
        "none",
        "Tier that stores the state: none keeps it in the compute device's memory, cpu in host "
        "memory, nvme on the disk (stages 1 to 3; DeepSpeed: stage 3 with Adam only). Required "
        "unless the section is empty. "
        "Optimizers that are not elementwise keep more of it in host memory during an update; "
        "see docs/offload.md.",
    )
    nvme_path: Text | None = key(None, _PATH)
    buffer_count: Integer = key(
        4,
        "Host memory of an update on the disk: this many times `sub_group_size` elements in "
        "fp32 (of which at most 2^24 count), for everything that is read, processed and "
        "written. A chunk has at least 2^19 elements, and up to 2^22 with several threads. "
        "Muon, Adafactor and custom optimizers take whole buckets, however many there are.",
        ge=0,
    )
    pin_memory: Boolean = key(True, _PIN)
    accumulate_on: Literal["device", "host"] | None = key(
        None,
        "Memory that accumulates an accelerator's gradients over micro-steps at stages 2 and 3 "
        "(Hadal's own key). device keeps a rank's sums there until the update; host copies each "
        "sum back at every micro-step and out again, which saves memory and costs the copies. "
        "null keeps them on the device, bucket by bucket, while they take less than an eighth "
        "of its free memory. The results are identical.",
    )
    pipeline_read: Boolean = key(
        True,
        "Read the next chunk of state while this one is updated. DeepSpeed's default is false; "
        "the results are identical.",
    )
    pipeline_write: Boolean = key(
        True,
        "Write the previous chunk of state while this one is updated. DeepSpeed's default is "
        "false; the results are identical.",
    )
    fast_init: Boolean = key(
        False,
        "Start the optimizer's state as zeros that are not written to a file. false writes them "
        "before the first update, so that a failing disk is noticed there.",
    )
    ratio: Number = key(
        1.0,
        "Fraction of the elements that the host updates, in whole buckets; the accelerator updates "
        "the other buckets at the same time and stores their state. Below 1 requires stage 3 and, "
        f"if the device is nvme, {in_blocks('or')}.",
        ge=0,
        le=1,
    )
    super_offload: Boolean = key(
        False, "Update in a separate process, for superchips.", mark=UNBUILT
    )
    cpuadam_cores_perc: Number = key(
        0.8,
        "Fraction of the cores for that process. Without it, updates on the host use the process's "
        "threads (OMP_NUM_THREADS).",
        ge=0,
        le=1,
        mark=Mark(status="not built yet", serves="super_offload"),
    )


class Aio(Section):
    """Disk requests for state offloaded to NVMe. Has no effect when nothing is offloaded to NVMe.

    `hadal bench io PATH` finds good values for a disk.
    """

    renamed: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: Integer = key(
        1_048_576,
        "Bytes in one block, rounded up to whole pages (4096). Reads and writes are split at "
        "multiples of it.",
        gt=0,
    )
    queue_depth: Integer = key(
        8, "Blocks in flight in one queue. Each queue has its own threads.", gt=0
    )
    intra_op_parallelism: Integer = key(
        1, "Queues that share one read or write; each takes consecutive blocks.", gt=0
    )
    single_submit: Boolean = key(
        False,
        "Issue one system call per block. Otherwise adjacent blocks are submitted together, a "
        "quarter of queue_depth per call.",
    )
    overlap_events: Boolean = key(
        True,
        "Start another block as soon as one completes. Otherwise a queue waits until all of its "
        "blocks have completed and then starts queue_depth more.",
    )
    verify_checksums: Boolean = key(
        False,
        "Compute a checksum of everything written and compare it on reading, so that a page "
        "damaged on the disk raises an error and is never trained with. Hadal's own key.",
    )
    use_gds: Boolean = key(
        False, "Let the GPU read the disk directly (GPUDirect Storage).", mark=UNBUILT
    )
