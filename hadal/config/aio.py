"""`aio`: reading and writing the disk while other work goes on."""

from collections.abc import Mapping
from typing import ClassVar

from hadal.config.section import Mark, Section, key
from hadal.config.values import Boolean, Integer

_NO_GDS = Mark(
    status="not built yet",
    why="GPUDirect Storage needs a GPU, a driver and a disk that know it, and files are read into"
    " host memory here",
)


class Aio(Section):
    """Disk requests of state that is offloaded to nvme; without effect if none is.

    `hadal bench io PATH` finds the values for a disk.
    """

    renamed: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: Integer = key(
        1_048_576,
        "Bytes of one block, rounded up to whole pages (4096): what is read or written is cut at"
        " the multiples of it.",
        gt=0,
    )
    queue_depth: Integer = key(
        8, "Blocks under way at a time in one queue, each queue with threads of its own.", gt=0
    )
    intra_op_parallelism: Integer = key(
        1, "Queues that share one read or write, consecutive blocks each.", gt=0
    )
    single_submit: Boolean = key(
        False,
        "Each block is a system call of its own. Else neighbours go together, a quarter of"
        " queue_depth in one call.",
    )
    overlap_events: Boolean = key(
        True,
        "Begin another block as soon as one is done. Else a queue waits until all that it has under"
        " way is done, and then begins queue_depth more.",
    )
    verify_checksums: Boolean = key(
        False,
        "Sum up what is written, and compare what is read with it: a page that the disk has damaged"
        " is an error, and never trained with. A key of Hadal's own.",
    )
    use_gds: Boolean = key(
        False, "Let the GPU read the disk by itself (GPUDirect Storage).", mark=_NO_GDS
    )
