"""`aio`: reading and writing the disk while other work goes on."""

from collections.abc import Mapping
from typing import ClassVar

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer


class Aio(Section):
    """Disk requests of state that rests on nvme. Asks for nothing where none does."""

    renamed: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: Integer = key(1_048_576, "Bytes of one request.", gt=0)
    queue_depth: Integer = key(8, "Requests under way at a time in one thread.", gt=0)
    intra_op_parallelism: Integer = key(1, "Threads that share one read or write.", gt=0)
    single_submit: Boolean = key(False, "Submit requests one by one, not in batches.")
    overlap_events: Boolean = key(True, "Submit new requests before earlier ones are done.")
    use_gds: Boolean = key(False, "Let the GPU read the disk by itself (GPUDirect Storage).")
