"""Ranges of elements in row-major order as boxes (offset and size per dimension), and back.

Pure arithmetic: other libraries' formats describe the parts of a tensor as boxes, sources as
ranges.

Tests: tests/checkpoint/test_boxes.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor: its first index and its length in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.sizes)


def rows_of(shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` elements that cover a tensor in row-major order.

    Each is consecutive elements of the tensor. A tensor without dimensions, or without elements, is
    one box.
    """
    total = prod(shape)
    if total <= max(limit, 1):
        yield Box((0,) * len(shape), tuple(shape))
        return
    axis = next(axis for axis in range(len(shape)) if prod(shape[axis + 1 :]) <= limit)
    inner = tuple(shape[axis + 1 :])
    length, step = shape[axis], limit // prod(inner)
    for outer in _indices(shape[:axis]):
        for start in range(0, length, step):
            offsets = (*outer, start, *(0 for _ in inner))
            yield Box(offsets, (*(1 for _ in outer), min(step, length - start), *inner))


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all indices of a shape in row-major order."""
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def start_of(box: Box, shape: Sequence[int]) -> int:
    """Return the position of a box's first element in row-major order."""
    position = 0
    for offset, length in zip(box.offsets, shape, strict=True):
        position = position * length + offset
    return position


def runs_of(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the longest ranges [start, stop) of the tensor's elements that a box consists of.

    They are in the row-major order of both the box and the tensor.
    """
    if not box.numel:
        return
    # From the last dimension on, those that the box fills belong to one range.
    axis = len(shape)
    while axis > 0 and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    split = max(axis - 1, 0)
    numel = prod(box.sizes[split:])
    for index in _indices(box.sizes[:split]):
        place = (*(o + i for o, i in zip(box.offsets, index, strict=False)), *box.offsets[split:])
        start = start_of(Box(place, box.sizes), shape)
        yield start, start + numel
