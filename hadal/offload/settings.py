"""How a disk is read and written: the `aio` section, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from hadal.config.aio import Aio

# So many system calls share a queue's depth where blocks go in batches.
_CALLS_IN_A_QUEUE = 4


@dataclass(frozen=True, slots=True)
class IoSettings:
    """How requests are cut into blocks, and how many of them are under way."""

    block_nbytes: int = 1 << 20
    """Bytes of one block, rounded up to whole pages."""
    queue_depth: int = 8
    """Blocks that one queue has under way at a time, at most."""
    threads: int = 1
    """Queues that share each request, consecutive blocks for each."""
    submits_singly: bool = False
    """Each block is a system call of its own; else neighbours go together, a quarter of the depth
    in one call."""
    overlaps: bool = True
    """What is done makes place for more at once; else a queue waits until all that it has under
    way is done before it begins more."""
    verifies: bool = False
    """What is read is compared with checksums of what was written."""

    @property
    def blocks_in_a_call(self) -> int:
        """How many blocks go in one system call, at most."""
        return 1 if self.submits_singly else max(1, self.queue_depth // _CALLS_IN_A_QUEUE)

    @property
    def workers(self) -> int:
        """System calls that one queue has under way at a time, at most."""
        return self.queue_depth // self.blocks_in_a_call

    def admits(self, blocks: int, under_way: int) -> bool:
        """Whether a call of so many blocks may begin while others are under way."""
        return not under_way or under_way + blocks <= self.queue_depth


def settings_of(section: Aio) -> IoSettings:
    """Read them from the configuration."""
    return IoSettings(
        block_nbytes=section.block_size,
        queue_depth=section.queue_depth,
        threads=section.intra_op_parallelism,
        submits_singly=section.single_submit,
        overlaps=section.overlap_events,
        verifies=section.verify_checksums,
    )


def section_of(settings: IoSettings) -> dict[str, int | bool]:
    """The keys of the section that say how fast these settings are."""
    return {
        "block_size": settings.block_nbytes,
        "queue_depth": settings.queue_depth,
        "intra_op_parallelism": settings.threads,
        "single_submit": settings.submits_singly,
        "overlap_events": settings.overlaps,
    }
