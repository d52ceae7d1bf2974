"""The arithmetic of a flat buffer: nothing overlaps, nothing is lost, every cut can be undone."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from hadal.units import rounded_up
from hadal.zero.layout import (
    ALIGNMENT_NBYTES,
    Layout,
    Slot,
    lay_out,
    order_of,
    share_out,
    shared,
)
from hadal.zero.views import flattened, shaped

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
PARAMETERS = st.lists(st.tuples(SHAPES, st.integers(-1, 2)), max_size=8)
WORLDS = st.integers(1, 7)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


def named(parameters: list[tuple[tuple[int, ...], int]]) -> list[tuple[Any, ...]]:
    return [(f"p{index}", shape, group, ()) for index, (shape, group) in enumerate(parameters)]


def numbered(layout: Layout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A full buffer (-1 is padding) and the values of its parameters, all elements different."""
    full = torch.full((layout.numel,), -1)
    values, count = [], 0
    for slot in layout.slots:
        values.append(torch.arange(count, count + slot.numel))
        full[slot.offset : slot.stop] = values[-1]
        count += slot.numel
    return full, values


@given(PARAMETERS, WORLDS, ITEMSIZES)
def test_slots_are_aligned_apart_and_in_order_of_their_groups(parameters, world, itemsize):
    layout = lay_out(named(parameters), world, itemsize)
    assert sorted(slot.name for slot in layout.slots) == sorted(n for n, *_ in named(parameters))
    by_name = {name: (shape, group) for name, shape, group, _ in named(parameters)}
    end = 0
    for slot in layout.slots:
        assert (slot.shape, slot.group) == by_name[slot.name]
        assert slot.offset >= end
        assert slot.numel == 0 or slot.offset * itemsize % ALIGNMENT_NBYTES == 0
        end = slot.stop
    assert end <= layout.numel
    groups = [slot.group for slot in layout.slots]
    assert groups == sorted(groups)
    for group in set(groups):
        mine = [int(slot.name[1:]) for slot in layout.slots if slot.group == group]
        assert mine == sorted(mine)


@given(PARAMETERS, WORLDS, ITEMSIZES)
def test_shards_are_even_and_start_on_aligned_borders(parameters, world, itemsize):
    layout = lay_out(named(parameters), world, itemsize)
    assert layout.shard_numel * world == layout.numel
    assert layout.shard_numel * itemsize % ALIGNMENT_NBYTES == 0
    spans = [layout.span(rank) for rank in range(world)]
    assert spans[0][0] == 0
    assert spans[-1][1] == layout.numel
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    # At most one alignment unit before each slot, and one for each rank at the end.
    unit = ALIGNMENT_NBYTES // itemsize
    assert layout.padding < max(1, unit * (len(parameters) + world))


@given(PARAMETERS, WORLDS, ITEMSIZES)
def test_gaps_and_slots_cover_everything_once(parameters, world, itemsize):
    layout = lay_out(named(parameters), world, itemsize)
    seen = [0] * layout.numel
    for start, stop in [*layout.gaps, *((slot.offset, slot.stop) for slot in layout.slots)]:
        for element in range(start, stop):
            seen[element] += 1
    assert seen == [1] * layout.numel
    assert sum(stop - start for start, stop in layout.gaps) == layout.padding


@given(PARAMETERS, WORLDS, ITEMSIZES)
def test_the_fragments_of_all_ranks_make_every_parameter_whole(parameters, world, itemsize):
    layout = lay_out(named(parameters), world, itemsize)
    full, values = numbered(layout)
    found = [torch.full((slot.numel,), -2) for slot in layout.slots]
    for rank in range(world):
        start, stop = layout.span(rank)
        shard = full[start:stop]
        for piece in layout.fragments(start, stop):
            assert piece.numel > 0
            target = found[piece.slot][piece.start : piece.start + piece.numel]
            assert (target == -2).all()
            target.copy_(shard[piece.offset : piece.offset + piece.numel])
    assert all(torch.equal(mine, value) for mine, value in zip(found, values, strict=True))


@given(PARAMETERS, WORLDS, ITEMSIZES)
def test_runs_hold_all_fragments_of_their_own_group_and_no_others(parameters, world, itemsize):
    layout = lay_out(named(parameters), world, itemsize)
    for rank in range(world):
        start, stop = layout.span(rank)
        runs = layout.runs(start, stop)
        assert len({run.group for run in runs}) == len(runs)
        owner = [None] * (stop - start)
        for run in runs:
            assert 0 <= run.start < run.stop <= stop - start
            for element in range(run.start, run.stop):
                assert owner[element] is None
                owner[element] = run.group
        for piece in layout.fragments(start, stop):
            group = layout.slots[piece.slot].group
            assert set(owner[piece.offset : piece.offset + piece.numel]) == {group}
        groups = {layout.slots[piece.slot].group for piece in layout.fragments(start, stop)}
        assert {run.group for run in runs} == groups


def test_a_scalar_has_one_element_and_an_empty_parameter_none():
    layout = lay_out([("a", (), 0, ()), ("b", (3, 0), 0, ()), ("c", (5,), 0, ())], 2, 4)
    assert [slot.numel for slot in layout.slots] == [1, 0, 5]
    assert [slot.offset for slot in layout.slots] == [0, 1, 4]
    assert layout.numel == 16
    assert [piece.slot for piece in layout.fragments(0, 8)] == [0, 2]
    assert layout.gaps == ((1, 4), (9, 16))


@given(st.data())
def test_a_permuted_tensor_has_an_order_and_comes_back_in_it(data):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=5))
    dims = data.draw(st.permutations(range(len(shape))))
    numel = torch.Size(shape).numel()
    values = torch.arange(numel).view(shape).permute(dims)
    order = order_of(values.shape, values.stride())
    slot = Slot("p", tuple(values.shape), 0, 0, order)
    assert slot.is_reordered == (not values.is_contiguous())
    long = [dim for dim in range(values.dim()) if values.shape[dim] > 1]
    assert [slot.strides[dim] for dim in long] == [values.stride(dim) for dim in long]
    assert torch.equal(flattened(values, slot), torch.arange(numel))
    view = shaped(torch.arange(numel), slot)
    assert torch.equal(view, values)
    assert flattened(view, slot).data_ptr() == view.data_ptr()
    assert torch.equal(flattened(values.contiguous(), slot), torch.arange(numel))


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (8, 1, 3, 3), (8, 4, 1, 1), (1, 4, 3, 1)])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_formats_keep_the_strides_that_torch_gives_them(shape, memory_format):
    strides = torch.empty(shape, memory_format=memory_format).stride()
    assert Slot("p", shape, 0, 0, order_of(shape, strides)).strides == strides


def test_what_does_not_fill_its_memory_has_no_order():
    for values in (torch.zeros(3).expand(3, 3), torch.zeros(3, 8)[:, :4], torch.zeros(9)[::2]):
        assert order_of(values.shape, values.stride()) is None
    assert order_of((0, 3), (7, 9)) == ()
    assert order_of((), ()) == ()


def test_no_parameters_make_an_empty_buffer():
    layout = lay_out([], 3, 2)
    assert (layout.numel, layout.padding, layout.gaps) == (0, 0, ())
    assert layout.runs(*layout.span(2)) == ()


@given(st.integers(0, 10**9), st.integers(1, 4096))
def test_align_is_the_least_multiple_above(numel, unit):
    assert rounded_up(numel, unit) % unit == 0
    assert numel <= rounded_up(numel, unit) < numel + unit


@given(st.lists(st.integers(0, 10**6), max_size=30), WORLDS)
def test_shares_are_complete_and_balanced(numels, world):
    share = share_out(numels, [0] * world)
    assert len(share.owners) == len(numels)
    assert all(0 <= owner < world for owner in share.owners)
    loads = [0] * world
    for owner, numel in zip(share.owners, numels, strict=True):
        loads[owner] += numel
    assert tuple(loads) == share.loads
    # Graham's bound for handing out the next piece to whoever has least.
    largest = max(numels, default=0)
    assert max(loads) <= sum(numels) / world + largest * (1 - 1 / world) + 1e-6
    assert max(loads) - min(loads) <= largest


def test_shares_hand_out_the_largest_first():
    assert share_out([1, 8, 1, 6, 1], [0, 0]).loads == (9, 8)
    assert share_out([4, 4, 4], [0, 0, 0]).owners == (0, 1, 2)


def test_what_comes_later_goes_to_whoever_owns_least():
    share = share_out([3, 4, 2], [9, 0, 5])
    assert share.owners == (1, 1, 2)
    assert share.loads == (9, 7, 7)


@given(st.lists(SHAPES, max_size=6), st.randoms(use_true_random=False), WORLDS, WORLDS, ITEMSIZES)
def test_common_elements_fill_another_layout_once(
    shapes: list[tuple[int, ...]], random: Random, world: int, other_world: int, itemsize: int
) -> None:
    described = [(f"p{number}", shape, 0, ()) for number, shape in enumerate(shapes)]
    first = lay_out(described, world, itemsize)
    second = lay_out(random.sample(described, len(described)), other_world, 4)
    place_of = {slot.name: slot for slot in second.slots}
    for slot in first.slots:
        other, filled, pairs = place_of[slot.name], [], []
        for rank in range(world):
            span = first.span(rank)
            for other_rank, (start, stop) in shared(slot, span, other, second):
                other_span = second.span(other_rank)
                assert span[0] <= slot.offset + start < slot.offset + stop <= span[1]
                assert other_span[0] <= other.offset + start
                assert other.offset + stop <= other_span[1]
                pairs.append((rank, other_rank, start, stop))
                filled += range(start, stop)
        assert sorted(filled) == list(range(slot.numel))
        back = [
            (rank, other_rank, *span)
            for other_rank in range(other_world)
            for rank, span in shared(other, second.span(other_rank), slot, first)
        ]
        assert sorted(back) == sorted(pairs)  # both sides know the same messages
