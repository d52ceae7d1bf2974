"""The plan of an attention: batched calls that cover all pairs of row and column blocks.

An entry is a set of row blocks and a set of column blocks, all pairs of which are computed. A group
holds entries of one shape, so that one batched call computes them. A part is a list of groups in
which each row block occurs at most once. The entries of all parts together are exactly the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens of neighbouring rows whose common columns are computed together, and the fewest of these
# that pay off: merging the results of two parts costs about as much as 64 columns.
_TILE, _FEWEST = 512, 128
RUN = 64
"""Tokens of neighbouring rows with equal columns in one entry of the second part."""


@dataclass(frozen=True, slots=True)
class Group:
    """Entries of one shape, as numbers of blocks in flat [heads x n] order.

    `rows` is [entries, R] and `columns` [entries, C], both int64. If `ends_on_diagonal`, the last
    column of each entry is its (one) row: the only block that causality masks inside.
    """

    rows: Tensor
    columns: Tensor
    ends_on_diagonal: bool = False


Part = tuple[Group, ...]


def parts_of(layout: Tensor, block: int, *, is_causal: bool, splits: bool = True) -> list[Part]:
    """Return the parts that compute a layout.

    Args:
        layout: bool, [heads, n, n].
        block: edge of a block in tokens.
        is_causal: no block above the diagonal is computed.
        splits: False returns one part, in which each row meets all of its columns at once.
    """
    if is_causal:
        layout = layout.tril()
    common: list[tuple[range, Tensor]] = []
    rest = layout
    if splits:
        common = list(_common(layout, block, is_causal=is_causal))
        rest = layout.clone()
        count = layout.shape[1]
        for rows, columns in common:
            head, first = divmod(rows.start, count)
            rest[head, first : first + len(rows), columns % count] = False
    second = tuple(_runs(rest, block, is_causal=is_causal))
    first_part = tuple(_grouped(common))
    return [part for part in (first_part, second) if part]


def _common(layout: Tensor, block: int, *, is_causal: bool) -> Iterator[tuple[range, Tensor]]:
    """Yield tiles of rows with the columns that all their rows have, if these are enough.

    Neighbouring tiles with the same columns become one. Blocks on the diagonal are left out if
    causality masks inside them.
    """
    heads, count, _ = layout.shape
    tile, fewest = max(1, _TILE // block), max(1, _FEWEST // block)
    places = torch.arange(count, device=layout.device)
    for head in range(heads):
        shared = layout[head].clone()
        if is_causal:
            shared[places, places] = False
        start, before = 0, None
        for first in range(0, count, tile):
            columns = shared[first : first + tile].all(0)
            if before is not None and not columns.equal(before):
                yield from _tile(head, count, range(start, first), before, fewest)
                start = first
            before = columns
        assert before is not None  # a layout has rows
        yield from _tile(head, count, range(start, count), before, fewest)


def _tile(
    head: int, count: int, rows: range, has: Tensor, fewest: int
) -> Iterator[tuple[range, Tensor]]:
    columns = has.nonzero().flatten()
    if len(columns) >= fewest:
        yield range(head * count + rows.start, head * count + rows.stop), head * count + columns


def _grouped(entries: list[tuple[range, Tensor]]) -> Iterator[Group]:
    shapes: dict[tuple[int, int], list[tuple[range, Tensor]]] = {}
    for rows, columns in entries:
        shapes.setdefault((len(rows), len(columns)), []).append((rows, columns))
    for several in shapes.values():
        places = torch.stack(
            [
                torch.arange(rows.start, rows.stop, device=several[0][1].device)
                for rows, _ in several
            ]
        )
        yield Group(places, torch.stack([columns for _, columns in several]))


def _runs(layout: Tensor, block: int, *, is_causal: bool) -> Iterator[Group]:
    """Group runs of neighbouring rows with equal columns, by their shape."""
    heads, count, _ = layout.shape
    flat = layout.reshape(heads * count, count)
    # The length of the run that starts in each row; 0 if none does.
    longest = max(1, RUN // block)
    differs = torch.ones(heads * count, dtype=torch.bool, device=layout.device)
    differs[1:] = (flat[1:] != flat[:-1]).any(-1)
    differs[::count] = True
    on_diagonal = flat.view(heads, count, count).diagonal(dim1=1, dim2=2).flatten()
    if is_causal:
        differs[1:] |= on_diagonal[:-1]  # only one row of an entry is masked inside
    starts = _split_long(differs.nonzero().flatten(), heads * count, longest)
    ends = torch.cat([starts[1:], starts.new_tensor([heads * count])])
    widths = flat[starts].sum(-1)
    shapes = torch.stack([ends - starts, widths, (on_diagonal[starts] & is_causal).long()], 1)
    for length, width, ends_there in torch.unique(shapes, dim=0).tolist():
        if width == 0:
            continue
        chosen = starts[(shapes == shapes.new_tensor([length, width, ends_there])).all(1)]
        rows = chosen[:, None] + torch.arange(length, device=chosen.device)
        columns = flat[chosen].nonzero()[:, 1].view(len(chosen), width)
        columns = columns + (chosen // count * count)[:, None]
        yield Group(rows, columns, bool(ends_there))


def _split_long(starts: Tensor, total: int, longest: int) -> Tensor:
    """Return the starts of runs, and of further runs inside those that are too long."""
    lengths = torch.diff(starts, append=starts.new_tensor([total]))
    pieces = (lengths + longest - 1) // longest
    first = torch.repeat_interleave(starts, pieces)
    before = torch.repeat_interleave(pieces.cumsum(0) - pieces, pieces)
    return first + (torch.arange(len(first), device=first.device) - before) * longest
