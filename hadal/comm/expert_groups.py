"""Groups of ranks around distributed experts, by the name that experts' parameters carry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hadal.comm.ranks import Ranks, once
from hadal.errors import UsageError

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
