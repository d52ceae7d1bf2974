"""Sums over ranks of tensors that are zero but for a few rows: embeddings' gradients.

A slice travels as its rows that are not zero, with their numbers, if that is shorter than the slice
itself. The sums are those of the dense way without its zeros: the same bits between pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.comm.collectives import (
    Factors,
    for_the_wire,
    slice_of,
    start_all_gather,
    start_all_reduce,
    start_exchange,
    start_reduce_scatter,
    sum_into,
)
from hadal.comm.pending import Pending
from hadal.comm.ranks import Ranks
from hadal.device import read_on_host, waiting_for

# Tags of counts, row numbers and values: on the way to the owner of a slice, and from it.
_TO_OWNERS, _FROM_OWNERS = (21, 22, 23), (24, 25, 26)
_WHOLE = -1
_TOUCHED = "the rows that are not zero"


class _Rows(NamedTuple):
    """A slice as it travels: some of its rows, or all of them without their numbers."""

    values: Tensor
    """(rows, row_numel)."""
    numbers: Tensor
    """(rows,) int32: the numbers of these rows in the slice, ascending; (0,): all of them."""

    @classmethod
    def room(cls, announced: int, shape: Sequence[int], dtype: torch.dtype) -> _Rows:
        """Return room for the rows that a rank has announced of a slice of `shape`."""
        rows, numbers = (shape[0], 0) if announced == _WHOLE else (announced, announced)
        values = torch.empty(rows, shape[1], dtype=dtype)
        return cls(values, torch.empty(numbers, dtype=torch.int32))

    @property
    def is_whole(self) -> bool:
        """Return True if all rows travel, without their numbers."""
        return self.numbers.numel() < self.values.shape[0]

    @property
    def announced(self) -> int:
        """Return the count that the receiver gets first: how many rows to expect."""
        return _WHOLE if self.is_whole else self.numbers.numel()


class RowWire(NamedTuple):
    """The wire format of a tensor of rows: as for `start_reduce_scatter`, and the rows' length."""

    dtype: torch.dtype
    factors: Factors
    row_numel: int


def start_rows_reduce_scatter(
    full: Tensor, out: Tensor, ranks: Ranks, wire: RowWire, accumulate: bool, label: str
) -> Pending:
    """Reduce as `start_reduce_scatter` a 1-D `full` whose slices are whole rows."""
    dense = partial(
        start_reduce_scatter, full, out, ranks, wire.dtype, accumulate, label, wire.factors
    )
    if ranks.size == 1:
        return dense()
    mine = slice_of(full, ranks.rank, ranks).view(-1, wire.row_numel)
    if not ranks.exchanges_in_pairs(full.device):
        rank, first = ranks.rank, ranks.rank * mine.shape[0]

        def cut(pieces: Sequence[_Rows], ends: Sequence[Sequence[int]]) -> None:
            own = [slice(end[rank - 1] if rank else 0, end[rank]) for end in ends]
            mine = [
                _Rows(p.values[c], p.numbers[c] - first) for p, c in zip(pieces, own, strict=True)
            ]
            _add_up(out, mine, wire, accumulate)

        return _start_by_collectives(full, ranks, wire, label, cut, dense)
    sent = [_packed(slice_of(full, rank, ranks), wire) for rank in range(ranks.size)]

    def add(pieces: Sequence[_Rows]) -> None:
        _add_up(out, pieces, wire, accumulate)

    return _start_exchange(sent, mine.shape, ranks, (label, *_TO_OWNERS), add)


def start_rows_all_reduce(full: Tensor, ranks: Ranks, wire: RowWire, label: str) -> Pending:
    """Reduce as `start_all_reduce` a 1-D `full` whose slices are whole rows."""
    dense = partial(start_all_reduce, full, ranks, wire.dtype, label, wire.factors)
    if ranks.size == 1:
        return dense()
    if not ranks.exchanges_in_pairs(full.device):

        def add(pieces: Sequence[_Rows], _ends: object) -> None:
            full.zero_()
            _add_up(full, pieces, wire, False)

        return _start_by_collectives(full, ranks, wire, label, add, dense)
    mine = slice_of(full, ranks.rank, ranks)
    is_narrow = wire.dtype.itemsize < full.dtype.itemsize
    at_owner, on_arrival = wire.factors.at_owner_and_on_arrival(is_narrow)
    scaled = RowWire(wire.dtype, Factors(wire.factors.before, at_owner), wire.row_numel)
    back = RowWire(
        wire.dtype if is_narrow else full.dtype, Factors(1.0, on_arrival), wire.row_numel
    )
    # Rounded before it travels on, as the arithmetic of the dense way does.
    out = torch.empty_like(mine, dtype=wire.dtype) if is_narrow else mine
    pending = start_rows_reduce_scatter(full, out, ranks, scaled, False, label)
    return pending.then(lambda: _start_spread(full, out, ranks, back, label))


def _start_spread(full: Tensor, mine: Tensor, ranks: Ranks, wire: RowWire, label: str) -> Pending:
    """Send `mine` to every rank, and fill the slices of `full`, in rows if they are few."""
    packed = _packed(mine, wire)

    def fill(pieces: Sequence[_Rows]) -> None:
        # My own too: after rounding for the wire all ranks have the same bits.
        for owner, piece in enumerate(pieces):
            _add_up(slice_of(full, owner, ranks), [piece], wire, False)

    shape = mine.view(-1, wire.row_numel).shape
    return _start_exchange([packed] * ranks.size, shape, ranks, (label, *_FROM_OWNERS), fill)


def _touched(rows: Tensor) -> Tensor:
    """Return the numbers (int32) of the rows that are not zero; a NaN is not zero either."""
    is_touched = (rows != 0).any(dim=1)
    with waiting_for(_TOUCHED, rows.device):
        return is_touched.nonzero().flatten().to(torch.int32)


def _packed(cut: Tensor, wire: RowWire) -> _Rows:
    """Return a 1-D slice in the shorter of its two forms."""
    rows = cut.view(-1, wire.row_numel)
    touched = _touched(rows)
    if _is_short(touched.numel(), rows.shape[0], wire):
        return _Rows(for_the_wire(rows[touched], wire.factors.before, wire.dtype), touched)
    return _Rows(for_the_wire(rows, wire.factors.before, wire.dtype), touched[:0])


def _is_short(count: int, rows: int, wire: RowWire) -> bool:
    """Return True if so many rows with numbers take fewer bytes than all rows without."""
    row_nbytes = wire.row_numel * wire.dtype.itemsize
    return count * (row_nbytes + torch.int32.itemsize) < rows * row_nbytes


def _start_exchange(
    sent: Sequence[_Rows],
    shape: Sequence[int],
    ranks: Ranks,
    way: tuple[str, int, int, int],
    act: Callable[[Sequence[_Rows]], None],
) -> Pending:
    """Send `sent[r]` of slices of `shape` to each rank r: first how many rows, then the rows.

    `act` gets the slices that the ranks have sent, by rank.
    """
    label, count_tag, number_tag, value_tag = way
    counts = torch.empty(ranks.size, dtype=torch.int64)

    def move() -> Pending:
        pieces = [_Rows.room(int(count), shape, sent[0].values.dtype) for count in counts]
        leaving, coming = ([rows.numbers for rows in some] for some in (sent, pieces))
        numbers = start_exchange(leaving, coming, ranks, label, number_tag)
        leaving, coming = ([rows.values.view(-1) for rows in some] for some in (sent, pieces))
        values = start_exchange(leaving, coming, ranks, label, value_tag)
        return numbers.then(lambda: values).then(lambda: act(pieces))

    announced_counts = [torch.tensor([rows.announced]) for rows in sent]
    return start_exchange(announced_counts, [*counts.split(1)], ranks, label, count_tag).then(move)


def _start_by_collectives(
    full: Tensor,
    ranks: Ranks,
    wire: RowWire,
    label: str,
    act: Callable[[Sequence[_Rows], Sequence[Sequence[int]]], None],
    dense: Callable[[], Pending],
) -> Pending:
    """Gather every rank's rows on every rank; take the dense way if one rank has too many.

    `act` gets each rank's rows, and how many of them lie before the end of each slice.
    """
    rows = full.view(-1, wire.row_numel)
    touched = _touched(rows)
    edges = torch.arange(1, ranks.size + 1, dtype=torch.int32, device=full.device)
    edges *= rows.shape[0] // ranks.size
    counts = torch.zeros(ranks.size**2, dtype=torch.int64, device=full.device)
    slice_of(counts, ranks.rank, ranks).copy_(torch.searchsorted(touched, edges))

    def exchange() -> Pending:
        what = f"the numbers of rows in {label}"
        ends = read_on_host(counts, what).view(ranks.size, -1).tolist()
        most = max(end[-1] for end in ends)
        if not _is_short(most * ranks.size, rows.shape[0], wire):
            return dense()
        if not most:
            return Pending(
                label, act=lambda: act([_Rows(rows[:0], touched[:0])], [[0] * ranks.size])
            )
        numbers = touched.new_zeros(most * ranks.size)
        values = full.new_zeros(most * ranks.size * wire.row_numel, dtype=wire.dtype)
        packed = for_the_wire(rows[touched], wire.factors.before, wire.dtype).flatten()
        slice_of(numbers, ranks.rank, ranks)[: touched.numel()] = touched
        slice_of(values, ranks.rank, ranks)[: packed.numel()] = packed

        def unpack() -> None:
            pieces = [
                _Rows(
                    slice_of(values, rank, ranks).view(-1, wire.row_numel)[: end[-1]],
                    slice_of(numbers, rank, ranks)[: end[-1]],
                )
                for rank, end in enumerate(ends)
            ]
            act(pieces, ends)

        works = [*start_all_gather(numbers, ranks, label).works]
        works += start_all_gather(values, ranks, label).works
        return Pending(label, works, unpack)

    return start_all_gather(counts, ranks, label).then(exchange)


def _add_up(out: Tensor, pieces: Sequence[_Rows], wire: RowWire, accumulate: bool) -> None:
    """Sum as `sum_into` slices in either form: the rows that any of them has."""
    row_numel, after = wire.row_numel, wire.factors.after
    if any(piece.is_whole for piece in pieces):
        whole = [_whole(piece, out.numel()) for piece in pieces]
        sum_into(out, whole, after, accumulate)
        return
    rows = out.view(-1, row_numel)
    with waiting_for(_TOUCHED, out.device):
        union = torch.cat([piece.numbers for piece in pieces]).unique()
    found = rows[union] if accumulate else out.new_empty(union.numel(), row_numel)
    sum_into(found.view(-1), [_among(piece, union) for piece in pieces], after, accumulate)
    if not accumulate:
        rows.zero_()
    rows[union] = found


def _among(piece: _Rows, union: Tensor) -> Tensor:
    """Return the rows numbered `union` of a slice, zeros if it lacks them, in 1-D."""
    if piece.numbers.numel() == union.numel():
        return piece.values.flatten()
    found = piece.values.new_zeros(union.numel(), piece.values.shape[1])
    found[torch.searchsorted(union, piece.numbers)] = piece.values
    return found.view(-1)


def _whole(piece: _Rows, numel: int) -> Tensor:
    """Return a slice in its 1-D dense form."""
    if piece.is_whole:
        return piece.values.flatten()
    full = piece.values.new_zeros(numel // piece.values.shape[1], piece.values.shape[1])
    full[piece.numbers] = piece.values
    return full.flatten()
