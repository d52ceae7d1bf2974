"""Arithmetic of a flat buffer: the offsets of parameters, the shards, and their fragments.

All numbers are counts of elements. Nothing here uses a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod
from typing import NamedTuple

from hadal.units import rounded_up

ALIGNMENT_NBYTES = 16

Span = tuple[int, int]
"""The first element of a range, and the one after its last."""


class Slot(NamedTuple):
    """The place of one parameter in its bucket."""

    name: str
    shape: tuple[int, ...]
    group: int
    offset: int
    order: tuple[int, ...] = ()
    """Its dimensions in memory order, outermost first; () for row-major."""

    @property
    def numel(self) -> int:
        """The number of elements: 1 for a 0-dim parameter, 0 for an empty one."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """The first element after the parameter."""
        return self.offset + self.numel

    @property
    def strides(self) -> tuple[int, ...]:
        """The number of elements between neighbours in each dimension."""
        return strides_of(self.shape, self.order)

    @property
    def is_reordered(self) -> bool:
        """Return True if its elements are not in row-major order in memory."""
        long = [dim for dim in self.order if self.shape[dim] > 1]
        return long != sorted(long)


def strides_of(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose dimensions have this memory order; () for row-major."""
    found, step = [0] * len(shape), 1
    for dim in reversed(order or range(len(shape))):
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


def order_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor in memory order, outermost first; () for row-major.

    None if its elements do not fill a contiguous range of memory without overlaps.
    """
    if 0 in shape:
        return ()
    # Among equal strides, dimensions of one element come last, as torch gives them.
    dims = sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1))
    step = 1
    for dim in reversed(dims):
        if shape[dim] != 1 and strides[dim] != step:
            return None
        step *= shape[dim]
    return () if dims == sorted(dims) else tuple(dims)


def _common(slot: Slot, span: Span, other: Slot, other_span: Span) -> Span:
    """Return the elements of a parameter that lie in spans of two layouts at once.

    They are counted from the parameter's start. `slot` is its place in the first layout, `other` in
    the second one; in both it is row-major.
    """
    start = max(span[0] - slot.offset, other_span[0] - other.offset, 0)
    stop = min(span[1] - slot.offset, other_span[1] - other.offset, slot.numel)
    return start, max(start, stop)


class Fragment(NamedTuple):
    """The part of one parameter inside a span of its bucket."""

    slot: int
    start: int
    """Its first element, counted from the parameter's start in memory."""
    numel: int
    offset: int
    """Its offset, counted from the span's start."""


class Run(NamedTuple):
    """A contiguous range of a span that belongs to one param group; it is stepped as one."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """A flat buffer of `numel` elements, evenly sharded over `world_size` ranks."""

    slots: tuple[Slot, ...]
    numel: int
    world_size: int

    @property
    def shard_numel(self) -> int:
        """The number of elements in one rank's shard."""
        return self.numel // self.world_size

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The (start, stop) ranges that belong to no parameter: padding."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.offset, slot.stop)), self.numel]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return tuple((start, stop) for start, stop in pairs if start < stop)

    @property
    def padding(self) -> int:
        """The number of elements that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def span(self, rank: int) -> tuple[int, int]:
        """Return the (start, stop) of `rank`'s shard."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def holders(self, start: int, stop: int) -> range:
        """Return the ranks whose shards have elements of [start, stop)."""
        if start >= stop:
            return range(0)
        return range(start // self.shard_numel, (stop - 1) // self.shard_numel + 1)

    def fragments(self, start: int, stop: int) -> Iterator[Fragment]:
        """Yield the parts of parameters in [start, stop), in order; skip empty parts."""
        for index, slot in enumerate(self.slots):
            first, last = max(start, slot.offset), min(stop, slot.stop)
            if first < last:
                yield Fragment(index, first - slot.offset, last - first, first - start)

    def runs(self, start: int, stop: int) -> tuple[Run, ...]:
        """Return the runs of [start, stop), counted from `start`, one per param group in it.

        A run includes padding between its parameters: padding holds zeros and stays zero.
        """
        bounds: dict[int, tuple[int, int]] = {}
        for fragment in self.fragments(start, stop):
            group = self.slots[fragment.slot].group
            end = fragment.offset + fragment.numel
            first = bounds.get(group, (fragment.offset, end))[0]
            bounds[group] = (first, end)
        return tuple(Run(group, *bound) for group, bound in bounds.items())


def shared(slot: Slot, span: Span, other: Slot, layout: Layout) -> Iterator[tuple[int, Span]]:
    """Yield the ranks of `layout` that have elements of a parameter's part in `span`, and which.

    The elements are counted from the parameter's start. `slot` is its place in the layout of
    `span`, `other` in `layout`; in both it is row-major. The time grows with the ranks yielded, not
    with those of the layout.
    """
    low, high = _common(slot, span, other, (0, layout.numel))
    for rank in layout.holders(other.offset + low, other.offset + high):
        yield rank, _common(slot, span, other, layout.span(rank))


def lay_out(
    parameters: Iterable[tuple[str, tuple[int, ...], int, tuple[int, ...]]],
    world_size: int,
    itemsize: int,
    row_numel: int = 1,
    cuts: int = 1,
) -> Layout:
    """Lay out parameters end to end, grouped by param group and aligned.

    Each is given by its name, shape, param group and memory order. `itemsize` is the bytes of one
    element in the smallest dtype of the buffer, so that every offset and every shard starts on a
    16-byte boundary in every dtype. A shard holds whole rows of `row_numel` elements, and so does
    each of the `cuts` parts that it is divided into.
    """
    unit = max(1, ALIGNMENT_NBYTES // itemsize)
    slots: list[Slot] = []
    end = 0
    for name, shape, group, order in sorted(parameters, key=lambda item: item[2]):
        slot = Slot(name, tuple(shape), group, rounded_up(end, unit) if prod(shape) else end, order)
        slots.append(slot)
        end = slot.stop
    step = lcm(unit, row_numel) * world_size * cuts
    return Layout(tuple(slots), rounded_up(end, step), world_size)


class Share(NamedTuple):
    """The parameters that each rank owns, for an optimizer that needs whole parameters."""

    owners: tuple[int, ...]
    """The owning rank of each parameter, in the order given."""
    loads: tuple[int, ...]
    """The number of elements owned, by rank."""


def share_out(numels: Iterable[int], loads: Sequence[int]) -> Share:
    """Give each parameter, largest first, to the rank that owns the fewest elements so far.

    `loads` holds the number of elements that each rank owns already.
    """
    sizes = list(numels)
    owners = [0] * len(sizes)
    loads = list(loads)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(len(loads)), key=lambda r: (loads[r], r))
        owners[index] = rank
        loads[rank] += sizes[index]
    return Share(tuple(owners), tuple(loads))
