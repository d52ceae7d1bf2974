"""The plan of an attention, in batched calls, and the terms added to its scores.

The calls cover all pairs of row and column blocks. An entry is a set of row blocks and a set of
column blocks, all pairs of which are computed. A group holds entries of one shape, so that one
batched call computes them. A part is a list of groups in which each row block occurs at most once.
The entries of all parts together are exactly the layout.

The terms (padding, masks of pairs, causality) are in the dtype of the queries, with -inf for pairs
that are not computed. They are gathered for the current blocks: no tensor here has a row and a
column for each token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from hadal.errors import ChoiceError, ModelError, expect_one_of

MODES = ("add", "mul")
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


_log = logging.getLogger("hadal")


@dataclass(frozen=True, slots=True)
class PairMask:
    """A mask or bias of pairs: [batch or 1, heads or 1, L, L] as the caller gave it."""

    values: Tensor
    multiplies: bool
    """True if a zero masks the pair and other values do nothing; False if values are added."""

    def added(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the term that is added to the scores for (gathered) values."""
        if self.multiplies:
            return torch.zeros_like(values, dtype=dtype).masked_fill(values == 0, -torch.inf)
        return values.to(dtype)


@dataclass(frozen=True, slots=True)
class Masks:
    """Everything that is added to the scores, besides the layout."""

    keys: Tensor | None = None
    """[batch, L], added to the scores of each key."""
    pairs: Sequence[PairMask] = ()
    is_causal: bool = False
    """True if each token attends to itself and earlier ones only."""

    @property
    def is_trained(self) -> bool:
        """True if the values of pairs need a gradient."""
        return torch.is_grad_enabled() and any(one.values.requires_grad for one in self.pairs)

    def of_dtype(self, dtype: torch.dtype) -> Masks:
        """Return the masks for queries of a dtype."""
        if self.keys is None or self.keys.dtype is dtype:
            return self
        return Masks(self.keys.to(dtype), self.pairs, self.is_causal)

    def padded(self, length: int, to: int, like: Tensor) -> Masks:
        """Return the masks of sequences padded from `length` to `to` with masked tokens."""
        if length == to:
            return self
        keys = self.keys
        if keys is None:
            keys = like.new_zeros(like.shape[0], length)
        more = to - length
        keys = functional.pad(keys, (0, more), value=-torch.inf)
        pairs = [
            PairMask(functional.pad(one.values, (0, more, 0, more)), one.multiplies)
            for one in self.pairs
        ]
        return Masks(keys, pairs, self.is_causal)

    def of_tokens(self, rows: Tensor, columns: int, like: Tensor) -> Tensor | None:
        """Return all terms but causality for some rows and all columns; None if there are none."""
        total = None if self.keys is None else self.keys[:, None, None, :]
        for one in self.pairs:
            values = one.values
            if values.shape[2] != len(rows):
                values = values[:, :, rows]
            added = one.added(values[..., :columns], like.dtype)
            total = added if total is None else total + added
        return total

    def of_blocks(self, group: Group, heads: int, block: int, like: Tensor) -> Tensor | None:
        """Return all terms for entries whose blocks are numbered in [batch x heads x n] order.

        Returns:
            Broadcastable to [entries, 1, R * block, C * block], or None.
        """
        total: Tensor | None = None
        entries, width = group.columns.shape
        if self.keys is not None:
            batch, length = self.keys.shape
            count = length // block
            blocks = group.columns // (heads * count) * count + group.columns % count
            total = self.keys.reshape(batch * count, block)[blocks].view(
                entries, 1, 1, width * block
            )
        for one in self.pairs:
            added = one.added(_gathered(one.values, group, heads, block), like.dtype)
            total = added if total is None else total + added
        if group.ends_on_diagonal:
            last = like.new_full((block, block), -torch.inf).triu(1)
            corner = functional.pad(last, ((width - 1) * block, 0))[None, None]
            total = corner if total is None else total + corner
        return total


def _gathered(values: Tensor, group: Group, heads: int, block: int) -> Tensor:
    """Return [entries, 1, R * block, C * block] of a [batch or 1, heads or 1, L, L] tensor."""
    batch, own, length, _ = values.shape
    count = length // block
    tiled = values.reshape(batch, own, count, block, count, block)
    which = group.rows[:, 0] // count
    sample, head = which // heads % batch, which % heads % own
    rows, columns = group.rows % count, group.columns % count
    index = (sample[:, None, None], head[:, None, None], rows[:, :, None])
    place = (*index, slice(None), columns[:, None, :])
    # The indexed dimensions come first: [entries, R, C, block, block].
    found = tiled[place]
    entries, height, width = found.shape[:3]
    return found.transpose(2, 3).reshape(entries, 1, height * block, width * block)


def key_mask(given: Tensor, mode: str, query: Tensor) -> Tensor:
    """Return a key padding mask as [batch, L] in the dtype of the queries, to be added.

    Args:
        given: [batch, L], also with further dimensions of 1.
        mode: "add", or "mul" (a zero masks the key).
        query: [batch, heads, L, D].

    Raises:
        ModelError: the shape or the mode is not supported.
    """
    expect_one_of(MODES, "key_padding_mask_mode", mode, ChoiceError)
    batch, length = query.shape[0], query.shape[2]
    found = given.reshape(given.shape[0], -1) if given.dim() > 1 else given[None]
    if found.shape[0] not in (1, batch) or given.numel() != found.shape[0] * given.shape[-1]:
        raise ModelError(
            f"key_padding_mask has shape {tuple(given.shape)}; expected [{batch}, {length}] or"
            f" [{batch}, 1, 1, {length}]"
        )
    found = found.expand(batch, -1)
    if found.shape[1] > length:
        raise ModelError(
            f"key_padding_mask has {found.shape[1]} columns for {length} keys; truncate it to"
            f" {length}"
        )
    if mode == "mul" or found.dtype is torch.bool:
        zero = torch.zeros_like(found, dtype=query.dtype)
        found = zero.masked_fill(found == 0, -torch.inf)
    if found.shape[1] < length:
        # Programs pad their inputs to the block, but not the mask: the added keys are padding.
        _tell_short(found.shape[1], length)
    return functional.pad(found.to(query.dtype), (0, length - found.shape[1]), value=-torch.inf)


@cache
def _tell_short(columns: int, length: int) -> None:
    """Log it once for each pair of lengths."""
    _log.info(
        "key_padding_mask has %d columns for %d keys: the last %d keys are masked",
        columns,
        length,
        length - columns,
    )


def pair_mask(given: Tensor, mode: str, query: Tensor, name: str = "attn_mask") -> PairMask:
    """Return a mask of pairs with its four dimensions.

    Args:
        given: [L, L], [batch, L, L], [batch or 1, 1, L, L] or [batch or 1, heads, L, L].
        mode: "add", or "mul" (a zero masks the pair).
        query: [batch, heads, L, D].
        name: the caller's name for it.

    Raises:
        ModelError: the shape or the mode is not supported.
    """
    expect_one_of(MODES, f"{name}_mode", mode, ChoiceError)
    batch, heads, length, _ = query.shape
    found = given
    while found.dim() > 4:
        found = found.squeeze(next((d for d in range(found.dim()) if found.shape[d] == 1), 0))
        if found.dim() == given.dim():
            break
    if found.dim() == 3:
        found = found[:, None]
    while found.dim() < 4:
        found = found[None]
    fits = found.dim() == 4 and found.shape[2:] == (length, length)
    if not fits or found.shape[0] not in (1, batch) or found.shape[1] not in (1, heads):
        raise ModelError(
            f"{name} has shape {tuple(given.shape)}; expected [{length}, {length}],"
            f" [{batch}, {length}, {length}] or [{batch}, {heads}, {length}, {length}] (1 for a"
            " dimension that is the same for all)"
        )
    return PairMask(found, multiplies=mode == "mul" or found.dtype is torch.bool)
