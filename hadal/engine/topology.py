"""Groups of ranks that share model states, samples, sequences, and the model itself.

Without a program's own groups, ranks form a grid: those with slices of the same layers are
consecutive, then those that share a sequence, then those with different samples.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hadal.comm import Ranks, get_local_world_size
from hadal.comm.collectives import gather_objects
from hadal.comm.faults import is_same_everywhere
from hadal.comm.mpu import (
    cuts_the_model,
    expect_data_methods,
    model_group_of,
    pipe_group_of,
    shared_size_of,
    sharing_group_of,
    sizes_of,
    tensor_group_of,
)
from hadal.comm.ranks import ExpertGroups, expert_groups
from hadal.config import Config
from hadal.config.zero_optimization import ZeroOptimization
from hadal.errors import Fault, MismatchError, UsageError, raise_faults
from hadal.zero.policy import STAGES
from hadal.zero.sharing import HolderGroups, ModelParts, Sharing

_log = logging.getLogger(__name__)


class Topology(NamedTuple):
    """Groups of ranks in which this one does each kind of shared work."""

    sharing: Sharing
    """Ranks that average gradients and may shard model states: data times sequence parallel."""
    data_parallel: Ranks
    """Ranks that see different samples."""
    sequence_parallel: Ranks | None = None
    """Ranks that share each sequence; None if none do."""
    parts: ModelParts | None = None
    """Ranks that hold different parts of one model; None if every rank holds it all."""
    pipe: Ranks | None = None
    """Ranks that hold the stages of one model; None if there is one stage."""
    is_from_program: bool = False
    """True if the program's own object (`mpu`) names the ranks of a sequence."""

    @property
    def sharding(self) -> Ranks:
        """Ranks that average gradients, however many of them share one copy of model states."""
        return self.sharing.ranks

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that share each sequence."""
        return self.sequence_parallel.size if self.sequence_parallel else 1

    @property
    def model_parallel(self) -> Ranks | None:
        """All ranks that hold parts of one model; None if every rank holds it all."""
        return None if self.parts is None else self.parts.ranks

    @property
    def tensor_parallel(self) -> Ranks | None:
        """Ranks that hold slices of the same layers; None if layers are whole."""
        return None if self.parts is None else self.parts.slices

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that hold parts of one model."""
        return self.model_parallel.size if self.model_parallel else 1


class RequestedRanks(NamedTuple):
    """Arguments of a program about its ranks; None leaves the choice to the keys."""

    mpu: Any = None
    data_parallel_size: int | None = None
    sequence_parallel_size: int | None = None
    tensor_parallel_size: int = 1

    @property
    def cuts_the_model(self) -> bool:
        """True if the program's own groups say which ranks see different samples."""
        return cuts_the_model(self.mpu)


def requested_ranks(mpu: Any, mesh_param: Any, world: Ranks) -> RequestedRanks:
    """Read the sizes in `initialize(mpu=...)` or `initialize(mesh_param=...)`.

    Raises:
        UsageError: both are given, a method is missing, or the sizes do not fit the ranks.
        NotBuiltYetError: the mpu groups ranks in other ways (contexts, experts).
    """
    if mpu is not None and mesh_param is not None:
        raise UsageError("initialize got both mpu= and mesh_param=; pass one")
    if mesh_param is not None:
        return _ranks_of_mesh(mesh_param, world)
    if mpu is None:
        return RequestedRanks()
    shared = shared_size_of(mpu)
    requested = RequestedRanks(mpu, None, shared)
    if not requested.cuts_the_model:
        if shared == 1 and not hasattr(mpu, "get_sequence_parallel_world_size"):
            expect_data_methods(mpu)
        return requested
    data, _ = sizes_of(mpu, world.size)
    return RequestedRanks(mpu, data, shared)


def with_slices(requested: RequestedRanks, config: Config) -> RequestedRanks:
    """Return the request with the configured tensor-parallel ranks."""
    section = config.tensor_parallel
    if not section.is_on or requested.cuts_the_model:
        return requested
    return requested._replace(tensor_parallel_size=section.autotp_size)


def _ranks_of_mesh(mesh_param: Any, world: Ranks) -> RequestedRanks:
    sizes = tuple(mesh_param) if isinstance(mesh_param, Sequence) else ()
    whole = all(isinstance(size, int) and size > 0 for size in sizes)
    if len(sizes) != 2 or not whole or sizes[0] * sizes[1] != world.size:
        raise UsageError(
            f"initialize(mesh_param={mesh_param!r}): expected (data_parallel, sequence_parallel),"
            f" two integers whose product is the {world.size} ranks"
        )
    return RequestedRanks(None, *sizes)


def make_topology(requested: RequestedRanks, config: Config, world: Ranks) -> Topology:
    """Find or make the groups. All ranks must call it.

    Raises:
        MismatchError: the ranks disagree about the groups.
        ConfigError: the nodes do not fit a gather in two hops.
    """
    found = make_groups(requested, config, world)
    return found._replace(sharing=sharing_of(config, found.sharding))


class Sharings:
    """The groups of ranks that hold each kind of parameters."""

    def __init__(self, config: Config, dense: Sharing) -> None:
        self._config = config
        self.dense = dense
        """The ranks that hold dense parameters."""
        self._of_experts: dict[str, Sharing] = {}

    def of(self, holders: HolderGroups) -> Sharing:
        """Return the ranks that hold some parameters. All must call it, in the same order.

        Raises:
            UsageError: they belong to groups of experts that do not exist.
            ConfigError: model states are shared in a way that is not built for experts.
        """
        if holders.experts is None:
            return replace(self.dense, tied=holders.tied) if holders.tied else self.dense
        if holders.experts not in self._of_experts:
            self._of_experts[holders.experts] = self._shared_by(expert_groups(holders.experts))
        return self._of_experts[holders.experts]

    def _shared_by(self, groups: ExpertGroups) -> Sharing:
        dense = self.dense
        if groups.data.size == dense.ranks.size:
            return dense
        if dense.replicas is not None or dense.node is not None:
            path = "zero_optimization.mics_shard_size"
            if dense.replicas is None:
                path = "zero_optimization.zero_hpz_partition_size"
            why = f"not built yet for experts over {groups.parallel.size} ranks; leave the key out"
            raise_faults([Fault(path, why)])
        return replace(sharing_of(self._config, groups.data), averaged_over=dense.ranks)


def sharing_of(config: Config, ranks: Ranks) -> Sharing:
    """Return how `ranks`, which hold the same parameters, share model states. All must call it."""
    zero = config.zero_optimization
    cuts_weights = STAGES[zero.stage].weights
    shard_size = zero.mics_shard_size if cuts_weights else ranks.size
    # A shard over one rank is whole.
    if not STAGES[zero.stage].gradients or ranks.size == 1 or shard_size == 1:
        return Sharing.over(ranks)
    shard_size = shard_size if shard_size > 0 else ranks.size
    second = zero.zero_hpz_partition_size if cuts_weights else 1
    hops = _sizes_of_hops(zero, ranks, shard_size)
    return Sharing.cut(ranks, shard_size, second, *hops, gathers_on_use=cuts_weights)


def _sizes_of_hops(
    zero: ZeroOptimization, ranks: Ranks, shard_size: int
) -> tuple[int | None, int | None]:
    """Return how many ranks of a copy are on one node: for gathers, and for coded gradients.

    None means one hop.
    """
    gathers = zero.mics_hierarchical_params_gather and STAGES[zero.stage].weights
    if not (gathers or zero.zero_quantized_gradients):
        return None, None
    size, why = _node_size(ranks, shard_size)
    if gathers and size is None:
        _refuse_hops(why)
    if size is None and ranks.rank == 0:
        _log.warning(
            "zero_optimization.zero_quantized_gradients: gradients are reduced in one hop over all"
            " ranks, which takes more bytes between nodes than two: %s",
            why,
        )
    return (size if gathers else None), (size if zero.zero_quantized_gradients else None)


def _node_size(ranks: Ranks, shard_size: int) -> tuple[int | None, str]:
    """Return how many ranks of a copy are on one node; None if not known, and why."""
    local_size = get_local_world_size()
    if not is_same_everywhere(str(local_size), ranks) or local_size is None:
        pairs = zip(ranks.numbers, gather_objects(local_size, ranks), strict=True)
        listed = ", ".join(f"rank {number}: {size}" for number, size in pairs)
        return None, f"launchers must set one number of ranks for all nodes, but set {listed}"
    return common_node_size(ranks.numbers, shard_size, local_size), (
        f"nodes of {local_size} ranks do not divide the blocks of {shard_size} ranks that share the"
        " weights evenly"
    )


def common_node_size(numbers: Sequence[int], shard_size: int, local_size: int) -> int | None:
    """Return how many ranks of each block of `shard_size` are on each of the block's nodes.

    None if the number differs. Nodes hold `local_size` consecutive ranks.
    """
    places = ((place // shard_size, number // local_size) for place, number in enumerate(numbers))
    counts = set(Counter(places).values())
    return counts.pop() if len(counts) == 1 else None


def _refuse_hops(why: str) -> None:
    path = "zero_optimization.mics_hierarchical_params_gather"
    remedy = (
        "set LOCAL_WORLD_SIZE to the ranks of a node, choose zero_optimization.mics_shard_size so"
        " that nodes divide it (or it divides a node), or leave the key out"
    )
    raise_faults([Fault(path, f"true, but {why}; {remedy}")])


def make_groups(requested: RequestedRanks, config: Config, world: Ranks) -> Topology:
    """Find or make the groups as `make_topology`, without those that share model states."""
    shared = requested.sequence_parallel_size or config.sequence_parallel_size
    sight = (
        shared,
        requested.data_parallel_size,
        requested.tensor_parallel_size,
        type(requested.mpu).__name__,
    )
    if not is_same_everywhere(repr(sight), world):
        sights = gather_objects(sight, world)
        listed = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(sights))
        raise MismatchError(
            "the ranks have different groupings (ranks of one sequence, ranks with different"
            f" samples, ranks of one layer, mpu): {listed}; pass the same on every rank"
        )
    if requested.cuts_the_model:
        return _topology_of_mpu(requested.mpu, shared)
    parts, ranks = None, world
    if requested.tensor_parallel_size > 1:
        slices, ranks = world.in_blocks(requested.tensor_parallel_size)
        parts = ModelParts(slices, slices)
    if shared == 1:
        return Topology(Sharing.over(ranks), ranks, parts=parts)
    sequence, data = ranks.in_blocks(shared)
    if requested.mpu is not None:
        mine = Ranks.of(requested.mpu.get_sequence_parallel_group()).numbers
        if mine != sequence.numbers:
            raise UsageError(
                f"initialize(mpu=...): rank {world.rank} shares its sequence with ranks {mine};"
                f" expected consecutive ranks, {sequence.numbers}"
            )
    from_program = requested.mpu is not None
    return Topology(Sharing.over(ranks), data, sequence, parts, is_from_program=from_program)


def _topology_of_mpu(mpu: Any, shared: int) -> Topology:
    sharding, data = Ranks.of(sharing_group_of(mpu)), Ranks.of(mpu.get_data_parallel_group())
    sequence = Ranks.of(mpu.get_sequence_parallel_group()) if shared > 1 else None
    stages, slices = pipe_group_of(mpu), tensor_group_of(mpu)
    model = Ranks.of(model_group_of(mpu))
    pipe = None if stages is None else Ranks.of(stages)
    tensor = None if slices is None else Ranks.of(slices)
    if pipe is not None and tensor is not None and tensor.size * pipe.size > model.size:
        tensor = None  # its one name for both means all parts: the stages
    parts = ModelParts(model, tensor) if model.size > 1 else None
    return Topology(Sharing.over(sharding), data, sequence, parts, pipe, is_from_program=True)


# ---- the communicators of ranks that need not exist ----------------------------------------------


class Communicator(NamedTuple):
    """A group of ranks that an accelerator's backend connects."""

    purpose: str
    ranks: int
    is_to_each: bool = False
    """True: a rank sends to each of the others; false: to its neighbours in rings."""


def model_parts_of(config: Config) -> int:
    """Return how many ranks hold parts of one model, as far as the configuration says."""
    tensor = config.tensor_parallel
    return stages_of(config) * (tensor.autotp_size if tensor.is_on else 1)


def stages_of(config: Config) -> int:
    """Return how many stages the configuration splits a model into."""
    pipeline = config.pipeline
    return pipeline.stages if pipeline.auto and isinstance(pipeline.stages, int) else 1


def communicators_of(
    config: Config,
    ranks: int,
    node_size: int,
    experts: Iterable[int] = (),
    topology: Topology | None = None,
) -> list[Communicator]:
    """Return the communicators of one of `ranks`, as `initialize` makes and training uses them.

    The others are on the host, or unused and so never connected. A pipeline's rank has two
    neighbours.

    Args:
        config: the configuration.
        ranks: all ranks, which need not exist.
        node_size: how many of them are on one node.
        experts: over how many ranks the model distributes experts; several numbers are possible.
        topology: the groups, which say what the configuration may not.
    """
    stages, parts = stages_of(config), model_parts_of(config)
    if topology is not None:
        stages, parts = topology.pipe.size if topology.pipe else 1, topology.model_parallel_size
    dense = ranks // parts
    found = [
        Communicator("all ranks", ranks),
        Communicator("stages", stages),
        Communicator("slices of layers", parts // stages),
        Communicator("slices of sequences", config.sequence_parallel_size, True),
    ]
    if stages > 1:
        is_ring = config.pipeline.schedule == "interleaved"
        neighbours = 2 if is_ring else min(2, stages - 1)
        found += [Communicator("messages between stages", 2, True)] * (2 * neighbours)
    if parts > 1:
        found.append(Communicator("the same parameters", dense))
    found += _communicators_of_sharing(config, dense, node_size)
    for size in experts:
        if size > 1:
            found.append(Communicator("tokens to experts", size, True))
            found.append(Communicator("the same experts", dense // size))
            found += _communicators_of_sharing(config, dense // size, node_size)
    return [one for one in found if one.ranks > 1]


def _communicators_of_sharing(config: Config, ranks: int, node_size: int) -> list[Communicator]:
    """Return those that `sharing_of` makes beside the group of the ranks themselves."""
    zero = config.zero_optimization
    cuts_weights = STAGES[zero.stage].weights
    size = zero.mics_shard_size if cuts_weights and zero.mics_shard_size > 0 else ranks
    if not STAGES[zero.stage].gradients or ranks == 1 or size == 1:
        return []
    found: list[Communicator] = []
    codes = zero.zero_quantized_gradients
    node = common_node_size(range(ranks), size, node_size) or 1
    hops = (
        () if node in (None, 1, size) else (("inside nodes", node), ("across nodes", size // node))
    )
    if size < ranks:
        found += [Communicator("one copy", size), Communicator("the same shard", ranks // size)]
    if cuts_weights and 1 < zero.zero_hpz_partition_size < size:
        found.append(Communicator("the second copy", zero.zero_hpz_partition_size))
    if cuts_weights:
        found.append(Communicator("reductions", size, codes and not hops))
    if cuts_weights and zero.mics_hierarchical_params_gather:
        found += [Communicator(f"gathers {name}", count) for name, count in hops]
    if codes:
        found += [Communicator(f"coded gradients {name}", count, True) for name, count in hops]
    return found
