"""Optimizer state from a checkpoint, arranged for the tensors that are stepped here.

An elementwise optimizer steps the parameters of a group together. They share step counts and the
like, so these must have been saved with equal values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.checkpoint.contents import MASTER, WEIGHT, state_key, state_kind
from hadal.checkpoint.live import plain_slots
from hadal.checkpoint.source import Entry, Source
from hadal.checkpoint.weights import Copy
from hadal.config.optimizer import KINDS
from hadal.errors import CheckpointError
from hadal.optim.pieces import HeldTensor
from hadal.zero.layout import Slot

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
    memory: TensorState,
    held: HeldTensor,
    members: Sequence[Slot],
    saved: _Saved,
    source: Source,
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
