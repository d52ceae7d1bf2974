"""Boxes: the rectangular parts of a model's tensors that ranks and files hold. Pure arithmetic.

Elements of a box are counted in its own row-major order. Boxes say which elements of the whole
model a part of it holds (a pipeline stage, a slice of a layer, an expert), so that a checkpoint of
one partitioning loads into any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torch import Tensor

from hadal.errors import UsageError

ATTRIBUTE = "hadal_box"
"""The attribute of a parameter or buffer that says which part of the whole tensor it is."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: its first index and its length in each dimension.

    Raises:
        ValueError: it is not inside the tensor.
    """

    name: str
    """The whole tensor's full name, the same on all ranks."""
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        rows = zip(self.offsets, self.sizes, self.shape, strict=False)
        is_inside = all(offset >= 0 and 0 <= size <= n - offset for offset, size, n in rows)
        if not is_inside or not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(
                f"a box at {self.offsets} of {self.sizes} is not inside {self.name} of shape"
                f" {self.shape}"
            )

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> Box:
        """Return the box that covers a whole tensor."""
        return Box(name, tuple(shape), (0,) * len(shape), tuple(shape))

    @staticmethod
    def cut(name: str, shape: Sequence[int], dim: int, number: int, count: int) -> Box:
        """Return part `number` of `count`, cut along a dimension; the first get the remainder.

        Raises:
            ValueError: there is no such dimension or part.
        """
        if not 0 <= number < count or not -len(shape) <= dim < len(shape):
            raise ValueError(f"{name} of shape {tuple(shape)} has no part {number} of {count}")
        offsets, sizes = [0] * len(shape), list(shape)
        each, over = divmod(shape[dim], count)
        offsets[dim] = number * each + min(number, over)
        sizes[dim] = each + (number < over)
        return Box(name, tuple(shape), tuple(offsets), tuple(sizes))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Return True if the box covers the whole tensor."""
        return self.sizes == self.shape

    @property
    def start(self) -> int:
        """The position of the first element in the whole tensor."""
        position = 0
        for offset, length in zip(self.offsets, self.shape, strict=True):
            position = position * length + offset
        return position

    @property
    def hull(self) -> int:
        """The number of elements of the whole tensor from the first to the last of the box."""
        last = 0
        for size, length in zip(self.sizes, self.shape, strict=True):
            last = last * length + size - 1
        return last + 1 if self.numel else 0

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the box in its tensor."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the longest ranges [start, stop) of the whole tensor's elements in the box.

        They are in the row-major order of both the box and the tensor.
        """
        if not self.numel:
            return
        # The last dimensions, as long as the box fills them, belong to one range.
        axis = len(self.shape)
        while axis > 0 and self.sizes[axis - 1] == self.shape[axis - 1]:
            axis -= 1
        split = max(axis - 1, 0)
        numel = prod(self.sizes[split:])
        for index in product(*map(range, self.sizes[:split])):
            place = (offset + i for offset, i in zip(self.offsets, index, strict=False))
            offsets = (*place, *self.offsets[split:])
            start = Box(self.name, self.shape, offsets, (*(1 for _ in index), *self.sizes[split:]))
            yield start.start, start.start + numel

    def within(self, other: Box) -> Box | None:
        """Return the intersection with `other`, a box of the same tensor; None if it is empty.

        With a tensor without elements it is always empty.
        """
        pairs = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        offsets = tuple(max(mine, its) for mine, _, its, _ in pairs)
        stops = (min(mine + size, its + length) for mine, size, its, length in pairs)
        sizes = tuple(stop - start for start, stop in zip(offsets, stops, strict=True))
        if min(sizes, default=1) <= 0:
            return None
        return Box(self.name, self.shape, offsets, sizes)

    def without(self, other: Box) -> Iterator[Box]:
        """Yield boxes that together cover the elements that are not in `other`."""
        common = self.within(other)
        if common is None:
            yield self
            return
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (first, length) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            stop = offsets[dim] + sizes[dim]
            for low, high in ((offsets[dim], first), (first + length, stop)):
                if low < high:
                    start, size = [*offsets], [*sizes]
                    start[dim], size[dim] = low, high - low
                    yield Box(self.name, self.shape, tuple(start), tuple(size))
            offsets[dim], sizes[dim] = first, length

    def relative_to(self, outer: Box) -> Box:
        """Return the box as a part of a tensor that consists of `outer` only."""
        offsets = (mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True))
        return Box(outer.name, outer.sizes, tuple(offsets), self.sizes)

    def of_whole(self, outer: Box) -> Box:
        """Return a part of a tensor that consists of `outer` only as a part of the whole one."""
        offsets = (mine + its for mine, its in zip(self.offsets, outer.offsets, strict=True))
        return Box(outer.name, outer.shape, tuple(offsets), self.sizes)

    def pieces(self, numel: int) -> Iterator[Box]:
        """Yield boxes that make up this one, each contiguous or with a hull of at most `numel`."""
        if self.hull <= max(numel, self.numel):
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        for number in range(2):
            part = Box.cut(self.name, self.sizes, dim, number, 2)
            yield from part.of_whole(self).pieces(numel)


def rows_of(name: str, shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` elements that cover a tensor in row-major order.

    The elements of each are consecutive in the tensor. A tensor without dimensions or elements is
    one box.
    """
    if prod(shape) <= max(limit, 1):
        yield Box.whole(name, shape)
        return
    axis = next(axis for axis in range(len(shape)) if prod(shape[axis + 1 :]) <= limit)
    inner = tuple(shape[axis + 1 :])
    length, step = shape[axis], limit // prod(inner)
    for outer in product(*map(range, shape[:axis])):
        for start in range(0, length, step):
            offsets = (*outer, start, *(0 for _ in inner))
            sizes = (*(1 for _ in outer), min(step, length - start), *inner)
            yield Box(name, tuple(shape), offsets, sizes)


def boxes_between(name: str, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up elements [start, stop) of a tensor, in row-major order."""
    if not shape:
        if start < stop:
            yield Box.whole(name, shape)
        return
    inner = tuple(shape[1:])
    step = prod(inner)
    while start < stop:
        row, offset = divmod(start, step)
        rows = (stop - start) // step if not offset else 0
        if rows:
            zeros = tuple(0 for _ in inner)
            yield Box(name, tuple(shape), (row, *zeros), (rows, *inner))
            start += rows * step
            continue
        last = min(stop - row * step, step)
        for part in boxes_between(name, inner, offset, last):
            yield Box(name, tuple(shape), (row, *part.offsets), (1, *part.sizes))
        start = row * step + last


@dataclass(frozen=True, slots=True)
class Placement:
    """The boxes that a parameter consists of, joined along one of its dimensions.

    Usually there is one. A rank's slice of fused layers (query, key and value) has one for each.

    Raises:
        ValueError: their sizes differ in another dimension.
    """

    boxes: tuple[Box, ...]
    along: int = 0

    def __post_init__(self) -> None:
        across = {box.sizes[: self.along] + box.sizes[self.along + 1 :] for box in self.boxes}
        dims = {len(box.sizes) for box in self.boxes}
        is_joint = len(self.boxes) == 1 or self.along in range(min(dims, default=0))
        if len(across) != 1 or len(dims) != 1 or not is_joint:
            sizes = [box.sizes for box in self.boxes]
            raise ValueError(f"boxes of {sizes} cannot be joined along dimension {self.along}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape."""
        found = [*self.boxes[0].sizes]
        if len(self.boxes) > 1:
            found[self.along] = sum(box.sizes[self.along] for box in self.boxes)
        return tuple(found)

    def is_plain(self, name: str) -> bool:
        """Return True if it is the whole tensor of this name."""
        return len(self.boxes) == 1 and self.boxes[0].is_whole and self.boxes[0].name == name

    def rows(self, name: str) -> Iterator[tuple[Box, Box]]:
        """Yield each box with its place in the parameter itself, which is called `name`."""
        shape, first = self.shape, 0
        for box in self.boxes:
            offsets = [0] * len(shape)
            if len(self.boxes) > 1:
                offsets[self.along] = first
                first += box.sizes[self.along]
            yield box, Box(name, shape, tuple(offsets), box.sizes)


def placement_of(tensor: Tensor, name: str, shape: Sequence[int] | None = None) -> Placement:
    """Return the part of the whole model that a parameter or buffer is, from its attribute.

    Without the attribute it is the whole tensor of its name. Pass `shape`, its real shape, if the
    tensor has another one at present.

    Raises:
        UsageError: the attribute is not a box, or has another shape.
    """
    shape = tuple(tensor.shape if shape is None else shape)
    found = getattr(tensor, ATTRIBUTE, None)
    if found is None:
        return Placement((Box.whole(name, shape),))
    placement = Placement((found,)) if isinstance(found, Box) else found
    if not isinstance(placement, Placement) or placement.shape != shape:
        raise UsageError(
            f"{name} has the shape {shape}, and its {ATTRIBUTE} is {found!r}; expected a Box or a"
            " Placement of that shape (hadal.zero.boxes)"
        )
    return placement
