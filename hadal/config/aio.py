"""`aio`: asynchronous disk I/O."""

from collections.abc import Mapping
from typing import ClassVar

from hadal.config.section import Mark, Section, key
from hadal.config.values import Boolean, Integer

_NO_GDS = Mark(
    status="not built yet",
    why="GPUDirect Storage needs a GPU, a driver and a disk that support it, and Hadal reads files"
    " into host memory",
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
        False, "Let the GPU read the disk directly (GPUDirect Storage).", mark=_NO_GDS
    )
