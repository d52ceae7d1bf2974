"""The log of collectives as a table, with the time that each rank lost waiting for the last one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise
from typing import TYPE_CHECKING

import torch.distributed as dist

from hadal.comm.collectives import gather_objects
from hadal.comm.comms_log import Key, Row, comms_log, is_logging, pause_log
from hadal.comm.ranks import Ranks
from hadal.comm.start import get_rank
from hadal.units import shown_binary

if TYPE_CHECKING:
    from rich.table import Table

# By key: how many calls there were, and the latencies of the latest of them.
_Latencies = Mapping[Key, tuple[int, Sequence[float]]]

# Engines end in the same order on all ranks.
_ends = count()


def log_summary(show_straggler: bool = False) -> list[Row]:
    """Print the records of rank 0 as a table; return those of this rank.

    Args:
        show_straggler: compare latencies between the ranks: the last to come waits least. All ranks
            must call it.
    """
    rows = comms_log.rows()
    if show_straggler and dist.is_initialized():
        with pause_log():
            mine: _Latencies = {key_of(row): (row.count, row.latencies_s) for row in rows}
            everybody = gather_objects(mine, Ranks.world())
        rows = [replace(row, lost_s=lost(key_of(row), everybody)) for row in rows]
    if get_rank() == 0:
        _print(rows, show_straggler)
    return rows


def end_of_log(ranks: Ranks, patience_s: float = 2.0) -> list[Row]:
    """Return this rank's records at the end of a program; on rank 0 with the wait times by rank.

    Every rank should call it, but none waits for long: each sends its latencies to rank 0 through
    a store, as ranks may end at different times. If one is late or has ended, wait times are
    unknown.
    """
    rows = comms_log.rows()
    world = dist.group.WORLD
    if not rows or ranks.size == 1 or world is None or not hasattr(world, "get_group_store"):
        return rows
    mine: _Latencies = {key_of(row): (row.count, row.latencies_s) for row in rows}
    place = f"hadal/log/{next(_ends)}"
    with suppress(RuntimeError):  # a store may be gone with the process that had it
        store = world.get_group_store()
        if ranks.rank > 0:
            store.set(f"{place}/{ranks.rank}", json.dumps(list(mine.items())))
            return rows
        keys = [f"{place}/{rank}" for rank in range(1, ranks.size)]
        deadline = time.monotonic() + patience_s
        while not store.check(keys):
            if time.monotonic() > deadline:
                return rows
            time.sleep(0.01)
        everybody = [mine, *(_parsed(store.get(key)) for key in keys)]
        return [replace(row, lost_s=lost(key_of(row), everybody)) for row in rows]
    return rows


def _parsed(text: bytes) -> _Latencies:
    return {
        Key(name, nbytes, dtype, tuple(ranks), site): (number, latencies)
        for (name, nbytes, dtype, ranks, site), (number, latencies) in json.loads(text)
    }


def key_of(row: Row) -> Key:
    """Return the key that a row counts."""
    return Key(row.operation, row.nbytes, row.dtype, row.ranks, row.site)


def lost(key: Key, everybody: Sequence[_Latencies]) -> dict[int, float] | None:
    """Return, by rank, how much longer its latest calls took than those of the last rank to come.

    None if the ranks of the group have unequally many calls: they cannot be matched.
    """
    found = {rank: everybody[rank].get(key) for rank in key.ranks}
    counts = {None if one is None else one[0] for one in found.values()}
    if None in counts or len(counts) != 1:
        return None
    latencies = [one[1] for one in found.values() if one is not None]
    least = [min(call) for call in zip(*latencies, strict=True)]
    sums = [sum(own) - sum(least) for own in latencies]
    return dict(zip(found, sums, strict=True))


def _print(rows: Sequence[Row], show_straggler: bool) -> None:
    from rich.console import Console

    if not rows:
        what = "nothing has been recorded" if is_logging() else "it is off, and has recorded none"
        Console().print(f"log of collectives: {what}")
        return
    # Wide enough for all columns, wherever it is written to.
    Console(width=max(Console().width, 150)).print(table_of(rows, show_straggler))


def table_of(rows: Sequence[Row], show_straggler: bool) -> Table:
    """Return the rows as a table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    several = len({row.ranks for row in rows}) > 1
    sites = any(row.site for row in rows)
    table.add_column("operation")
    for title in ("message", "dtype", "calls", "sent", "total\nms", "mean\nms"):
        table.add_column(title, justify="right")
    table.add_column("algorithm\nGB/s", justify="right")
    table.add_column("bus\nGB/s", justify="right")
    for title, is_shown in (("ranks", several), ("straggler", show_straggler), ("called", sites)):
        if is_shown:
            table.add_column(title)
    before = ""
    for row in rows:
        extra = (
            (shown_ranks(row.ranks), several),
            (_straggler(row), show_straggler),
            (row.site, sites),
        )
        name = "" if row.operation == before else row.operation
        before = row.operation
        table.add_row(name, *_figures(row), *(text for text, is_shown in extra if is_shown))
    return table


def _figures(row: Row) -> Iterator[str]:
    yield shown_binary(row.nbytes)
    yield row.dtype
    yield f"{row.count:,}"
    yield shown_binary(row.sent_nbytes)
    yield f"{row.seconds * 1e3:.2f}"
    yield f"{row.mean_s * 1e3:.3f}"
    yield f"{row.algorithm_bandwidth / 1e9:.3f}"
    yield f"{row.bus_bandwidth / 1e9:.3f}"


def _straggler(row: Row) -> str:
    """Return the rank that came last, and how long the others waited for it, by call."""
    if row.lost_s is None or row.straggler is None:
        return "-"
    most = max(row.lost_s.values()) / len(row.latencies_s)
    return f"rank {row.straggler}: {most * 1e3:.3f} ms"


def shown_ranks(numbers: Sequence[int]) -> str:
    """Return the ranks as text, shortened if they are many."""
    if len(numbers) <= 4:
        return ", ".join(map(str, numbers))
    step = numbers[1] - numbers[0]
    is_even = all(b - a == step for a, b in pairwise(numbers))
    by = "" if step == 1 else f" by {step}"
    return f"{numbers[0]} to {numbers[-1]}{by}" if is_even else f"{len(numbers)} ranks"
