"""A world of ranks that need not exist, for plans: this process is one of them, and sends nothing.

A collective takes what this rank sends to be what the others send.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hadal.comm import ranks

_Place = tuple[Any, str]
_TABLES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
)
_VALUES: list[_Place] = [
    (dist.group, "WORLD"),
    (distributed_c10d, "_backend"),
    (distributed_c10d, "_default_pg_init_method"),
]
# The groups of each world have names of their own.
_serials = count(1)
_GROUPS = 1 << 24


class ImaginedWorld:
    """A context in which `torch.distributed` has these ranks, beside a world that runs.

    Inside another imagined world its groups stay known, as this rank sees its own.
    """

    def __init__(self, rank: int, size: int) -> None:
        first = next(_serials) * _GROUPS
        empty: dict[_Place, Any] = {(distributed_c10d, name): {} for name in _TABLES}
        if dist.is_initialized() and dist.get_backend() == "fake":
            empty = {(where, name): {**getattr(where, name)} for where, name in empty}
            shift = rank - dist.get_rank()
            numbers = empty[distributed_c10d, "_pg_group_ranks"]
            for group, places in numbers.items():
                numbers[group] = {number + shift: place for number, place in places.items()}
        empty |= dict.fromkeys(_VALUES) | {(distributed_c10d, "_group_count"): first}
        empty |= {(ranks, "_made"): defaultdict(lambda: first), (ranks, "_newest"): {}}
        self._other = _exchanged(empty)
        hook = sys.excepthook
        try:
            from torch.testing._internal.distributed.fake_pg import FakeStore  # it names "fake"

            make = distributed_c10d.init_process_group  # programs that are planned have another
            make("fake", rank=rank, world_size=size, store=FakeStore())
        finally:
            sys.excepthook = hook
            self._other = _exchanged(self._other)

    def __enter__(self) -> None:
        self._other = _exchanged(self._other)

    def __exit__(self, *_: object) -> None:
        self._other = _exchanged(self._other)


def _exchanged(new: Mapping[_Place, Any]) -> dict[_Place, Any]:
    """Put values in the place of those that are there, which are returned."""
    old = {(where, name): getattr(where, name) for where, name in new}
    for (where, name), value in new.items():
        setattr(where, name, value)
    return old
