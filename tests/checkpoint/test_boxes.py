"""Boxes and ranges of elements: the arithmetic of other libraries' pieces of tensors."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from hadal.checkpoint.formats.boxes import Box, rows_of, runs_of, start_of

_SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(axis, offset, size)
    return whole


@given(_SHAPES, st.integers(1, 40))
def test_rows_cover_a_tensor_in_order(shape: tuple[int, ...], limit: int) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    boxes = list(rows_of(shape, limit))
    assert torch.equal(
        torch.cat([part_of(whole, box).reshape(-1) for box in boxes]), whole.view(-1)
    )
    position = 0
    for box in boxes:
        assert start_of(box, shape) == position
        assert box.numel <= limit
        position += box.numel


@given(st.data(), _SHAPES)
def test_runs_are_the_elements_of_a_box(data: st.DataObject, shape: tuple[int, ...]) -> None:
    offsets = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    sizes = tuple(
        data.draw(st.integers(0, length - offset))
        for length, offset in zip(shape, offsets, strict=True)
    )
    box = Box(offsets, sizes)
    whole = torch.arange(prod(shape)).view(shape)
    runs = list(runs_of(box, shape))
    found = [number for start, stop in runs for number in range(start, stop)]
    assert found == part_of(whole, box).reshape(-1).tolist()
    assert all(start < stop for start, stop in runs)


def test_a_full_box_is_one_run() -> None:
    assert list(runs_of(Box((2, 0, 0), (3, 4, 5)), (9, 4, 5))) == [(40, 100)]
    assert list(runs_of(Box((), ()), ())) == [(0, 1)]
    assert list(rows_of((0, 3), 4)) == [Box((0, 0), (0, 3))]
