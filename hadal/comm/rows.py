"""Sums over ranks of tensors that are zero but for a few rows: embeddings' gradients.

A slice travels as its rows that are not zero, with their numbers, where that is shorter than the
slice itself. The same is added up as in the dense way, less its zeros: the same bits between pairs
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.comm.collectives import (
    slice_of,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from hadal.comm.factors import Factors, for_the_wire, sum_into
from hadal.comm.pairs import exchange, receive, send
from hadal.comm.pending import Pending, Work
from hadal.comm.ranks import Ranks
from hadal.device import read_on_host, waiting_for

# Tags of counts, row numbers and values: on the way to the owner of a slice, and from it.
_TO_OWNERS, _FROM_OWNERS = (21, 22, 23), (24, 25, 26)
_WHOLE = -1


class _Rows(NamedTuple):
    """A slice as it travels."""

    values: Tensor
    """(rows, row_numel)."""
    numbers: Tensor | None
    """(rows,) int32: which rows of the slice they are, in rising order; None: all of it."""


@dataclass(frozen=True, slots=True)
class RowWire:
    """How a tensor of rows travels: as `start_reduce_scatter` takes it, and how long a row is."""

    dtype: torch.dtype
    factors: Factors
    row_numel: int


def start_rows_reduce_scatter(
    full: Tensor, out: Tensor, ranks: Ranks, wire: RowWire, accumulate: bool, label: str
) -> Pending:
    """As `start_reduce_scatter`, of a 1-D `full` whose slices are whole rows."""

    def dense() -> Pending:
        return start_reduce_scatter(full, out, ranks, wire.dtype, accumulate, label, wire.factors)

    if ranks.size == 1:
        return dense()
    before, after = wire.factors
    mine = slice_of(full, ranks.rank, ranks).view(-1, wire.row_numel)
    if not ranks.exchanges_in_pairs(full.device):
        first = ranks.rank * mine.shape[0]

        def cut(pieces: Sequence[_Rows]) -> None:
            own = [_between(piece, first, first + mine.shape[0]) for piece in pieces]
            _add_up(out, own, after, accumulate, wire.row_numel)

        return _start_by_collectives(full, ranks, wire, label, cut, dense)
    sent = {
        other: _packed(slice_of(full, other, ranks), before, wire.dtype, wire.row_numel)
        for other in ranks.others
    }
    touched = _touched(mine)

    def add(pieces: Sequence[_Rows]) -> None:
        own = _Rows(for_the_wire(mine[touched], before, wire.dtype), touched)
        _add_up(out, ranks.by_rank(own, pieces), after, accumulate, wire.row_numel)

    return _start_pairs(sent, mine.shape, ranks, wire.dtype, (label, *_TO_OWNERS), add)


def start_rows_all_reduce(full: Tensor, ranks: Ranks, wire: RowWire, label: str) -> Pending:
    """As `start_all_reduce`, of a 1-D `full` whose slices are whole rows."""

    def dense() -> Pending:
        return start_all_reduce(full, ranks, wire.dtype, label, wire.factors)

    if ranks.size == 1:
        return dense()
    if not ranks.exchanges_in_pairs(full.device):

        def add(pieces: Sequence[_Rows]) -> None:
            full.zero_()
            _add_up(full, pieces, wire.factors.after, False, wire.row_numel)

        return _start_by_collectives(full, ranks, wire, label, add, dense)
    mine = slice_of(full, ranks.rank, ranks)
    is_narrow = wire.dtype.itemsize < full.dtype.itemsize
    at_owner, on_arrival = wire.factors.at_owner_and_on_arrival(is_narrow)
    scaled = RowWire(wire.dtype, Factors(wire.factors.before, at_owner), wire.row_numel)
    back = RowWire(
        wire.dtype if is_narrow else full.dtype, Factors(1.0, on_arrival), wire.row_numel
    )
    # Rounded as it travels on: the arithmetic is that of the dense way.
    out = torch.empty_like(mine, dtype=wire.dtype) if is_narrow else mine
    pending = start_rows_reduce_scatter(full, out, ranks, scaled, False, label)
    return pending.then(lambda: _start_spread(full, out, ranks, back, label))


def _start_spread(full: Tensor, mine: Tensor, ranks: Ranks, wire: RowWire, label: str) -> Pending:
    """Give every rank the owners' slices, of which I have `mine`, in rows where they are few."""
    packed = _packed(mine, 1.0, wire.dtype, wire.row_numel)

    def fill(pieces: Sequence[_Rows]) -> None:
        owners = [ranks.rank, *ranks.others]
        # My own too: what was rounded for the wire has the same bits on every rank.
        for owner, piece in zip(owners, [packed, *pieces], strict=True):
            _add_up(
                slice_of(full, owner, ranks), [piece], wire.factors.after, False, wire.row_numel
            )

    sent = dict.fromkeys(ranks.others, packed)
    shape = mine.view(-1, wire.row_numel).shape
    return _start_pairs(sent, shape, ranks, wire.dtype, (label, *_FROM_OWNERS), fill)


def _count(rows: _Rows) -> Tensor:
    return torch.tensor([_WHOLE if rows.numbers is None else rows.numbers.numel()])


def _touched(rows: Tensor) -> Tensor:
    """The numbers (int32) of the rows that are not zero; a NaN is not zero either."""
    is_touched = (rows != 0).any(dim=1)
    with waiting_for("the rows that are not zero") if rows.device.type != "cpu" else nullcontext():
        return is_touched.nonzero().flatten().to(torch.int32)


def _packed(cut: Tensor, before: float, dtype: torch.dtype, row_numel: int) -> _Rows:
    """A 1-D slice in the shorter of its two forms."""
    rows = cut.view(-1, row_numel)
    touched = _touched(rows)
    if _is_short(touched.numel(), rows.shape[0], row_numel, dtype):
        return _Rows(for_the_wire(rows[touched], before, dtype), touched)
    return _Rows(for_the_wire(rows, before, dtype), None)


def _is_short(count: int, rows: int, row_numel: int, dtype: torch.dtype) -> bool:
    """Whether so many rows with their numbers take fewer bytes than all of them without."""
    row_nbytes = row_numel * dtype.itemsize
    return count * (row_nbytes + torch.int32.itemsize) < rows * row_nbytes


def _start_pairs(
    sent: Mapping[int, _Rows],
    shape: Sequence[int],
    ranks: Ranks,
    dtype: torch.dtype,
    way: tuple[str, int, int, int],
    act: Callable[[Sequence[_Rows]], None],
) -> Pending:
    """Exchange slices of `shape` with every other rank: first how many rows, then the rows.

    `act` gets what arrived, in the order of `ranks.others`.
    """
    label, count_tag, number_tag, value_tag = way
    moving: list[Work] = []
    counts = torch.empty(ranks.size, dtype=torch.int64)
    leaving = [(_count(rows), other) for other, rows in sent.items()]
    coming = [(counts[other : other + 1], other) for other in sent]
    counting = exchange("all_to_all", counts, leaving, coming, ranks, count_tag, label)
    for other, rows in sent.items():
        if rows.numbers is not None and rows.numbers.numel():
            moving.append(send(rows.numbers, other, ranks, number_tag, label))
        if rows.values.numel():
            moving.append(send(rows.values, other, ranks, value_tag, label))

    def move() -> Pending:
        pieces = []
        for other in ranks.others:
            count = int(counts[other])
            is_whole = count == _WHOLE
            numbers = None if is_whole else torch.empty(count, dtype=torch.int32)
            values = torch.empty(shape[0] if is_whole else count, shape[1], dtype=dtype)
            if numbers is not None and count:
                moving.append(receive(numbers, other, ranks, number_tag, label))
            if values.numel():
                moving.append(receive(values, other, ranks, value_tag, label))
            pieces.append(_Rows(values, numbers))
        return Pending(label, moving, lambda: act(pieces))

    # What moves is waited for only once everybody knows how much to expect.
    return Pending(label, counting, move)


def _start_by_collectives(
    full: Tensor,
    ranks: Ranks,
    wire: RowWire,
    label: str,
    act: Callable[[Sequence[_Rows]], None],
    dense: Callable[[], Pending],
) -> Pending:
    """Gather every rank's rows on every rank; the dense way where one rank brings too many."""
    rows = full.view(-1, wire.row_numel)
    touched = _touched(rows)
    counts = torch.zeros(ranks.size, dtype=torch.int64, device=full.device)
    counts[ranks.rank] = touched.numel()

    def exchange() -> Pending:
        found = read_on_host(counts, f"the numbers of rows in {label}").tolist()
        most = max(found)
        if not _is_short(most * ranks.size, rows.shape[0], wire.row_numel, wire.dtype):
            return dense()
        if not most:
            return Pending(label, act=lambda: act([_Rows(rows[:0], touched[:0])]))
        numbers = touched.new_zeros(most * ranks.size)
        values = full.new_zeros(most * ranks.size * wire.row_numel, dtype=wire.dtype)
        packed = for_the_wire(rows[touched], wire.factors.before, wire.dtype).flatten()
        slice_of(numbers, ranks.rank, ranks)[: touched.numel()] = touched
        slice_of(values, ranks.rank, ranks)[: packed.numel()] = packed

        def unpack() -> None:
            act(
                [
                    _Rows(
                        slice_of(values, rank, ranks).view(-1, wire.row_numel)[:count],
                        slice_of(numbers, rank, ranks)[:count],
                    )
                    for rank, count in enumerate(found)
                ]
            )

        works = [*start_all_gather(numbers, ranks, label).works]
        works += start_all_gather(values, ranks, label).works
        return Pending(label, works, unpack)

    return start_all_gather(counts, ranks, label).then(exchange)


def _between(piece: _Rows, first: int, stop: int) -> _Rows:
    """The rows numbered [first, stop), counted from `first`."""
    assert piece.numbers is not None  # collectives carry rows only
    inside = (piece.numbers >= first) & (piece.numbers < stop)
    return _Rows(piece.values[inside], piece.numbers[inside] - first)


def _add_up(
    out: Tensor, pieces: Sequence[_Rows], after: float, accumulate: bool, row_numel: int
) -> None:
    """`sum_into`, of slices in either form: of those rows that any of them has."""
    if any(piece.numbers is None for piece in pieces):
        whole = [_whole(piece, out.numel()) for piece in pieces]
        sum_into(out, whole, after, accumulate)
        return
    rows = out.view(-1, row_numel)
    union = torch.cat([piece.numbers for piece in pieces if piece.numbers is not None]).unique()
    found = rows[union] if accumulate else out.new_empty(union.numel(), row_numel)
    sum_into(found.view(-1), [_among(piece, union) for piece in pieces], after, accumulate)
    if not accumulate:
        rows.zero_()
    rows[union] = found


def _among(piece: _Rows, union: Tensor) -> Tensor:
    """The rows numbered `union`, those of a slice and zeros, in 1-D."""
    assert piece.numbers is not None  # it has no others
    if piece.numbers.numel() == union.numel():
        return piece.values.flatten()
    found = piece.values.new_zeros(union.numel(), piece.values.shape[1])
    found[torch.searchsorted(union, piece.numbers)] = piece.values
    return found.view(-1)


def _whole(piece: _Rows, numel: int) -> Tensor:
    """A slice in its 1-D dense form."""
    if piece.numbers is None:
        return piece.values.flatten()
    full = piece.values.new_zeros(numel // piece.values.shape[1], piece.values.shape[1])
    full[piece.numbers] = piece.values
    return full.flatten()
