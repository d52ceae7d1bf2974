"""Disk I/O settings from the `aio` section.

Tests: tests/autotuning/test_disk.py, tests/offload/test_queues.py
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.config.aio import Aio

# The number of system calls that share a queue's depth if blocks go in batches.
_CALLS_IN_A_QUEUE = 4


@dataclass(frozen=True, slots=True)
class IoSettings:
    """The size of blocks and the number of them under way."""

    block_nbytes: int = 1 << 20
    """The bytes of one block, rounded up to whole pages."""
    queue_depth: int = 8
    """The maximum number of blocks that one queue has under way."""
    threads: int = 1
    """The number of queues that share each request; each gets consecutive blocks."""
    submits_singly: bool = False
    """True if each block is its own system call; otherwise a call transfers consecutive blocks, a
    quarter of the depth."""
    overlaps: bool = True
    """True if a queue starts a call as soon as another ends; otherwise it waits until all calls
    under way are done before it starts more."""
    verifies: bool = False
    """True if data read is compared with checksums of the data written."""

    @property
    def blocks_in_a_call(self) -> int:
        """The maximum number of blocks in one system call."""
        return 1 if self.submits_singly else max(1, self.queue_depth // _CALLS_IN_A_QUEUE)

    @property
    def workers(self) -> int:
        """The maximum number of system calls that one queue has under way."""
        return self.queue_depth // self.blocks_in_a_call

    def admits(self, blocks: int, under_way: int) -> bool:
        """Return True if a call of `blocks` blocks may start while `under_way` are under way."""
        return not under_way or under_way + blocks <= self.queue_depth


def settings_of(section: Aio) -> IoSettings:
    """Return the settings of a configuration section."""
    return IoSettings(
        block_nbytes=section.block_size,
        queue_depth=section.queue_depth,
        threads=section.intra_op_parallelism,
        submits_singly=section.single_submit,
        overlaps=section.overlap_events,
        verifies=section.verify_checksums,
    )


def section_of(settings: IoSettings) -> dict[str, int | bool]:
    """Return these settings as the keys of the section that affect speed."""
    return {
        "block_size": settings.block_nbytes,
        "queue_depth": settings.queue_depth,
        "intra_op_parallelism": settings.threads,
        "single_submit": settings.submits_singly,
        "overlap_events": settings.overlaps,
    }
