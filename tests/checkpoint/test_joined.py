"""Values in boxes of any saved parts, read as the boxes of any other parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hadal.checkpoint.contents import MASTER, WEIGHT, SavedGroup, state_kind
from hadal.checkpoint.opening import Asked, JoinedSource
from hadal.checkpoint.source import Entry, Source
from hadal.errors import CheckpointError
from hadal.zero.boxes import Box, Placement

MOMENT = state_kind("exp_avg")


class InMemory(Source):
    """A part of a model that is in memory."""

    path, optimizer = Path("memory"), "Adam"

    def __init__(
        self,
        values: Mapping[tuple[str, str], Tensor],
        state: Mapping[str, Mapping[str, Any]] | None = None,
        groups: Sequence[SavedGroup] = (),
        aliases: Mapping[str, str] | None = None,
        placements: Mapping[str, Placement] | None = None,
    ) -> None:
        self.values, self.groups = values, groups
        self.state, self.aliases = state or {}, aliases or {}
        self.placements = placements or {}
        self.entries = {
            key: Entry(tuple(value.shape), value.dtype) for key, value in values.items()
        }

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        self.expect(name, kind, start, stop)
        return self.values[name, kind].reshape(-1)[start:stop]


def part_of(whole: Tensor, box: Box) -> Tensor:
    pairs = zip(box.offsets, box.sizes, strict=True)
    return whole[tuple(slice(start, start + size) for start, size in pairs)]


def grid_of(data: st.DataObject, shape: tuple[int, ...]) -> list[Box]:
    """Cut every dimension of a tensor somewhere: a box for each of the cells."""
    edges = []
    for length in shape:
        inner = data.draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else set()
        cuts = [0, *sorted(inner), length]
        edges.append(list(pairwise(cuts)))
    return [
        Box("w", shape, tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in product(*edges)
    ]


def saved_of(number: int, whole: Tensor, placement: Placement) -> InMemory:
    """A part that calls its part of the tensor by a name of its own."""
    name = f"part{number}"
    values = torch.cat([part_of(whole, box) for box in placement.boxes], placement.along)
    both = {(name, WEIGHT): values, (name, MOMENT): values * 2}
    return InMemory(both, placements={name: placement})


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
def test_any_grid_loads_into_any_other(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    cells = data.draw(st.permutations(grid_of(data, shape)))
    # Some cells have copies, as what every rank of a layer's slices has.
    cells += data.draw(st.lists(st.sampled_from(cells), max_size=2))
    saved = [saved_of(n, whole, Placement((cell,))) for n, cell in enumerate(cells)]
    wanted = data.draw(st.sampled_from(grid_of(data, shape)))
    asked = Asked({"mine": Placement((wanted,))}, part=data.draw(st.integers(0, 3)), parts=4)
    source = JoinedSource(saved, asked)
    assert source.entries.keys() == {("mine", WEIGHT), ("mine", MOMENT)}
    expected = part_of(whole, wanted).reshape(-1)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    source.expect("mine", WEIGHT, start, stop)
    assert torch.equal(source.read("mine", WEIGHT, start, stop), expected[start:stop])
    assert torch.equal(source.read("mine", MOMENT, start, stop), 2 * expected[start:stop])
    assert torch.equal(source.read_own("mine", WEIGHT, 0), part_of(whole, wanted))
    # And all of it whole, as exports read it.
    assert torch.equal(JoinedSource(saved).read_own("w", WEIGHT, 0), whole)


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_fused_slices_load_into_any_number_of_parts(
    data: st.DataObject, before: int, after: int
) -> None:
    """Query, key and value in one tensor: each part has its slice of each of the three."""
    along, lengths = data.draw(st.sampled_from([0, 1])), (8, 4, 4)
    shapes = [(length, 3) if along == 0 else (3, length) for length in lengths]
    wholes = [torch.randint(100, shape) for shape in shapes]

    def fused(number: int, count: int) -> Placement:
        cuts = (
            Box.cut(name, shape, along, number, count)
            for name, shape in zip("qkv", shapes, strict=True)
        )
        return Placement(tuple(cuts), along)

    def slices(number: int, count: int) -> Tensor:
        boxes = fused(number, count).boxes
        return torch.cat([part_of(*pair) for pair in zip(wholes, boxes, strict=True)], along)

    saved = [
        InMemory({("qkv", WEIGHT): slices(n, before)}, placements={"qkv": fused(n, before)})
        for n in range(before)
    ]
    for number in range(after):
        source = JoinedSource(saved, Asked({"qkv": fused(number, after)}, part=number))
        assert torch.equal(source.read_own("qkv", WEIGHT, 0), slices(number, after))
    for name, whole in zip("qkv", wholes, strict=True):
        assert torch.equal(JoinedSource(saved).read_own(name, WEIGHT, 0), whole)


def stages(*held: dict[str, Tensor], **more: Any) -> list[InMemory]:
    return [InMemory({(n, WEIGHT): v for n, v in part.items()}, **more) for part in held]


def whole(name: str, *shape: int) -> tuple[str, Placement]:
    return name, Placement((Box.whole(name, shape),))


def test_layers_of_other_stages_are_found_and_not_unexpected() -> None:
    first, second = torch.ones(2), torch.zeros(3)
    saved = stages({"layers.0.w": first}, {"layers.1.w": second})
    asked = Asked(dict([whole("layers.1.w", 3)]), elsewhere=frozenset({"layers.0.w"}))
    source = JoinedSource(saved, asked)
    assert source.entries.keys() == {("layers.1.w", WEIGHT)}
    assert torch.equal(source.read("layers.1.w", WEIGHT, 0, 3), second)
    alone = JoinedSource(saved, Asked(dict([whole("layers.1.w", 3)])))
    assert ("layers.0.w", WEIGHT) in alone.entries  # nobody asks for it: a smaller model


def test_a_tied_weight_is_found_under_each_of_its_names() -> None:
    saved = stages({"words": torch.ones(2)}, aliases={"head": "words"})
    source = JoinedSource(saved, Asked(dict([whole("head", 2)]), {"head": ["other"]}))
    assert torch.equal(source.read("head", WEIGHT, 0, 2), torch.ones(2))


def test_counts_and_groups_are_those_of_all_parts() -> None:
    box = Box.cut("w", (4,), 0, 0, 2), Box.cut("w", (4,), 0, 1, 2)
    sources = [
        InMemory({("w", WEIGHT): torch.ones(2)}, {"w": {"step": step}}, [SavedGroup(lr, ("w",))])
        for step, lr in ((3, {"lr": 1}), (3, {"lr": 1}))
    ]
    for source, one in zip(sources, box, strict=True):
        source.placements = {"w": Placement((one,))}
    asked = Asked(dict([whole("w", 4)]))
    joined = JoinedSource(sources, asked)
    assert joined.state == {"w": {"step": 3}}
    assert joined.groups == [SavedGroup({"lr": 1}, ("w",))]
    sources[1].state = {"w": {"step": 4}}
    with pytest.raises(CheckpointError, match="step is 3 for one part of w and 4 for another"):
        JoinedSource(sources, asked)


def test_what_does_not_fit_is_told() -> None:
    cut = Placement((Box.cut("w", (4,), 0, 0, 2),))
    half = [InMemory({("w", WEIGHT): torch.ones(2)}, placements={"w": cut})]
    with pytest.raises(CheckpointError, match=r"no part of the model holds weight of w at \(2,\)"):
        JoinedSource(half, Asked(dict([whole("w", 4)]))).expect("w", WEIGHT, 0, 4)
    with pytest.raises(CheckpointError, match=r"w is of \(8,\), but of \(4,\) in the checkpoint"):
        JoinedSource(half, Asked(dict([whole("w", 8)])))
    unknown = [InMemory({("w", WEIGHT): torch.ones(2)})] * 2
    unknown[0].unknown = frozenset({"w"})
    with pytest.raises(CheckpointError, match=r"nothing says which part of the whole model w is"):
        JoinedSource(unknown)
    values = {("w", WEIGHT): torch.ones(2), ("w", MOMENT): torch.ones(1, 3)}
    source = JoinedSource([InMemory(values, placements={"w": cut})], Asked({"w": cut}))
    with pytest.raises(CheckpointError, match="is not kept per element"):
        source.expect("w", MOMENT, 0, 3)
    with pytest.raises(CheckpointError, match="elements 0 to 3 of weight of w are requested"):
        source.expect("w", WEIGHT, 0, 3)


def test_state_of_another_shape_goes_with_a_whole_tensor() -> None:
    values = {("w", WEIGHT): torch.ones(2), ("w", MASTER): torch.ones(2, dtype=torch.float64)}
    source = InMemory({**values, ("w", MOMENT): torch.arange(3.0).view(1, 3)})
    joined = JoinedSource([source], Asked(dict([whole("w", 2)]), parts=2))
    assert joined.entries["w", MOMENT] == Entry((1, 3), torch.float32)
    joined.expect("w", MOMENT, 0, 3)
    assert torch.equal(joined.read("w", MOMENT, 0, 3), torch.arange(3.0))
    assert joined.entries["w", MASTER].dtype == torch.float64


def test_messages_of_the_saved_parts_are_kept() -> None:
    class Foreign(InMemory):
        notes = ("it holds no random generators",)

    values = {("w", WEIGHT): torch.ones(3)}
    source = JoinedSource([Foreign(values)])
    assert source.notes == ("it holds no random generators",)
