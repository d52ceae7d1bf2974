"""Finding the checkpoint that a path refers to; its parts, joined into one source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.checkpoint import folders
from hadal.checkpoint.contents import MASTER, WEIGHT, SavedGroup
from hadal.checkpoint.files import Given, is_folder, location_of
from hadal.checkpoint.formats.registry import format_of, open_source
from hadal.checkpoint.source import Entry, RankState, Source
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError, few
from hadal.zero.boxes import Box, Placement, boxes_between
from hadal.zero.layout import strides_of


def folder_of(path: Given, tag: str | None = None) -> Location:
    """Return a checkpoint's folder: `path` itself, or the one in it that `tag` or `latest` names.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    path = location_of(path)
    if tag is None and format_of(path) is not None:
        return path
    if not is_folder(path):
        raise CheckpointError(
            f"{path} is not a directory; pass the directory given to save_checkpoint"
        )
    found = folders.find(path, tag)
    if found is None:
        raise CheckpointError(
            f"{path / folders.LATEST} is missing, and {path} is not a checkpoint; pass a tag or the"
            " folder of one checkpoint"
        )
    return found


def joined(source: Source, asked: Asked | None = None) -> JoinedSource:
    """Return all parts of a checkpoint as one: the whole model, or what one part asks for.

    Raises:
        CheckpointError: the position of a slice is not recorded, or tensors do not fit.
    """
    return JoinedSource([source.of_part(number) for number in range(source.parts)], asked)


def opened(path: Given, tag: str | None = None, part: int | None = None) -> Source:
    """Open the checkpoint that a path and a tag refer to, or one part of it.

    Raises:
        CheckpointError: it is damaged, not a checkpoint, has no such part, or has several parts
            without their positions in the whole model.
    """
    source = open_source(folder_of(path, tag), part or 0)
    if part is None and (source.parts > 1 or source.placements):
        return joined(source)
    if part is not None and not 0 <= part < source.parts:
        source.close()
        raise CheckpointError(f"{source.path} holds a whole model and has no part {part}")
    return source


# ---- parts of a model ----------------------------------------------------------------------------

# Each part of a checkpoint records as boxes which elements of the whole model's tensors it holds,
# and so does each part of the model that loads. A checkpoint of any pipeline stages, slices of
# layers and experts therefore loads into any others.

# The most elements to read at a time when only some of them are needed.
_HULL_NUMEL = 1 << 22
_NEXT = "\n  "


@dataclass(frozen=True, slots=True)
class Asked:
    """The tensors that one part of the running model loads."""

    placements: Mapping[str, Placement]
    """Placements of all its parameters and buffers, keyed by its own names."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The other names of tied parameters, by the first."""
    elsewhere: frozenset[str] = frozenset()
    """Names in the whole model that other parts load."""
    part: int = 0
    parts: int = 1


class _Holder(NamedTuple):
    """A box of a whole tensor in one saved part."""

    source: Source
    name: str
    """The part's own name."""
    entry: Entry
    box: Box
    inner: Box
    """The box's place in the value of this name."""


class _Step(NamedTuple):
    """A read of a box of a saved value into a box of a requested value."""

    holder: _Holder
    there: Box
    offset: int
    """The start of `region` in the requested elements; `here` is a box within `region`."""
    region: Box
    here: Box


class JoinedSource(Source):
    """Saved parts of a model, as the values that one part loads; by default all values, whole.

    Raises:
        CheckpointError: a tensor has another shape there, the saved parts contradict each other, or
            nothing says which part of the model something is.
    """

    def __init__(self, saved: Sequence[Source], asked: Asked | None = None) -> None:
        self._saved = saved
        first = saved[0]
        self.path = first.path
        self._part = 0 if asked is None else asked.part % len(saved)
        self.parts = 1 if asked is None else asked.parts
        self.ranks_of_part = first.ranks_of_part
        self.world_size = self.parts * self.ranks_of_part
        self.optimizer, self.scalars, self.schedule = first.optimizer, first.scalars, first.schedule
        self.jobs = first.jobs
        self._expect_known(asked)
        # By name in the whole model, and kind; `_odd` has state of another shape than its tensor's.
        self._holders: dict[str, dict[str, list[_Holder]]] = {}
        self._odd: dict[tuple[str, str], _Holder] = {}
        self._aliases: dict[str, str] = {}
        for number in self._in_turn():
            self._enter(number)
        self._asked = self._resolved(asked)
        self.entries = dict(self._entries_of())
        if asked is None:
            self.aliases = self._aliases
        else:
            self.entries = {**dict(self._unasked(asked)), **self.entries}
        self.state = self._merged_state()
        self.groups = self._merged_groups()

    @property
    def _main(self) -> Source:
        """The part whose rank state and client state are used."""
        return self._saved[self._part]

    @property
    def notes(self) -> Sequence[str]:
        """Messages about state that a load does not restore: those of this part."""
        return self._main.notes

    def _in_turn(self) -> Iterator[int]:
        """Yield the saved parts, starting at this part's: ranks begin with different files."""
        for number in range(len(self._saved)):
            yield (self._part + number) % len(self._saved)

    # ---- what there is ---------------------------------------------------------------------------

    def _expect_known(self, asked: Asked | None) -> None:
        names = {name for one in self._saved for name in one.unknown}
        if names:
            here = "is wanted whole" if asked is None else f"this one has {self.parts}"
            raise CheckpointError(
                f"{self.path} holds a model in {len(self._saved)} model-parallel parts, but"
                f" {here}, and nothing says which part of the whole model"
                f" {few(sorted(names))} is in each. Set parameter.hadal_box (hadal.zero.boxes)"
                " before initialize and save again; load it with the model-parallel size that saved"
                f" it; or read the parts one by one: part= (--part of a command) 0 to"
                f" {len(self._saved) - 1}"
            )

    def _enter(self, number: int) -> None:
        """Enter the boxes that a saved part holds."""
        source = self._saved[number]
        for (name, kind), entry in source.entries.items():
            own = source.entries.get((name, WEIGHT)) or source.entries.get((name, MASTER), entry)
            placement = _placement(source, name, own.shape)
            if placement.shape != own.shape:
                raise CheckpointError(
                    f"{source.path} is damaged: {name} of part {number} has the shape {own.shape},"
                    f" and boxes of {placement.shape}"
                )
            for box, inner in placement.rows(name):
                holder = _Holder(source, name, entry, box, inner)
                holders = self._holders.setdefault(box.name, {}).setdefault(kind, [])
                if entry.shape != own.shape:
                    self._odd.setdefault((box.name, kind), holder)
                else:
                    holders.append(holder)
        for alias, name in source.aliases.items():
            entry = source.entries.get((name, WEIGHT)) or source.entries[name, MASTER]
            boxes = _placement(source, name, entry.shape).boxes
            if len(boxes) == 1:
                self._aliases.setdefault(alias, boxes[0].name)

    def _shape_of(self, name: str) -> tuple[int, ...]:
        """Return a whole tensor's shape, on which all parts must agree."""
        shapes = {one.box.shape for some in self._holders[name].values() for one in some}
        if len(shapes) > 1:
            raise CheckpointError(
                f"{self.path} is damaged: its parts give {name} the shapes {sorted(shapes)}"
            )
        return shapes.pop()

    def _whole(self, name: str) -> Placement:
        return Placement((Box.whole(name, self._shape_of(name)),))

    def _resolved(self, asked: Asked | None) -> dict[str, Placement]:
        """Return the requested placements, with the names of the saved parts.

        Raises:
            CheckpointError: a whole tensor has another shape in the checkpoint.
        """
        if asked is None:
            return {name: self._whole(name) for name in self._holders}
        found, misshapen = {}, []
        for name, placement in asked.placements.items():
            boxes = []
            for box in placement.boxes:
                others = asked.aliases.get(name, ()) if box.name == name else ()
                known = [self._aliases.get(one, one) for one in (box.name, *others)]
                there = next((one for one in known if one in self._holders), None)
                if there is None:
                    break
                if (shape := self._shape_of(there)) != box.shape:
                    misshapen.append(f"{name} is of {box.shape}, but of {shape} in the checkpoint")
                    break
                boxes.append(replace(box, name=there))
            else:
                found[name] = Placement(tuple(boxes), placement.along)
        if misshapen:
            raise CheckpointError(
                f"{self.path} does not fit the model: shapes of whole tensors differ:\n "
                f" {few(misshapen, joint=_NEXT)}."
            )
        return found

    def _entries_of(self) -> Iterator[tuple[tuple[str, str], Entry]]:
        """Yield the requested values, with their shapes here."""
        for name, placement in self._asked.items():
            first = placement.boxes[0].name
            for kind in self._holders[first]:
                lists = [self._holders[box.name].get(kind, ()) for box in placement.boxes]
                holders = [one for some in lists for one in some]
                if holders:
                    dtypes = {one.entry.dtype for one in holders}
                    if len(dtypes) > 1:
                        raise CheckpointError(
                            f"{self.path} is damaged: {kind} of {name} is of {dtypes}"
                        )
                    is_rounded = all(one.entry.is_rounded for one in holders)
                    yield (name, kind), Entry(placement.shape, dtypes.pop(), is_rounded)
                else:
                    yield (name, kind), self._odd[first, kind].entry

    def _unasked(self, asked: Asked) -> Iterator[tuple[tuple[str, str], Entry]]:
        """Yield the values that no part loads, whole."""
        here = {box.name for placement in self._asked.values() for box in placement.boxes}
        for name in self._holders.keys() - here - asked.elsewhere - self._asked.keys():
            for kind, holders in self._holders[name].items():
                if holders:
                    yield (name, kind), Entry(self._shape_of(name), holders[0].entry.dtype)

    def _merged_state(self) -> dict[str, dict[str, Any]]:
        """Return the state that is not per element; the parts of a tensor must agree on it."""
        merged: dict[str, dict[str, Any]] = {}
        for name, placement in self._asked.items():
            found = merged.setdefault(name, {})
            lists = [some for box in placement.boxes for some in self._holders[box.name].values()]
            holders = [one for some in lists for one in some]
            for source, own in dict.fromkeys((one.source, one.name) for one in holders):
                for key, value in source.state.get(own, {}).items():
                    if not bool(found.setdefault(key, value) == value):
                        raise CheckpointError(
                            f"{self.path}: {key} is {found[key]} for one part of {name} and"
                            f" {value} for another; pass load_optimizer_states=False"
                        )
        return {name: values for name, values in merged.items() if values}

    def _merged_groups(self) -> list[SavedGroup]:
        """Return the saved param groups with the requested names; equal groups are merged."""
        names_of: dict[str, list[str]] = {}
        for name, placement in self._asked.items():
            for box in placement.boxes:
                names_of.setdefault(box.name, []).append(name)
        groups: list[tuple[int, Any, dict[str, None]]] = []
        for source in self._saved:
            for number, group in enumerate(source.groups):
                like = [one for one in groups if one[:2] == (number, group.options)]
                if not like:
                    groups.append((number, group.options, {}))
                    like = groups[-1:]
                for own in group.names:
                    entry = source.entries.get((own, WEIGHT)) or source.entries.get((own, MASTER))
                    for box in () if entry is None else _placement(source, own, entry.shape).boxes:
                        like[0][2].update(dict.fromkeys(names_of.get(box.name, ())))
        groups.sort(key=lambda one: one[0])
        return [SavedGroup(options, tuple(names)) for _, options, names in groups]

    # ---- reading ---------------------------------------------------------------------------------

    def _steps(self, name: str, kind: str, start: int, stop: int) -> Iterator[_Step]:
        """Yield the reads for elements [start, stop) of a value.

        Raises:
            CheckpointError: no part holds some of them.
        """
        placement, offset = self._asked[name], 0
        for region in boxes_between(name, placement.shape, start, stop):
            for box, inner in placement.rows(name):
                common = region.within(inner)
                if common is None:
                    continue
                wanted = common.relative_to(inner).of_whole(box)
                for holder, piece in self._pieces(kind, wanted):
                    here = piece.relative_to(box).of_whole(inner).relative_to(region)
                    there = piece.relative_to(holder.box).of_whole(holder.inner)
                    yield _Step(holder, there, offset, region, here)
            offset += region.numel

    def _pieces(self, kind: str, wanted: Box) -> Iterator[tuple[_Holder, Box]]:
        """Yield the boxes that make up a box of a whole tensor, each once, with its holder."""
        left = [wanted]
        for holder in self._holders[wanted.name].get(kind, ()):
            rest: list[Box] = []
            for box in left:
                common = box.within(holder.box)
                if common is not None:
                    yield holder, common
                rest += box.without(holder.box)
            left = rest
            if not left:
                return
        raise CheckpointError(
            f"{self.path}: no part of the model holds {kind} of {wanted.name} at {left[0].offsets},"
            f" {left[0].sizes} elements of {left[0].shape}; save all parts of the model, at the"
            " same time"
        )

    def _odd_holder(self, name: str, kind: str) -> _Holder | None:
        """Return the holder of state of another shape than its tensor's; None if it has that.

        Raises:
            CheckpointError: the tensor is in parts, and such state cannot be sliced.
        """
        placement = self._asked[name]
        first = placement.boxes[0].name
        holder = self._odd.get((first, kind))
        if holder is None or self._holders[first][kind]:
            return None
        if not holder.box.is_whole or not all(box.is_whole for box in placement.boxes):
            raise CheckpointError(
                f"{self.path}: {kind} of {name} has the shape {holder.entry.shape} and is not kept"
                " per element, so other parts of the model cannot have it; load it with the"
                " model-parallel size that saved it, or pass load_optimizer_states=False"
            )
        return holder

    def expect(self, name: str, kind: str, start: int, stop: int) -> None:
        """Check that the elements can be read."""
        super().expect(name, kind, start, stop)
        if odd := self._odd_holder(name, kind):
            odd.source.expect(odd.name, kind, start, stop)
            return
        for step in self._steps(name, kind, start, stop):
            first, holder = step.there.start, step.holder
            holder.source.expect(holder.name, kind, first, first + step.there.hull)

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements of a value, in host memory."""
        super().expect(name, kind, start, stop)
        if odd := self._odd_holder(name, kind):
            return odd.source.read(odd.name, kind, start, stop)
        found = torch.empty(stop - start, dtype=self.entries[name, kind].dtype)
        for step in self._steps(name, kind, start, stop):
            target = found[step.offset : step.offset + step.region.numel].view(step.region.sizes)
            self._copy(step, kind, target[step.here.index])
        return found

    def _copy(self, step: _Step, kind: str, target: Tensor) -> None:
        """Fill a target with a box of a saved value; reads the elements in between as well."""
        holder, strides = step.holder, strides_of(step.there.shape, ())
        for piece in step.there.pieces(_HULL_NUMEL):
            first = piece.start
            hull = holder.source.read(holder.name, kind, first, first + piece.hull)
            values = hull.as_strided(piece.sizes, strides, hull.storage_offset())
            target[piece.relative_to(step.there).index].copy_(values)

    def read_own(self, name: str, kind: str, rank: int) -> Tensor:
        """Return a whole value in its shape; if each rank has its own, that of `rank`."""
        placement = self._asked[name]
        holders = self._holders[placement.boxes[0].name].get(kind, ())
        if placement.boxes[0].is_whole and holders and holders[0].box.is_whole:
            holder = holders[0]
            if holder.inner.is_whole and placement.shape == holder.box.shape:
                return holder.source.read_own(holder.name, kind, rank)
        return super().read_own(name, kind, rank)

    def own(self, rank: int) -> RankState | None:
        """Return the own state of a rank of the part; other parts' modules add theirs."""
        found = self._main.own(rank)
        if found is None:
            return None
        extra = dict(found.extra)
        for number in self._in_turn():
            other = self._saved[number].own(rank)
            extra = {**({} if other is None else other.extra), **extra}
        return replace(found, extra=extra, exchange=None)

    def client_state(self) -> dict[str, Any]:
        """Return the caller's own values."""
        return self._main.client_state()

    def verify(
        self, share: int = 0, shares: int = 1, *, spread: bool = True, room: int = 0
    ) -> None:
        """Verify the files, which all parts share."""
        self._saved[0].verify(share, shares, spread=spread, room=room)

    def close(self) -> None:
        """Close all files."""
        for source in self._saved:
            source.close()


def _placement(source: Source, name: str, shape: Sequence[int]) -> Placement:
    """Return what a value of this name and shape is of the whole model."""
    return source.placements.get(name) or Placement((Box.whole(name, shape),))
