"""The reads that fill a model: values matched by name, weights, masters and optimizer state.

A master is read from the saved master, or from the weight if no master was saved. A weight is read
bit for bit from the saved weight if that has its dtype; otherwise, or if the result is the same, it
is rounded from the master here, as a step would do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.checkpoint.contents import BUFFER, MASTER, WEIGHT, SavedGroup, state_key, state_kind
from hadal.checkpoint.live import plain_slots
from hadal.checkpoint.plain import decoded
from hadal.checkpoint.source import Entry, Source
from hadal.config.optimizer import KINDS
from hadal.errors import CheckpointError, few
from hadal.offload.tensors import StoredSlice
from hadal.optim.pieces import HeldTensor
from hadal.zero.bucket import Bucket
from hadal.zero.layout import Slot
from hadal.zero.regroup import has_gone
from hadal.zero.views import flattened


@dataclass(frozen=True, slots=True)
class Copy:
    """A read of elements of one saved value into a target."""

    target: Tensor
    """The tensor to fill: 1-D in memory order, or the whole value in its shape."""
    name: str
    kind: str
    start: int
    slot: Slot | None = None
    """The slot that gives the element order of a 1-D target, if that is not row-major."""

    def expect(self, source: Source) -> None:
        """Check that the elements can be read."""
        source.expect(self.name, self.kind, *self._needed)

    def run(self, source: Source) -> None:
        """Read the elements."""
        found = source.read(self.name, self.kind, *self._needed)
        if self.slot is not None:
            whole = flattened(found.view(self.slot.shape), self.slot)
            found = whole[self.start : self.start + self.target.numel()]
        self.target.copy_(found.view(self.target.shape))

    @property
    def _needed(self) -> tuple[int, int]:
        """The (start, stop) to read; all of a value that is stored here in another order."""
        if self.slot is not None:
            return 0, self.slot.numel
        return self.start, self.start + self.target.numel()


Reading = Callable[[], object]
"""A planned read, or a rounding of what was read before it."""


def plan_bucket(
    bucket: Bucket, found: Mapping[str, str], source: Source, *, uses_masters: bool
) -> Iterator[Reading]:
    """Yield the reads that fill a bucket's weights and master on this rank.

    `found` maps each parameter to its saved name; parameters that it lacks keep their values. While
    the bucket is on disk the reads only check; inside `present` they can run.

    Raises:
        CheckpointError: a value cannot be read.
    """
    slots = plain_slots(bucket.layout.slots)
    names = {slot.name: found[slot.name] for slot in slots if slot.name in found}
    exact = {
        name: exact_kind(saved, source, uses_masters=uses_masters) for name, saved in names.items()
    }
    weights = {
        name: _weight_kind(saved, exact[name], bucket, source) for name, saved in names.items()
    }
    shard = _target(bucket.shard_source)
    kept = bucket.master_source if bucket.precision.keeps_master else None
    if kept is None:
        yield from _plan_run(bucket, shard, weights, names, source)
        if bucket.has_own_master:
            yield partial(_target(bucket.master_source).copy_, shard)
        return
    master = _target(kept)
    yield from _plan_run(bucket, master, exact, names, source)
    saved = {name: kind for name, kind in weights.items() if kind != exact[name]}
    yield from _plan_run(bucket, shard, saved, names, source)
    if not saved and len(names) == len(slots):
        yield partial(shard.copy_, master)
        return
    for fragment in bucket.layout.fragments(*bucket.span):
        name = slots[fragment.slot].name
        if name in names and name not in saved:
            place = slice(fragment.offset, fragment.offset + fragment.numel)
            yield partial(shard[place].copy_, master[place])


def _target(values: Tensor | StoredSlice | None) -> Tensor:
    """Return the tensor to read into; a meta tensor while the values are on disk."""
    assert values is not None  # it is trained
    if isinstance(values, Tensor):
        return values
    return torch.empty(values.numel(), dtype=values.dtype, device="meta")


def _weight_kind(saved: str, exact: str, bucket: Bucket, source: Source) -> str:
    entry = source.entries.get((saved, WEIGHT))
    if entry is None or entry.dtype != bucket.precision.compute:
        return exact
    keeps_master = bucket.trainable and bucket.precision.keeps_master
    return exact if entry.is_rounded and keeps_master else WEIGHT


def _plan_run(
    bucket: Bucket,
    target: Tensor,
    kinds: Mapping[str, str],
    names: Mapping[str, str],
    source: Source,
) -> Iterator[Reading]:
    """Yield the reads of the parameters in `kinds`, into one shard."""
    slots, (start, stop) = plain_slots(bucket.layout.slots), bucket.span
    alike = set(kinds.values())
    same = len(kinds) == len(slots) and all(name == saved for name, saved in names.items())
    if same and len(alike) == 1:
        kind = alike.pop()
        dtypes = {source.entries[name, kind].dtype for name in names}
        if dtypes == {target.dtype} and source.has_slice(kind, slots, start, stop):
            yield partial(source.read_slice, kind, slots, start, target)
            return
    for fragment in bucket.layout.fragments(start, stop):
        name = slots[fragment.slot].name
        if name not in kinds:
            continue
        place = target[fragment.offset : fragment.offset + fragment.numel]
        slot = slots[fragment.slot] if slots[fragment.slot].is_reordered else None
        copy = Copy(place, names[name], kinds[name], fragment.start, slot)
        copy.expect(source)
        yield partial(copy.run, source)


# ---- matching by name ----------------------------------------------------------------------------

# Pure functions of names, shapes and options; no tensor is read.

_NEXT = "\n  "


@dataclass(slots=True)
class Fit:
    """The saved name of each of the model's values, and the mismatches."""

    found: dict[str, str] = field(default_factory=dict)
    """The saved name by the model's name."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def refuse(self, source: Source, *, strict: bool) -> None:
        """Raise if the checkpoint belongs to another model.

        Raises:
            CheckpointError: a shape differs, or, if `strict`, a name is missing or unexpected.
        """
        faults = []
        if self.misshapen:
            faults.append(f"shapes differ:\n  {few(self.misshapen, joint=_NEXT)}")
        if strict and self.missing:
            faults.append(f"the checkpoint lacks {few(self.missing)}")
        if strict and self.unexpected:
            faults.append(f"the model lacks {few(self.unexpected)}")
        if faults:
            remedy = "" if self.misshapen else " Pass load_module_strict=False to load the rest."
            raise CheckpointError(
                f"{source.path} does not fit the model: {'. '.join(faults)}.{remedy}"
            )


def fit_names(wanted: Iterable[tuple[Sequence[str], tuple[int, ...], str]], source: Source) -> Fit:
    """Look up (names of one value, shape, kind) in a source; a tied parameter has several names.

    `kind` is "weight" or "buffer".
    """
    fit, used = Fit(), set[str]()
    for names, shape, kind in wanted:
        name, entry = _look_up(names, kind, source)
        if entry is None:
            if not has_gone(names[0]):
                fit.missing.append(names[0])
            continue
        # Another library may store a tied parameter under each of its names.
        used.update(source.aliases.get(one, one) for one in (name, *names))
        if entry.shape != shape:
            fit.misshapen.append(f"{names[0]} is {shape}, but {entry.shape} in the checkpoint")
        fit.found[names[0]] = name
    for name, kind in source.entries:
        there = WEIGHT if kind in (WEIGHT, MASTER) else kind
        if there in (WEIGHT, BUFFER) and name not in used and not has_gone(name):
            used.add(name)
            fit.unexpected.append(name)
    return fit


def _look_up(names: Sequence[str], kind: str, source: Source) -> tuple[str, Entry | None]:
    kinds = (WEIGHT, MASTER) if kind == WEIGHT else (kind,)
    for alias in names:
        name = source.aliases.get(alias, alias)
        for one in kinds:
            if (name, one) in source.entries:
                return name, source.entries[name, one]
    return names[0], None


def exact_kind(name: str, source: Source, *, uses_masters: bool) -> str:
    """Return the kind with a parameter's most precise values: its master if saved and wanted."""
    has_weight = (name, WEIGHT) in source.entries
    wants_master = uses_masters or not has_weight
    return MASTER if wants_master and (name, MASTER) in source.entries else WEIGHT


@dataclass(frozen=True, slots=True)
class GroupFit:
    """The options that a param group loads, and those that it cannot."""

    options: dict[str, Any]
    disputed: tuple[str, ...] = ()
    """Options on which the saved groups of its parameters differ: these keep their values."""


def fit_groups(
    groups: Sequence[Sequence[str]], saved: Sequence[SavedGroup], found: Mapping[str, str]
) -> list[GroupFit]:
    """Return the options that each of the model's param groups loads from the saved groups.

    Each group is given by its parameters' names. It loads the options on which all the saved groups
    of its parameters agree. A group without parameters loads those of the saved group with its
    index, if the number of groups is the same.
    """
    group_of = {name: number for number, group in enumerate(saved) for name in group.names}
    options = [dict(decoded(group.options)) for group in saved]
    fits = []
    for number, names in enumerate(groups):
        numbers = {group_of[found[name]] for name in names if found.get(name) in group_of}
        if not names and len(groups) == len(saved):
            numbers = {number}
        of_saved = [options[one] for one in sorted(numbers)]
        first = of_saved[0] if of_saved else {}
        agreed = {
            key: value
            for key, value in first.items()
            if all(key in other and other[key] == value for other in of_saved)
        }
        disputed = {key for one in of_saved for key in one} - agreed.keys()
        fits.append(GroupFit(agreed, tuple(sorted(disputed))))
    return fits


# ---- optimizer state -----------------------------------------------------------------------------

# An elementwise optimizer steps the parameters of a group together. They share step counts and the
# like, so these must have been saved with equal values.

_Saved = Mapping[str, tuple[str, Sequence[str]]]
"""The saved name of each parameter, and the kinds of its saved state."""
_NOTHING: tuple[str, Sequence[str]] = ("", ())
_Row = tuple[Any, tuple[str, str, int, Slot | None]]
"""The index of the elements to read here, and the rest of a `Copy`."""


@dataclass(slots=True)
class TensorState:
    """The state to read for one tensor that the optimizer steps."""

    values: nn.Parameter
    counts_on: torch.device
    """The device of step counts: the host, unless a device kernel reads them."""
    tensors: dict[str, Entry] = field(default_factory=dict)
    """The shape and dtype here, by key."""
    readings: dict[str, list[_Row]] = field(default_factory=dict)
    """The reads by key."""
    same_layout: tuple[tuple[Slot, ...], int] | None = None
    """The slots of the saved bucket with the same layout, and the tensor's start in it."""
    plain: dict[str, Any] = field(default_factory=dict)

    def restore(self, optimizer: Optimizer, source: Source) -> None:
        """Give the optimizer the state, read into its own tensors if these fit."""
        present = optimizer.state.pop(self.values, {})
        state: dict[str, Any] = {}
        for key, entry in self.tensors.items():
            kept = self._take(key, entry, source)
            if kept is not None:
                state[key] = kept
                continue
            target = present.get(key)
            fits = isinstance(target, Tensor) and Entry(tuple(target.shape), target.dtype) == entry
            if not fits or target is None or target.device != self.values.device:
                target = self._made(entry)
            state[key] = target
            if self.same_layout is not None:
                source.read_slice(state_kind(key), *self.same_layout, target)
                continue
            target.zero_()
            for place, row in self.readings.get(key, ()):
                Copy(target[place], *row).run(source)
        for key, value in self.plain.items():
            # A copy for each: a count that two tensors share would advance twice per update.
            is_tensor = isinstance(value, Tensor)
            state[key] = value.to(self.counts_on, copy=True) if is_tensor else value
        if state:
            optimizer.state[self.values] = state

    def _made(self, entry: Entry) -> Tensor:
        """Allocate a value, with the strides of the tensor that it belongs to."""
        if entry.shape == tuple(self.values.shape):
            return torch.empty_like(self.values, dtype=entry.dtype)
        return torch.empty(entry.shape, dtype=entry.dtype, device=self.values.device)

    def _take(self, key: str, entry: Entry, source: Source) -> Tensor | None:
        """Return the value as kept by verification, if it can be used without a copy."""
        if self.same_layout is None or self.values.device.type != "cpu" or self.values.is_pinned():
            return None
        slots, start = self.same_layout
        found = source.take_slice(state_kind(key), slots, start, start + entry.numel)
        fits = found is not None and found.dtype == entry.dtype
        return found.view(entry.shape) if fits and found is not None else None


@dataclass(slots=True)
class StatePlan:
    """The state to restore, and the parameters without saved state."""

    states: list[TensorState] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)


def plan_state(
    optimizer: Optimizer, holds: Iterable[HeldTensor], found: Mapping[str, str], source: Source
) -> StatePlan:
    """Plan the reads of the optimizer's state on this rank.

    Raises:
        CheckpointError: the state belongs to another optimizer, parameters stepped together have
            different values of shared state, or the files lack the state.
    """
    _check_kind(optimizer, source)
    kinds: dict[str, list[str]] = {}
    for name, kind in source.entries:
        if state_key(kind) is not None:
            kinds.setdefault(name, []).append(kind)
    plan = StatePlan()
    if not kinds and not source.state:
        return plan
    remembered = kinds.keys() | source.state.keys()
    for held in holds:
        if not held.values.numel():
            continue
        slots = plain_slots(held.bucket.layout.slots)
        members = (
            [slot for slot in slots if slot.group == held.group]
            if held.slot is None
            else [slots[held.slot]]
        )
        names = {slot.name: found[slot.name] for slot in members if slot.name in found}
        saved = {name: (there, kinds.get(there, [])) for name, there in names.items()}
        plan.forgotten += [
            slot.name for slot in members if slot.numel and names.get(slot.name) not in remembered
        ]
        group = optimizer.param_groups[held.group]
        on_device = group.get("fused") or group.get("capturable")
        memory = TensorState(held.values, held.values.device if on_device else torch.device("cpu"))
        memory.plain = _shared(names.values(), source)
        plan.states.append(memory)
        if held.slot is None:
            _plan_flat(memory, held, members, saved, source)
        else:
            _plan_whole(memory, held, members[0], saved, source)
    return plan


def _check_kind(optimizer: Optimizer, source: Source) -> None:
    here, there = type(optimizer).__name__, source.optimizer
    if there in (None, here) or any(
        {here, there} <= kind.class_names.keys() for kind in KINDS.values()
    ):
        return
    raise CheckpointError(
        f"{source.path} holds the state of {there}, but the optimizer here is {here}; use the"
        " same one, or pass load_optimizer_states=False to load the weights alone"
    )


def _shared(names: Iterable[str], source: Source) -> dict[str, Any]:
    """Return the state that is not per element, which parameters stepped together share."""
    shared: dict[str, Any] = {}
    first: dict[str, str] = {}
    for name in names:
        for key, value in source.state.get(name, {}).items():
            if key not in shared:
                shared[key], first[key] = value, name
            elif not bool(shared[key] == value):
                raise CheckpointError(
                    f"{source.path}: {key} is {shared[key]} for {first[key]} and {value} for"
                    f" {name}, which are stepped together here; put them into separate param"
                    " groups, or pass load_optimizer_states=False"
                )
    return shared


def _plan_flat(
    memory: TensorState, held: HeldTensor, members: Sequence[Slot], saved: _Saved, source: Source
) -> None:
    """Plan a flat slice: this rank's elements of each parameter; zeros if it has no saved state."""
    layout, state_dtype = held.bucket.layout, held.bucket.precision.state_dtype
    slots = plain_slots(layout.slots)
    for slot in members:
        name, kinds = saved.get(slot.name, _NOTHING)
        for kind in kinds:
            entry, key = source.entries[name, kind], state_key(kind)
            assert key is not None  # only such kinds are collected
            if entry.shape != slot.shape:
                raise CheckpointError(
                    f"{source.path}: {kind} of {slot.name} has shape {entry.shape}, but the"
                    f" parameter has {slot.shape}; pass load_optimizer_states=False"
                )
            dtype = state_dtype if entry.dtype.is_floating_point else entry.dtype
            memory.tensors[key] = Entry(tuple(held.values.shape), dtype)
    stop = held.start + held.values.numel()
    if all(saved.get(slot.name, _NOTHING)[0] == slot.name for slot in members):
        kinds_here = map(state_kind, memory.tensors)
        if all(source.has_slice(kind, slots, held.start, stop) for kind in kinds_here):
            memory.same_layout = (slots, held.start)
            return
    for fragment in layout.fragments(held.start, stop):
        slot = slots[fragment.slot]
        name, kinds = saved.get(slot.name, _NOTHING)
        for kind in kinds:
            place = slice(fragment.offset, fragment.offset + fragment.numel)
            row = (name, kind, fragment.start, slot if slot.is_reordered else None)
            Copy(held.values.detach()[place], *row).expect(source)
            memory.readings.setdefault(state_key(kind) or "", []).append((place, row))


def _plan_whole(
    memory: TensorState, held: HeldTensor, slot: Slot, saved: _Saved, source: Source
) -> None:
    """Plan a whole parameter; state in the saved master's dtype takes the dtype of values here."""
    name, kinds = saved.get(slot.name, _NOTHING)
    for kind in kinds:
        master = source.entries.get((name, MASTER)) or source.entries[name, WEIGHT]
        entry, key = source.entries[name, kind], state_key(kind)
        assert key is not None  # only such kinds are collected
        dtype = held.values.dtype if entry.dtype == master.dtype else entry.dtype
        memory.tensors[key] = Entry(entry.shape, dtype)
        source.expect(name, kind, 0, entry.numel)
        memory.readings[key] = [(..., (name, kind, 0, None))]
