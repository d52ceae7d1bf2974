"""A group of ranks, as one value."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hadal.comm.functions import all_gather_object, labelled
from hadal.comm.local.neighbours import LocalPeers, identity, meet
from hadal.comm.start import kernels_share_one_queue, may_read_memory
from hadal.device import current_device

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
        pairs.
        """
        return device.type == "cpu"


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
