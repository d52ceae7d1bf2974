"""Groups of ranks that share a sequence, with the method names of an `mpu`."""

from __future__ import annotations

import torch.distributed as dist

from hadal.comm import Ranks, init_distributed
from hadal.errors import SequenceError


class SequenceGroups:
    """Consecutive ranks that share each sequence, as an object for `initialize(mpu=...)`.

    All ranks must create it.

    Raises:
        SequenceError: the size is less than 2, or does not divide the number of ranks.
    """

    def __init__(self, sequence_parallel_size: int) -> None:
        init_distributed()
        world = Ranks.world()
        size = sequence_parallel_size
        if not isinstance(size, int) or size < 2 or world.size % size:
            divisors = [n for n in range(2, world.size + 1) if world.size % n == 0]
            raise SequenceError(
                f"sequence_parallel_size is {size!r}, but there are {world.size} ranks; expected a"
                f" divisor of them greater than 1{f': {divisors}' if divisors else ''}"
            )
        self._world = world
        self._sequence, _ = world.in_blocks(size)

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that share this rank's sequences."""
        return self._sequence.group

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks that share each sequence."""
        return self._sequence.size

    def get_sequence_parallel_rank(self) -> int:
        """Return this rank's index in the sequence."""
        return self._sequence.rank

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that average gradients: all of them."""
        return self._world.group

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of all ranks."""
        return self._world.size

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank's number among all ranks."""
        return self._world.rank


_newest: list[SequenceGroups] = []


def initialize_sequence_parallel(sequence_parallel_size: int) -> SequenceGroups:
    """Create the groups that this module's functions return from now on; return them.

    All ranks must call it.

    Raises:
        SequenceError: the size is less than 2, or does not divide the number of ranks.
    """
    _newest[:] = [SequenceGroups(sequence_parallel_size)]
    return _newest[0]


def _groups() -> SequenceGroups:
    if not _newest:
        raise SequenceError(
            "there are no groups of ranks that share a sequence; call"
            " initialize_sequence_parallel(size) on all ranks"
        )
    return _newest[0]


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """Return the ranks that share this rank's sequences."""
    return _groups().get_sequence_parallel_group()


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share each sequence."""
    return _groups().get_sequence_parallel_world_size()


def get_sequence_parallel_rank() -> int:
    """Return this rank's index in the sequence."""
    return _groups().get_sequence_parallel_rank()


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Return the ranks that average gradients: all of them."""
    return _groups().get_sequence_data_parallel_group()


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of all ranks."""
    return _groups().get_sequence_data_parallel_world_size()


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's number among all ranks."""
    return _groups().get_sequence_data_parallel_rank()
