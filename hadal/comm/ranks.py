"""Groups of ranks: as one value, those around distributed experts, and in torch's form."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hadal.comm import functions
from hadal.comm.comms_log import numbers_of
from hadal.comm.functions import all_gather_object, labelled
from hadal.comm.local.neighbours import LocalPeers, identity, meet
from hadal.comm.start import kernels_share_one_queue, may_read_memory
from hadal.device import current_device
from hadal.errors import UsageError

_log = logging.getLogger(__name__)
T = TypeVar("T")

# Values made for a process group, as long as it lives: a program may end its process group and
# start another one, and a group holds a socket to each of its ranks.
_kept: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = WeakKeyDictionary()

_made: Counter[tuple[int, ...]] = Counter()
"""The number of groups of some ranks that this process has created. It never decreases."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that share one job of work, as seen by one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int
    host_group: dist.ProcessGroup
    """The group that carries tensors on the host if `group` does not."""
    local_peers: LocalPeers = field(default_factory=LocalPeers, compare=False, repr=False)
    """The ranks to which host tensors are sent without the backend."""

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # a copy of a module is on the same ranks

    @classmethod
    def world(cls) -> Ranks:
        """Return all ranks of the running process group."""
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("no process group runs; call hadal.init_distributed() first")
        return cls.of(group)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        """Return the ranks of a process group that this one is in; all of them must call it."""
        host_group = host_group_of(group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(
            group,
            rank,
            size,
            host_group,
            once(host_group, "local_peers", lambda: _find_local_peers(host_group)),
        )

    def in_blocks(self, size: int) -> tuple[Ranks, Ranks]:
        """Divide these ranks into blocks of `size` consecutive ones; `size` divides them.

        Returns:
            The ranks of my block, and those that have my place in every block. All ranks must call
            it.
        """
        block, row = once(self.group, size, lambda: _block_and_row(self.numbers, self.rank, size))
        return Ranks.of(block), Ranks.of(row)

    def some(self, numbers: Sequence[int]) -> Ranks:
        """Return a new group of some of these ranks, by their numbers in the world.

        It has its own communicator. All ranks of the new group must call it.
        """
        return Ranks.of(_new_group(numbers))

    def apart(self) -> Ranks:
        """Return the same ranks in a new group on the host, whose messages do not mix with these.

        All of them must call it.
        """
        return Ranks.of(_new_group(self.numbers, "gloo"))

    def twin(self) -> Ranks:
        """Return the same ranks for collectives whose order relative to these may differ by rank.

        An accelerator's backend matches collectives by their order alone, so the twin has its own
        communicator. On the host each kind has its own tag. All ranks must call it.
        """
        if self.size == 1 or current_device().type == "cpu":
            return self
        return Ranks.of(once(self.group, "twin", self._make_twin))

    def _make_twin(self) -> dist.ProcessGroup:
        if self.rank == 0 and kernels_share_one_queue():
            _log.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 sends all kernels through one queue, but stage 3"
                " gathers weights and reduces gradients in two communicators: behind each other in"
                " one queue they overlap less, and ranks that start them in different orders wait"
                " for each other forever. Unset it, or set it to 8, which is CUDA's default."
            )
        return _new_group(self.numbers)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The world's numbers of these ranks."""
        return tuple(dist.get_process_group_ranks(self.group))

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The other ranks, starting after mine, so that no two ranks call on the same one first."""
        return tuple((self.rank + step) % self.size for step in range(1, self.size))

    def group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """Return the group whose backend carries `tensor` from its device."""
        return self.host_group if tensor.device.type == "cpu" else self.group

    def exchanges_in_pairs(self, device: torch.device) -> bool:
        """Return True if tensors on `device` travel by sends and receives (gloo), not collectives.

        gloo's own reduce-scatter takes ten times as long as the exchange of the same bytes in
        pairs. Imagined ranks (torch's fake backend) make collectives alone.
        """
        return device.type == "cpu" and not self._are_imagined

    @cached_property
    def _are_imagined(self) -> bool:
        return dist.get_backend(self.host_group) == "fake"


def once(group: dist.ProcessGroup, what: Hashable, make: Callable[[], T]) -> T:
    """Return the value named `what` of a process group; the first call creates it."""
    known = _kept.setdefault(group, {})
    if what not in known:
        known[what] = make()
    found: T = known[what]
    return found


def _block_and_row(
    numbers: Sequence[int], rank: int, size: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of `size` consecutive ranks, and of every `size`-th, that hold `rank`.

    Each rank makes only its own two, so that their number does not grow with the world.
    """
    start = rank // size * size
    return _new_group(numbers[start : start + size]), _new_group(numbers[rank % size :: size])


def _new_group(numbers: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of these ranks, which all call it; others may be making another one."""
    is_local = len(numbers) < dist.get_world_size()
    with _made_by_some(numbers) if is_local else nullcontext():
        made = dist.new_group([*numbers], backend=backend, use_local_synchronization=is_local)
    return cast(dist.ProcessGroup, made)  # this rank is in it


@contextmanager
def _made_by_some(numbers: Sequence[int]) -> Iterator[None]:
    """Make a group inside the block that depends on its own ranks alone.

    Its name: torch takes the ranks' numbers and how many groups this process has. Ranks that are in
    more groups than others (the first and last stage share a tied weight) would name it differently
    and wait for each other, and a destroyed group's name would come again, with its old addresses.
    Here it is their numbers and how many groups of just these ranks were made, which all know.

    Its communicator: NCCL splits the world's with all of its ranks. torch does so for each group if
    the world is bound to a device (`device_id`), and would wait for ranks that do not make it.
    """
    world: Any = dist.group.WORLD
    _made[tuple(numbers)] += 1
    joined = "_".join(str(number) for number in numbers)
    text = f"{joined} {_made[tuple(numbers)]}"
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    bound, named = world.bound_device_id, distributed_c10d._hash_ranks_to_str
    world.bound_device_id = None
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        world.bound_device_id, distributed_c10d._hash_ranks_to_str = bound, named


def host_group_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks for tensors on the host.

    A caller's own process group may carry those of its accelerators only.
    """
    if "cpu" in str(dist.get_backend_config(group)):
        return group
    numbers = dist.get_process_group_ranks(group)
    return once(group, "host group", lambda: _new_group(numbers, "gloo"))


def _find_local_peers(group: dist.ProcessGroup) -> LocalPeers:
    """Return the neighbours among a group's ranks. All of them must call it."""
    size = dist.get_world_size(group)
    if size == 1 or "gloo" not in str(dist.get_backend_config(group)):
        return LocalPeers()
    identities: list[Any] = [identity(reads=may_read_memory())] * size
    labelled("the meeting of neighbours", all_gather_object, identities, identities[0], group)
    return meet(identities, dist.get_rank(group))


# ---- process groups in torch's form --------------------------------------------------------------

Group = dist.ProcessGroup | None


def get_world_group() -> Group:
    """Return the group of all processes; None if none runs."""
    return dist.group.WORLD


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Return the rank in the world of a group's rank."""
    if group is None or not dist.is_initialized():
        return group_rank
    return dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Return the ranks of the world that are in a group; by default all."""
    return list(numbers_of(group))


def new_group(
    ranks: list[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    **rest: Any,
) -> Any:
    """Make a group of some ranks; all ranks of the world must call it, in one order."""
    return dist.new_group(ranks, timeout, backend, **rest)


def destroy_process_group(group: Group = None) -> None:
    """Destroy a group; by default all of them."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def initialize_mesh_device(
    mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Return all ranks as a grid with named axes, with a group along each of them."""
    return init_device_mesh(current_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of a group has arrived, with any backend.

    Raises:
        CommunicationError: a rank did not arrive in time; the group's first rank names it, or with
            `wait_all_ranks` every missing rank.
    """
    if dist.is_initialized():
        group = dist.group.WORLD if group is None else group
        assert group is not None  # one runs
        functions.monitored_barrier(host_group_of(group), timeout, wait_all_ranks)


def has_all_gather_into_tensor() -> bool:
    """Return True: every torch that the library supports has this collective."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_all_gather_into_tensor


def has_coalescing_manager() -> bool:
    """Return False: no context joins several calls; the `_coalesced` functions do."""
    return False


# ---- groups around distributed experts -----------------------------------------------------------

_NAME = re.compile(r"ep_size_(\d+)")

Table = tuple[tuple[int, ...], ...]
"""One tuple of rank numbers for each group."""


@dataclass(frozen=True)
class ExpertGroups:
    """The two groups of this rank for experts that are distributed over a number of ranks."""

    name: str
    """`ep_size_<ranks>`, the `group_name` of experts' parameters."""
    parallel: Ranks
    """Ranks that together hold one copy of all experts: tokens travel among these."""
    data: Ranks
    """Ranks that hold the same experts: these average gradients and may shard model states."""


# The newest of each name, with the process group of the world that they belong to: a program may
# end its process group and start another one.
_newest: dict[str, tuple[ExpertGroups, dist.ProcessGroup | None]] = {}


def expert_tables(
    numbers: Sequence[int], size: int, *, data_first: bool = False
) -> tuple[Table, Table]:
    """Return the groups that share experts, and the groups that hold copies of the same experts.

    Args:
        numbers: ranks that hold the same dense parameters.
        size: how many of them share the experts; it divides them.
        data_first: copies are on consecutive ranks; else experts are.
    """
    block = len(numbers) // size if data_first else size
    blocks = tuple(tuple(numbers[i : i + block]) for i in range(0, len(numbers), block))
    rows = tuple(zip(*blocks, strict=True))
    return (rows, blocks) if data_first else (blocks, rows)


def group_name(size: int) -> str:
    """Return the name of the groups of experts that are distributed over `size` ranks."""
    return f"ep_size_{size}"


def size_in_name(name: str) -> int | None:
    """Return the ranks that share experts, by `group_name`; None for a program's own name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def make_expert_groups(size: int, among: Ranks, *, data_first: bool = False) -> ExpertGroups:
    """Return this rank's groups for experts over `size` ranks, made at the first call.

    All of `among` must call it with the same arguments. `expert_groups` then returns the result.

    Args:
        size: number of ranks that share the experts.
        among: ranks that hold the same dense parameters.
        data_first: place copies of the same experts on consecutive ranks; if false, the experts of
            one copy.

    Raises:
        UsageError: `size` does not divide the ranks.
    """
    if size < 1 or among.size % size:
        divisors = [n for n in range(1, among.size + 1) if among.size % n == 0]
        raise UsageError(
            f"experts over {size} ranks (ep_size): the number must divide the {among.size} ranks"
            f" that hold the same dense parameters; choose one of {divisors}"
        )
    parallel, data = once(
        among.group,
        ("experts", size, data_first),
        lambda: _new_groups(size, among, data_first=data_first),
    )
    copies = among if data is None else Ranks.of(data)
    groups = ExpertGroups(group_name(size), Ranks.of(parallel), copies)
    _newest[groups.name] = (groups, dist.group.WORLD)
    return groups


def _new_groups(
    size: int, among: Ranks, *, data_first: bool
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Make both groups.

    Tokens travel between gathers and reductions, which each rank orders as it likes, so that their
    group is never one of those. Experts that all ranks hold share buckets with dense parameters,
    so that their group is the same.
    """
    tables = expert_tables(among.numbers, size, data_first=data_first)
    mine = among.numbers[among.rank]
    parallel, data = (next(one for one in table if mine in one) for table in tables)
    return among.some(parallel).group, None if size == 1 else among.some(data).group


def expert_groups(name: str) -> ExpertGroups:
    """Return the newest groups of this name.

    Raises:
        UsageError: there are none.
    """
    if name not in expert_group_names():
        found = ", ".join(expert_group_names()) or "none"
        raise UsageError(
            f"there are no groups of ranks for experts named {name!r} (found: {found}); make them"
            " on all ranks, by hadal.initialize or by set_deepspeed_parallelism of the MoE layer"
        )
    return _newest[name][0]


def expert_group_names() -> tuple[str, ...]:
    """Return the names of the groups that exist, in the order in which they were made."""
    world = dist.group.WORLD
    for name in [n for n, (_, of) in _newest.items() if of is not world]:
        del _newest[name]
    return tuple(_newest)
