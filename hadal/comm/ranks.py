"""A group of ranks, as one value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hadal.comm.functions import all_gather_object, labelled
from hadal.comm.neighbours import Circle, identity, meet
from hadal.comm.start import may_read_memory
from hadal.device import current_device

T = TypeVar("T")

# What was made for a process group, as long as that lives: a program may end its process group and
# start another one, and a group holds a socket to each of its ranks.
_blocks: WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[dist.ProcessGroup, ...]]]
_blocks = WeakKeyDictionary()
_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_twins: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_circles: WeakKeyDictionary[dist.ProcessGroup, Circle] = WeakKeyDictionary()


@dataclass(frozen=True)
class Ranks:
    """The ranks that share one job of work, as seen by one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int
    host_group: dist.ProcessGroup
    """The group that carries tensors on the host, where `group` does not."""
    circle: Circle = field(default_factory=Circle, compare=False, repr=False)
    """Those of the ranks that tensors on the host reach without the backend."""

    @classmethod
    def world(cls) -> Ranks:
        """All ranks of the running process group."""
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("no process group runs; call hadal.init_distributed() first")
        return cls.of(group)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        """The ranks of a process group that this one is in; all of them must call it."""
        host_group = host_group_of(group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(group, rank, size, host_group, _circle(host_group))

    def in_blocks(self, size: int) -> tuple[Ranks, Ranks]:
        """Cut these ranks into blocks of `size` consecutive ones; `size` divides them.

        Returns:
            The ranks of my block, and those that stand where I do in every block. All ranks must
            call it.
        """
        known = _blocks.setdefault(self.group, {})
        if size not in known:
            known[size] = _block_and_row(self.group, self.rank, size)
        block, row = known[size]
        return Ranks.of(block), Ranks.of(row)

    def apart(self) -> Ranks:
        """The same ranks in a new group on the host, whose messages do not mix with these.

        All of them must call it.
        """
        return Ranks.of(_new_group(list(self.numbers), "gloo"))

    def twin(self) -> Ranks:
        """The same ranks, for collectives whose order among these ones' is each rank's own affair.

        An accelerator's backend matches collectives by their order alone, so that the twin has a
        communicator of its own. On the host each kind has its own tag. All ranks must call it.
        """
        if self.size == 1 or current_device().type == "cpu":
            return self
        if self.group not in _twins:
            _twins[self.group] = _new_group(list(self.numbers))
        return Ranks.of(_twins[self.group])

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that these ranks have in the world."""
        return tuple(dist.get_process_group_ranks(self.group))

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The other ranks, starting after mine, so that no two ranks call on the same one first."""
        return tuple((self.rank + step) % self.size for step in range(1, self.size))

    def by_rank(self, mine: T, theirs: Sequence[T]) -> list[T]:
        """One value of each rank, rank 0's first; `theirs` are in the order of `others`."""
        found = dict(zip(self.others, theirs, strict=True))
        return [found.get(rank, mine) for rank in range(self.size)]

    def group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """The group whose backend carries `tensor` from where it is."""
        return self.host_group if tensor.device.type == "cpu" else self.group

    def exchanges_in_pairs(self, device: torch.device) -> bool:
        """Whether tensors on `device` travel by plain sends and receives (gloo), or by collectives.

        gloo's own reduce-scatter takes ten times as long as the exchange of the same bytes in
        pairs.
        """
        return device.type == "cpu"


def _block_and_row(
    group: dist.ProcessGroup, rank: int, size: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups of `size` consecutive ranks, and of every `size`-th, that `rank` is in.

    Each rank makes its own two alone, so that their number does not grow with the world.
    """
    numbers = dist.get_process_group_ranks(group)
    start = rank // size * size
    return _new_group(numbers[start : start + size]), _new_group(numbers[rank % size :: size])


def _new_group(numbers: list[int], backend: str | None = None) -> dist.ProcessGroup:
    """A group of these ranks, all of which come here; others may be making another one.

    Some alone make one by a name that torch forms of their numbers and of how many groups there
    are: the name of one that was destroyed before may come again, and with it where that one's
    ranks were to be found. All ranks of the world number their groups, and never meet that.
    """
    is_local = len(numbers) < dist.get_world_size()
    with _unbound() if is_local else nullcontext():
        made = dist.new_group(numbers, backend=backend, use_local_synchronization=is_local)
    return cast(dist.ProcessGroup, made)  # this rank is in it


@contextmanager
def _unbound() -> Iterator[None]:
    """Make groups that are not split off the world's communicator.

    NCCL splits one with all of its ranks. torch does so for each group where the world is bound to
    a device (`device_id`), and would wait for those that do not make this one.
    """
    world: Any = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def host_group_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for tensors on the host: a process group of a caller's own making
    may carry those of its accelerators only.
    """
    if "cpu" in str(dist.get_backend_config(group)):
        return group
    if group not in _host_groups:
        _host_groups[group] = _new_group(dist.get_process_group_ranks(group), "gloo")
    return _host_groups[group]


def _circle(group: dist.ProcessGroup) -> Circle:
    """The neighbours among a group's ranks. All of them must call it."""
    if group not in _circles:
        _circles[group] = _find_circle(group)
    return _circles[group]


def _find_circle(group: dist.ProcessGroup) -> Circle:
    size = dist.get_world_size(group)
    if size == 1 or "gloo" not in str(dist.get_backend_config(group)):
        return Circle()
    told: list[Any] = [identity(reads=may_read_memory())] * size
    labelled("the meeting of neighbours", all_gather_object, told, told[0], group)
    return meet(told, dist.get_rank(group))
