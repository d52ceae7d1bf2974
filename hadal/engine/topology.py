"""Which ranks share what: model states, samples, sequences, and the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hadal.comm import Ranks, get_local_world_size
from hadal.comm.collectives import gather_objects
from hadal.comm.faults import is_same_everywhere
from hadal.config import Config
from hadal.config.report import written
from hadal.errors import ConfigError, Fault, MismatchError, UsageError
from hadal.zero.sharing import Sharing

# What tensor-parallel programs call the ranks that hold parts of one model, the commonest first.
_MODEL_NAMES = ("model_parallel", "tensor_model_parallel", "slice_parallel")
_ASKED = ("group", "world_size", "rank")


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks in which this one does each kind of shared work."""

    sharing: Sharing
    """They average gradients and may cut model states: data times sequence parallel."""
    data_parallel: Ranks
    """They see different samples."""
    sequence_parallel: Ranks | None = None
    """They share each sequence; None where nobody does."""
    model_parallel: Ranks | None = None
    """They hold different parts of one model; None where every rank holds it all."""

    @property
    def sharding(self) -> Ranks:
        """All that average gradients, however many of them share one copy of model states."""
        return self.sharing.ranks

    @property
    def sequence_parallel_size(self) -> int:
        """How many ranks share each sequence."""
        return self.sequence_parallel.size if self.sequence_parallel else 1

    @property
    def model_parallel_size(self) -> int:
        """How many ranks hold parts of one model."""
        return self.model_parallel.size if self.model_parallel else 1


@dataclass(frozen=True, slots=True)
class TopologyWish:
    """What a program says of its ranks before any group is made; None is left to the keys."""

    mpu: Any = None
    data_parallel_size: int | None = None
    sequence_parallel_size: int | None = None

    @property
    def cuts_the_model(self) -> bool:
        """Whether the program's own groups say which ranks see different samples."""
        return self.mpu is not None and hasattr(self.mpu, "get_data_parallel_world_size")


def topology_wish_of(mpu: Any, mesh_param: Any, world: Ranks) -> TopologyWish:
    """Read the sizes that `initialize(mpu=...)` or `initialize(mesh_param=...)` bring along.

    Raises:
        UsageError: both are given, a method is missing, or the sizes do not fit the ranks.
    """
    if mpu is not None and mesh_param is not None:
        raise UsageError("initialize got mpu= and mesh_param=, which say the same; give one")
    if mesh_param is not None:
        return _wish_of_mesh(mesh_param, world)
    if mpu is None:
        return TopologyWish()
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        _expect(mpu, ["get_sequence_parallel_group", "get_sequence_parallel_rank"])
        shared = int(mpu.get_sequence_parallel_world_size())
    else:
        shared = 1
    wish = TopologyWish(mpu, None, shared)
    if not wish.cuts_the_model:
        if shared == 1 and not hasattr(mpu, "get_sequence_parallel_world_size"):
            _expect(mpu, [f"get_data_parallel_{what}" for what in _ASKED])
        return wish
    wanted = [f"get_data_parallel_{what}" for what in _ASKED]
    wanted += [f"get_{_model_name(mpu)}_{what}" for what in _ASKED]
    if shared > 1:
        wanted.append("get_sequence_data_parallel_group")
    _expect(mpu, wanted)
    data = int(mpu.get_data_parallel_world_size())
    model = int(getattr(mpu, f"get_{_model_name(mpu)}_world_size")())
    if data * shared * model != world.size:
        raise UsageError(
            f"initialize(mpu=...): {data} data-parallel x {shared} sequence-parallel x {model}"
            f" model-parallel ranks are {data * shared * model}, and there are {world.size}"
        )
    return TopologyWish(mpu, data, shared)


def _wish_of_mesh(mesh_param: Any, world: Ranks) -> TopologyWish:
    sizes = tuple(mesh_param) if isinstance(mesh_param, Sequence) else ()
    whole = all(isinstance(size, int) and size > 0 for size in sizes)
    if len(sizes) != 2 or not whole or sizes[0] * sizes[1] != world.size:
        raise UsageError(
            f"initialize(mesh_param={mesh_param!r}): expected (data_parallel, sequence_parallel),"
            f" two integers whose product is the {world.size} ranks"
        )
    return TopologyWish(None, *sizes)


def _model_name(mpu: Any) -> str:
    found = (name for name in _MODEL_NAMES if hasattr(mpu, f"get_{name}_world_size"))
    return next(found, _MODEL_NAMES[0])


def _expect(mpu: Any, methods: Sequence[str]) -> None:
    missing = [name for name in methods if not callable(getattr(mpu, name, None))]
    if missing:
        raise UsageError(
            f"initialize(mpu=...) got a {type(mpu).__name__} without {', '.join(missing)}; give an"
            " object that has them (Megatron's parallel_state module does)"
        )


def make_topology(wish: TopologyWish, config: Config, world: Ranks) -> Topology:
    """Find or make the groups. All ranks must call it.

    Raises:
        MismatchError: the ranks see themselves in different groups.
        ConfigError: the nodes do not fit a gather in two hops.
    """
    found = _make_groups(wish, config, world)
    return replace(found, sharing=sharing_of(config, found.sharding))


def sharing_of(config: Config, ranks: Ranks) -> Sharing:
    """How `ranks`, which hold the same parameters, share model states. All of them must call it."""
    zero = config.zero_optimization
    shard_size = zero.mics_shard_size
    # What is cut over one rank is whole.
    if zero.stage != 3 or ranks.size == 1 or shard_size == 1:
        return Sharing.over(ranks)
    shard_size = shard_size if shard_size > 0 else ranks.size
    node_size = None
    if zero.mics_hierarchical_params_gather:
        node_size = _node_size(ranks, shard_size)
    return Sharing.cut(ranks, shard_size, zero.zero_hpz_partition_size, node_size)


def _node_size(ranks: Ranks, shard_size: int) -> int:
    """How many ranks of a copy stand on one node."""
    local_size = get_local_world_size()
    if not is_same_everywhere(str(local_size), ranks) or local_size is None:
        pairs = zip(ranks.numbers, gather_objects(local_size, ranks), strict=True)
        told = ", ".join(f"rank {number}: {size}" for number, size in pairs)
        raise _no_hops(f"launchers must tell one number of ranks for all nodes, and told {told}")
    node_size = common_node_size(ranks.numbers, shard_size, local_size)
    if node_size is None:
        raise _no_hops(
            f"nodes of {local_size} ranks do not divide the blocks of {shard_size} ranks that share"
            " the weights evenly"
        )
    return node_size


def common_node_size(numbers: Sequence[int], shard_size: int, local_size: int) -> int | None:
    """How many ranks of each block of `shard_size` stand on each of the nodes it lies on.

    None where it is not the same number everywhere. Nodes hold `local_size` consecutive ranks.
    """
    places = ((place // shard_size, number // local_size) for place, number in enumerate(numbers))
    counts = set(Counter(places).values())
    return counts.pop() if len(counts) == 1 else None


def _no_hops(why: str) -> ConfigError:
    path = "zero_optimization.mics_hierarchical_params_gather"
    remedy = (
        "set LOCAL_WORLD_SIZE to the ranks of a node, choose zero_optimization.mics_shard_size so"
        " that nodes divide it (or it divides a node), or leave the key out"
    )
    faults = (Fault(path, f"true, but {why}; {remedy}"),)
    return ConfigError(written("the configuration", faults), faults)


def _make_groups(wish: TopologyWish, config: Config, world: Ranks) -> Topology:
    shared = wish.sequence_parallel_size or config.sequence_parallel_size
    sight = (shared, wish.data_parallel_size, type(wish.mpu).__name__)
    if not is_same_everywhere(repr(sight), world):
        sights = gather_objects(sight, world)
        told = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(sights))
        raise MismatchError(
            "the ranks were given different groupings (ranks of one sequence, ranks with different"
            f" samples, mpu): {told}; give the same on every rank"
        )
    if wish.cuts_the_model:
        return _topology_of_mpu(wish.mpu, shared)
    if shared == 1:
        return Topology(Sharing.over(world), world)
    sequence, data = world.in_blocks(shared)
    if wish.mpu is not None:
        mine = Ranks.of(wish.mpu.get_sequence_parallel_group()).numbers
        if mine != sequence.numbers:
            raise UsageError(
                f"initialize(mpu=...): rank {world.rank} shares its sequence with ranks {mine};"
                f" expected consecutive ranks, {sequence.numbers}"
            )
    return Topology(Sharing.over(world), data, sequence)


def _topology_of_mpu(mpu: Any, shared: int) -> Topology:
    data = Ranks.of(mpu.get_data_parallel_group())
    model = Ranks.of(getattr(mpu, f"get_{_model_name(mpu)}_group")())
    if shared == 1:
        return Topology(Sharing.over(data), data, None, model if model.size > 1 else None)
    sequence = Ranks.of(mpu.get_sequence_parallel_group())
    sharding = Ranks.of(mpu.get_sequence_data_parallel_group())
    return Topology(Sharing.over(sharding), data, sequence, model if model.size > 1 else None)
