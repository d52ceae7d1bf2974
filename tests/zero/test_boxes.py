"""Boxes and ranges of elements: what is where in a whole tensor."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, strategies as st

from hadal.errors import UsageError
from hadal.zero.boxes import Box, Placement, boxes_between, placement_of, rows_of

_SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(axis, offset, size)
    return whole


def draw_box(data: st.DataObject, shape: tuple[int, ...], least: int = 0) -> Box:
    offsets = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    pairs = zip(shape, offsets, strict=True)
    sizes = tuple(data.draw(st.integers(least, length - offset)) for length, offset in pairs)
    return Box("w", shape, offsets, sizes)


def numbers_in(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).view(shape)


@given(_SHAPES, st.integers(1, 40))
def test_rows_cover_a_tensor_in_order(shape: tuple[int, ...], limit: int) -> None:
    whole = numbers_in(shape)
    boxes = list(rows_of("w", shape, limit))
    assert torch.equal(
        torch.cat([part_of(whole, box).reshape(-1) for box in boxes]), whole.view(-1)
    )
    position = 0
    for box in boxes:
        assert box.start == position
        assert box.numel <= limit
        position += box.numel


@given(st.data(), _SHAPES)
def test_runs_are_the_elements_of_a_box(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box, whole = draw_box(data, shape), numbers_in(shape)
    runs = list(box.runs())
    found = [number for start, stop in runs for number in range(start, stop)]
    wanted = part_of(whole, box).reshape(-1).tolist()
    assert found == wanted
    assert all(start < stop for start, stop in runs)
    assert box.hull == (wanted[-1] + 1 - box.start if wanted else 0)


def test_a_full_box_is_one_run() -> None:
    assert list(Box("w", (9, 4, 5), (2, 0, 0), (3, 4, 5)).runs()) == [(40, 100)]
    assert list(Box("w", (), (), ()).runs()) == [(0, 1)]
    assert list(rows_of("w", (0, 3), 4)) == [Box("w", (0, 3), (0, 0), (0, 3))]


@given(st.data(), _SHAPES)
def test_a_range_of_elements_is_few_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    boxes = list(boxes_between("w", shape, start, stop))
    found = [number for box in boxes for number in part_of(numbers_in(shape), box).reshape(-1)]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@given(st.data(), _SHAPES)
def test_two_boxes_are_their_common_part_and_the_rest(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    one, other, whole = draw_box(data, shape), draw_box(data, shape), numbers_in(shape)
    of_one, of_other = (set(part_of(whole, box).reshape(-1).tolist()) for box in (one, other))
    common = one.within(other)
    found = [] if common is None else part_of(whole, common).reshape(-1).tolist()
    assert set(found) == of_one & of_other
    rest = [n for box in one.without(other) for n in part_of(whole, box).reshape(-1).tolist()]
    assert sorted([*rest, *found]) == sorted(of_one)
    if common is not None:
        inner = common.relative_to(one)
        assert torch.equal(part_of(part_of(whole, one), inner), part_of(whole, common))
        assert inner.of_whole(one) == common


@given(st.data(), _SHAPES, st.integers(1, 20))
def test_pieces_of_a_box_span_few_elements(
    data: st.DataObject, shape: tuple[int, ...], numel: int
) -> None:
    box, whole = draw_box(data, shape, least=1), numbers_in(shape)
    pieces = list(box.pieces(numel))
    found = [n for piece in pieces for n in part_of(whole, piece).reshape(-1).tolist()]
    assert sorted(found) == sorted(part_of(whole, box).reshape(-1).tolist())
    assert all(piece.hull <= max(numel, piece.numel) for piece in pieces)


@given(_SHAPES.filter(bool), st.integers(1, 7), st.data())
def test_cuts_are_those_of_array_split(
    shape: tuple[int, ...], count: int, data: st.DataObject
) -> None:
    dim, whole = data.draw(st.integers(0, len(shape) - 1)), numbers_in(shape)
    cuts = [part_of(whole, Box.cut("w", shape, dim, number, count)) for number in range(count)]
    assert all(map(torch.equal, cuts, whole.tensor_split(count, dim)))


def test_a_placement_joins_boxes() -> None:
    whole = numbers_in((6, 3))
    query, value = Box.cut("w", (6, 3), 0, 0, 3), Box.cut("w", (6, 3), 0, 2, 3)
    fused = Placement((query, value))
    assert fused.shape == (4, 3)
    here = torch.cat([part_of(whole, query), part_of(whole, value)])
    for box, inner in fused.rows("mine"):
        assert torch.equal(part_of(here, inner), part_of(whole, box))
    assert not fused.is_plain("w")
    assert Placement((Box.whole("w", (6, 3)),)).is_plain("w")
    assert Placement((Box.whole("w", ()),)).shape == ()


def test_impossible_boxes_are_refused() -> None:
    for offsets, sizes in (((0,), (5,)), ((-1,), (1,)), ((0, 0), (1, 1)), ((3,), (2,))):
        with pytest.raises(ValueError, match="is not inside w"):
            Box("w", (4,), offsets, sizes)
    with pytest.raises(ValueError, match="has no part 2 of 2"):
        Box.cut("w", (4,), 0, 2, 2)
    with pytest.raises(ValueError, match="cannot be joined"):
        Placement((Box.whole("w", (4, 2)), Box.whole("w", (4, 3))))


def test_an_attribute_says_the_part() -> None:
    tensor = torch.zeros(2, 3)
    assert placement_of(tensor, "w") == Placement((Box.whole("w", (2, 3)),))
    tensor.hadal_box = box = Box.cut("w", (4, 3), 0, 1, 2)  # type: ignore[attr-defined]
    assert placement_of(tensor, "w") == Placement((box,))
    tensor.hadal_box = Box.cut("w", (8, 3), 0, 1, 2)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"w has the shape \(2, 3\), and its hadal_box is"):
        placement_of(tensor, "w")
