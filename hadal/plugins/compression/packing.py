"""Quantized weights as integers of a few bits: grids of values, codes, and codes in bytes.

A value of a grid is `(code * stride + first) * scale + zero`, with a scale and a zero for each
group. The arithmetic is that of `quantizers.py`, in the same dtype, so that decoding returns the
quantized weight itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from hadal.plugins.compression.quantizers import scales_of

_BYTE = 8


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The codes of one weight: their bits, their values, and their groups."""

    bits: int
    first: int
    """The integer that code 0 represents."""
    stride: int
    """Difference between the integers of two neighbouring codes."""
    groups: int
    """Equal slices of the flat weight, each with its own scale."""
    shape: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Elements of a row; rows are the first dimension."""
        return prod(self.shape[1:])

    def as_tensor(self) -> Tensor:
        """Return the layout as integers, as a state dict holds it: int64, 1-D."""
        return torch.tensor((self.bits, self.first, self.stride, self.groups, *self.shape))

    @staticmethod
    def of(spec: Tensor) -> CodeLayout:
        """Return the layout that `as_tensor` gave."""
        numbers = [int(number) for number in spec.tolist()]
        bits, first, stride, groups, *shape = numbers
        return CodeLayout(bits, first, stride, groups, tuple(shape))


def _widths(bits: int) -> Iterator[int]:
    """Yield powers of two, the largest first, that add up to the bits; the largest is 8."""
    for width in (8, 4, 2, 1):
        while bits >= width:
            yield width
            bits -= width


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes in bytes, row by row.

    Args:
        codes: integers from 0 to `2 ** bits - 1`, (rows, columns).
        bits: 1 to 16. Each row is a whole number of bytes for each power of two in it.

    Returns:
        uint8, (rows, bytes of a row): the lowest bits of all codes first.
    """
    parts, shift = [], 0
    for width in _widths(bits):
        part = (codes >> shift & (1 << width) - 1).to(torch.uint8)
        each = _BYTE // width
        missing = -part.shape[1] % each
        part = torch.nn.functional.pad(part, (0, missing)).view(len(part), -1, each)
        places = torch.arange(0, _BYTE, width, dtype=torch.uint8, device=codes.device)
        parts.append((part << places).sum(2, dtype=torch.uint8))
        shift += width
    return torch.cat(parts, 1)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Return the codes of packed rows: uint8 up to 8 bits, else int32; (rows, columns)."""
    if bits == _BYTE:
        return packed
    found: Tensor | None = None
    start = shift = 0
    for width in _widths(bits):
        size = -(-columns * width // _BYTE)
        part = packed[:, start : start + size]
        if width < _BYTE:
            places = torch.arange(0, _BYTE, width, dtype=torch.uint8, device=packed.device)
            part = (part.unsqueeze(2) >> places & (1 << width) - 1).flatten(1)[:, :columns]
        part = part.int() if bits > _BYTE else part
        found = part if found is None else found | part << shift
        start, shift = start + size, shift + width
    assert found is not None
    return found


def decode(packed: Tensor, layout: CodeLayout, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return the weight in its shape, and in the dtype of `scale`.

    Args:
        packed: the weight's packed rows.
        layout: their layout.
        scale: (groups,).
        zero: (groups,); None if every group is around zero.
    """
    levels = levels_of(packed, layout, scale.dtype).reshape(layout.groups, -1)
    found = levels.mul_(scale.unsqueeze(1))
    if zero is not None:
        found.add_(zero.unsqueeze(1))
    return found.view(layout.shape)


def levels_of(packed: Tensor, layout: CodeLayout, dtype: torch.dtype) -> Tensor:
    """Return the integers that packed rows represent, in a floating dtype; (rows, columns)."""
    levels = unpack(packed, layout.bits, layout.columns).to(dtype)
    if layout.stride != 1:
        levels.mul_(layout.stride)
    return levels.add_(layout.first) if layout.first else levels


def signed_levels(packed: Tensor, layout: CodeLayout) -> Tensor:
    """Return the integers that packed rows of at most 8 bits represent, as int8; (rows, columns).

    Only for weights around zero: others have integers up to 255.
    """
    codes = unpack(packed, layout.bits, layout.columns).view(torch.int8)
    # Codes from 128 on are negative now; int8 wraps around, so the sums are right.
    return (codes if layout.stride == 1 else codes * layout.stride) + layout.first


def scale_of_rows(scale: Tensor, layout: CodeLayout) -> Tensor:
    """Return the scale of each row, (rows,), or the only one, (1,); groups are whole rows."""
    each = layout.shape[0] // layout.groups
    return scale if layout.groups == 1 else scale.repeat_interleave(each)


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The values that a quantized weight may have, before and after parts of it are removed."""

    bits: int
    symmetric: bool
    scale: Tensor
    """(groups,), in the dtype that values are computed in."""
    zero: Tensor | None
    shape: tuple[int, ...]
    """Shape of the quantized weight."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """Indices that are left in a dimension; a missing dimension has all."""

    def cut(self, dimension: int, kept: Tensor) -> Grid:
        """Return the grid after a selection from the weight's indices."""
        before = self.kept.get(dimension)
        kept = kept if before is None else before.to(kept.device)[kept]
        return replace(self, kept={**self.kept, dimension: kept})

    def groups_left(self) -> Tensor | None:
        """Return the group of each equal slice of the rest; None if slices mix groups."""
        count = self.scale.numel()
        if count == 1 or not self.kept:
            return torch.arange(count)
        numbers = torch.arange(prod(self.shape)) // (prod(self.shape) // count)
        numbers = numbers.view(self.shape)
        for dimension, kept in self.kept.items():
            numbers = numbers.index_select(dimension, kept.cpu())
        for slices in (numbers.shape[0], count):
            if slices and numbers.numel() % slices == 0:
                of_slices = numbers.reshape(slices, -1)
                if bool((of_slices == of_slices[:, :1]).all()):
                    return of_slices[:, 0]
        return None


def grid_of(weight: Tensor, bits: int, groups: int, *, symmetric: bool) -> Grid:
    """Return the values that `quantize` gives a weight, whatever its rounding."""
    scale, zero = scales_of(weight.detach(), bits, groups, symmetric=symmetric)
    flat = None if zero is None else zero.flatten()
    return Grid(bits, symmetric or bits <= 2, scale.flatten(), flat, tuple(weight.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight as codes."""

    packed: Tensor
    layout: CodeLayout
    scale: Tensor
    zero: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        parts = (self.packed, self.scale, self.zero)
        return sum(part.nbytes for part in parts if part is not None)

    def decoded(self) -> Tensor:
        """Return the weight."""
        return decode(self.packed, self.layout, self.scale, self.zero)


def encode(values: Tensor, grid: Grid) -> Codes | None:
    """Return a quantized weight as codes; None if they do not decode to exactly its values.

    Zeros that pruning left are values too. A one-bit weight has no zero, so it becomes a two-bit
    one.
    """
    owners = grid.groups_left()
    if owners is None or grid.scale.dtype != values.dtype or not values.numel():
        return None
    owners = owners.to(grid.scale.device)
    scale = grid.scale[owners]
    zero = None if grid.zero is None else grid.zero[owners]
    for bits, first, stride in _numberings(grid):
        layout = CodeLayout(bits, first, stride, len(owners), tuple(values.shape))
        found = Codes(_codes(values, layout, scale, zero), layout, scale, zero)
        if torch.equal(found.decoded(), values):
            return found
    return None


def _numberings(grid: Grid) -> Iterator[tuple[int, int, int]]:
    """Yield bits, first integer and stride to try."""
    if not grid.symmetric:
        yield grid.bits, 0, 1
    elif grid.bits > 2:
        yield grid.bits, -(2 ** (grid.bits - 1)), 1
    else:
        if grid.bits == 1:
            yield 1, -1, 2
        yield 2, -1, 1


def _codes(values: Tensor, layout: CodeLayout, scale: Tensor, zero: Tensor | None) -> Tensor:
    # In float64 a division recovers the integer, however the value was rounded.
    flat = values.detach().double().reshape(layout.groups, -1)
    if zero is not None:
        flat = flat - zero.double().unsqueeze(1)
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale).double().unsqueeze(1)
    levels = (flat / divisor - layout.first) / layout.stride
    codes = levels.round().clamp(0, 2**layout.bits - 1).int()
    return pack(codes.view(layout.shape[0], -1), layout.bits)
