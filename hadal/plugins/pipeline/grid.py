"""The groups of ranks of a pipeline, under the names that Megatron's programs use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hadal.comm import Ranks, init_distributed
from hadal.errors import UsageError
from hadal.plugins.pipeline.topology import PipeDataParallelTopology, ProcessTopology

# Groups of one world, by their ranks, are reused: a process may build many pipelines, and each
# group has a connection to each of its ranks.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Ranks]] = WeakKeyDictionary()


def group_of(numbers: Sequence[int]) -> Ranks:
    """Return the group of these ranks of the world. All of them must call it, in one order."""
    world = Ranks.world()
    known = _made.setdefault(world.group, {})
    key = tuple(numbers)
    if key not in known:
        known[key] = world.some(numbers)
    return known[key]


class PipelineParallelGrid:
    """This rank's groups in a topology: axes `pipe` and `data`, perhaps `sequence` and `model`.

    All ranks must create it. It is an object for `initialize(mpu=...)`.

    Args:
        topology: the grid of ranks; by default the prime factors of their number are stages and
            data-parallel ranks in turn.
        process_group: all ranks; by default the world.

    Raises:
        UsageError: the topology has another number of ranks.
    """

    def __init__(
        self,
        topology: ProcessTopology | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        init_distributed()
        world = Ranks.world()
        size = world.size if process_group is None else dist.get_world_size(process_group)
        topology = _default_topology(world.size) if topology is None else topology
        if not topology.world_size() == size == world.size:
            raise UsageError(
                f"a topology of {topology.world_size()} ranks (axes {topology.axes} with"
                f" {topology.dims}) was given for a process group of {size} of {world.size} ranks;"
                " expected a topology of all ranks"
            )
        self._topo = topology
        self.global_rank, self.world_size = world.rank, world.size
        self.data_parallel_size = max(1, topology.get_dim("data"))
        self.pipe_parallel_size = max(1, topology.get_dim("pipe"))
        self.slice_parallel_size = max(1, topology.get_dim("model"))
        self.model_parallel_size = self.slice_parallel_size
        place = topology.get_coord(world.rank)
        self.stage_id: int = getattr(place, "pipe", 0)
        self.data_parallel_id: int = getattr(place, "data", 0)
        self.dp_groups = topology.get_axis_comm_lists("data")
        self.pp_groups = topology.get_axis_comm_lists("pipe")
        self.slice_groups = topology.get_axis_comm_lists("model")
        self.data = group_of(self._mine(self.dp_groups))
        """Ranks with the same layers and different samples."""
        self.pipe = group_of(self._mine(self.pp_groups))
        """Ranks with the stages of one model, the first stage first."""
        self.slices = group_of(self._mine(self.slice_groups))
        """Ranks that hold slices of the same layers."""
        self.sequence = group_of(self._mine(topology.get_axis_comm_lists("sequence")))
        """Ranks that share each sequence."""
        self.sharing = group_of(topology.filter_match(**_places(place, "pipe", "model")))
        """Ranks with the same parameters: samples times slices of sequences."""
        self.replica = group_of(topology.filter_match(**_places(place, "data", "sequence")))
        """Ranks with all parts of one model: stages, times slices of their layers."""
        self.dp_group, self.pp_group = list(self.data.numbers), list(self.pipe.numbers)
        self.slice_group = list(self.slices.numbers)
        self.p2p_groups = [list(pair) for pair in self._neighbours()]
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

    def _mine(self, lists: Sequence[Sequence[int]]) -> Sequence[int]:
        """Return the list that holds this rank; it is alone along an axis that does not exist."""
        found = (ranks for ranks in lists if self.global_rank in ranks)
        return next(found, [self.global_rank])

    def _neighbours(self) -> Iterator[tuple[int, int]]:
        """Yield each rank with that of the next stage; the first stage follows the last."""
        for rank in range(self.world_size):
            line = next((ranks for ranks in self.pp_groups if rank in ranks), [rank])
            yield rank, line[(line.index(rank) + 1) % len(line)]

    # ---- coordinates -----------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """Return the grid of ranks."""
        return self._topo

    def get_stage_id(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Return this rank's index among those with the same layers."""
        return self.data_parallel_id

    def get_global_rank(self) -> int:
        """Return this rank's number in the world."""
        return self.global_rank

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage at this rank's coordinates along the other axes.

        `kwargs` replace coordinates along these axes.
        """
        place = self._topo.get_coord(self.global_rank)._asdict()
        wanted = {**place, "pipe": stage_id, **kwargs}
        return self._topo.get_rank(**{axis: wanted[axis] for axis in self._topo.axes})

    # ---- stages ----------------------------------------------------------------------------------

    def get_pipe_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks with the stages of this model."""
        return self.pipe.group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    # ---- samples ---------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among those with the same layers."""
        return self.data.rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks with the same layers and different samples."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks with the same layers."""
        return self.data.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return their numbers in the world."""
        return list(self.dp_group)

    # ---- slices of sequences ---------------------------------------------------------------------

    def get_sequence_parallel_rank(self) -> int:
        """Return this rank's index among those that share each sequence."""
        return self.sequence.rank

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks that share each sequence."""
        return self.sequence.size

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that share each sequence."""
        return self.sequence.group

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks with the same parameters."""
        return self.sharing.group

    # ---- parts of one model ----------------------------------------------------------------------

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among all parts of one model."""
        return self.replica.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of parts of one model: stages, times slices of their layers."""
        return self.replica.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks with all parts of one model."""
        return self.replica.group

    # ---- slices of layers ------------------------------------------------------------------------

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's index among those with slices of the same layers."""
        return self.slices.rank

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of slices of each layer."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks with slices of the same layers."""
        return self.slices.group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group


def _places(place: Any, *axes: str) -> dict[str, int]:
    """Return the coordinates along those of these axes that exist."""
    return {axis: getattr(place, axis) for axis in axes if hasattr(place, axis)}


def _default_topology(size: int) -> ProcessTopology:
    stages, replicas = 1, 1
    for number, prime in enumerate(_prime_factors(size)):
        if number % 2 == 0:
            stages *= prime
        else:
            replicas *= prime
    return PipeDataParallelTopology(num_pp=stages, num_dp=replicas)


def _prime_factors(number: int) -> Iterator[int]:
    """Yield the prime factors, ascending."""
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1
