"""One parameter's place: its bucket, its fragment, and its slice of the optimizer state."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm import Ranks
from hadal.comm.collectives import broadcast_, max_
from hadal.comm.faults import raised_on_all
from hadal.errors import UsageError
from hadal.zero import access
from hadal.zero.access import Keeper
from hadal.zero.bucket import Bucket
from hadal.zero.gathering import Phase
from hadal.zero.gradients import Arrival, Gradients
from hadal.zero.layout import Slot
from hadal.zero.runtime import ZeroRuntime
from hadal.zero.views import flattened, shaped


class Stepper(Protocol):
    """The methods of a stepper that safe access needs."""

    def values_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the optimizer's whole tensor of a parameter, if this rank owns it."""

    def present(self, bucket: Bucket, *, writes: bool = True) -> AbstractContextManager[None]:
        """Load a bucket's masters and state; writes in the block are kept."""


class Trainer(Protocol):
    """The owner of a runtime's optimizer: an engine."""

    @property
    def gradient_factor(self) -> float:
        """The factor by which gradients are multiplied."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None until it exists."""

    @property
    def stepper(self) -> Stepper | None:
        """The stepper; None until it exists."""


_trainers: weakref.WeakKeyDictionary[ZeroRuntime, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def register_trainer(runtime: ZeroRuntime, trainer: Trainer) -> None:
    """Register the engine that steps the parameters of `runtime`."""
    _trainers[runtime] = weakref.ref(trainer)


class StateSlice(NamedTuple):
    """The elements of one parameter that an optimizer steps on this rank, and their state."""

    slot: Slot
    state: MutableMapping[str, Any]
    values: nn.Parameter
    """The tensor in the optimizer's param groups: a slice of a shard, or the whole parameter."""
    offset: int
    """The first of the elements, counted from the start of `values`."""
    start: int
    """The first of the elements, counted from the parameter's start in memory."""
    numel: int

    def is_elementwise(self, key: str) -> bool:
        """Return True if a value is kept for each element."""
        value = self.state[key]
        # The state of a 0-dim parameter is 0-dim, like a count of steps, which is not elementwise.
        alike = isinstance(value, Tensor) and value.shape == self.values.shape
        return alike and key != "step"

    def elements(self, key: str) -> Tensor:
        """Return these elements of a value, 1-D, in the parameter's memory order."""
        value: Tensor = self.state[key]
        flat = flattened(value, self.slot) if self._is_whole else value
        return flat[self.offset : self.offset + self.numel]

    def replace(self, key: str, elements: Tensor) -> None:
        """Replace these elements of a value by others, in the order of `elements`."""
        value: Tensor = self.state[key]
        if self._is_whole:
            value.copy_(shaped(elements, self.slot))
        else:
            value[self.offset : self.offset + self.numel].copy_(elements)

    @property
    def _is_whole(self) -> bool:
        return tuple(self.values.shape) == self.slot.shape


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter with its bucket, its keeper and its trainer."""

    bucket: Bucket
    index: int
    keeper: Keeper
    trainer: Trainer | None

    @property
    def slot(self) -> Slot:
        """The parameter's name, shape and offset in its bucket."""
        return self.bucket.layout.slots[self.index]

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the bucket."""
        return self.bucket.ranks

    @property
    def shards(self) -> Ranks:
        """The ranks over which one copy of the bucket is sharded."""
        return self.bucket.sharing.shards

    @property
    def gradient_factor(self) -> float:
        """The factor by which gradients are multiplied."""
        return 1.0 if self.trainer is None else self.trainer.gradient_factor

    @property
    def is_cut(self) -> bool:
        """True if masters and their gradients are sharded over the ranks."""
        return self.bucket.partition.optimizer or self.bucket.partition.weights

    def present(self, *, writes: bool = True) -> AbstractContextManager[None]:
        """Load shard, master and state of the bucket; writes in the block are kept."""
        if isinstance(self.keeper, ZeroRuntime):
            self.keeper.expect_here()
            self.keeper.bring_together()
        stepper = None if self.trainer is None else self.trainer.stepper
        if stepper is None or not self.bucket.trainable:
            return self.bucket.present(writes=writes)
        return stepper.present(self.bucket, writes=writes)

    # ---- values ----------------------------------------------------------------------------------

    def master(self) -> Tensor:
        """Return the exact values of the bucket's `span`, with the user's edits."""
        self.bucket.absorb_edits()
        master = self.bucket.master
        return self.bucket.shard if master is None else master

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the (start, stop) of a rank's fragment, counted from the parameter's start."""
        if not self.is_cut:
            return 0, self.slot.numel
        low, high = self.bucket.layout.span(rank)
        start = min(max(low - self.slot.offset, 0), self.slot.numel)
        return start, min(max(high - self.slot.offset, start), self.slot.numel)

    def cut(self, values: Tensor) -> Tensor:
        """Return this rank's fragment in `values`, laid out as the bucket's `span`: a 1-D view."""
        start, stop = self.bounds(self.shards.rank)
        first = self.slot.offset + start - self.bucket.span[0]
        return values[first : first + stop - start] if start < stop else values[:0]

    def fragment_of(self, full: Tensor) -> Tensor:
        """Return this rank's fragment in the parameter's own values, 1-D in memory order."""
        start, stop = self.bounds(self.shards.rank)
        return full[start:stop]

    def joined(self, mine: Tensor) -> Tensor:
        """Return the parameter's values on every rank, 1-D in memory order, from all fragments.

        If nothing is sharded they are rank 0's; if there are several copies, those of my copy.
        """
        label = f"the gather of {self.slot.name}"
        if not self.is_cut:
            full = mine.clone()
            broadcast_(full, 0, self.ranks, label)
            return full
        full = torch.empty(self.slot.numel, dtype=mine.dtype, device=mine.device)
        for rank in range(self.shards.size):
            start, stop = self.bounds(rank)
            if rank == self.shards.rank:
                full[start:stop].copy_(mine)
            broadcast_(full[start:stop], rank, self.shards, label)
        return full

    def alike(self, full: Tensor) -> Tensor:
        """Return `full` with the first copy's values in all copies."""
        replicas = self.bucket.sharing.replicas
        if replicas is not None:
            broadcast_(
                full, 0, replicas, f"the broadcast of the first copy's values of {self.slot.name}"
            )
        return full

    def own(self, value: object, shape: tuple[int, ...], name: str) -> Tensor:
        """Check a caller's value on all ranks, and return it on the bucket's device."""
        with raised_on_all(self.ranks, name, UsageError):
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise UsageError(
                    f"rank {self.ranks.rank}: {name} for {self.slot.name} expects a tensor of"
                    f" shape {shape}, got {found}"
                )
        given: Tensor = value
        return given.detach().to(self.bucket.device)

    def spread(self, value: object, name: str) -> Tensor:
        """Return rank 0's values of all ranks' argument, in fp32 or wider, 1-D in memory order."""
        precision = self.bucket.precision
        own = precision.master if self.bucket.trainable else precision.compute
        exact = torch.promote_types(own, torch.float32)
        whole = self.own(value, self.slot.shape, name).to(exact, copy=True)
        given = flattened(whole, self.slot).contiguous()
        broadcast_(given, 0, self.ranks, f"the broadcast of the new values of {self.slot.name}")
        return given

    def on_device(self, values: Tensor) -> Tensor:
        """Return values on the device, for the caller's computations."""
        return values.to(self.bucket.device)

    def shaped(self, values: Tensor) -> Tensor:
        """Return the parameter's values, 1-D in memory order, in its shape."""
        return shaped(values, self.slot)

    # ---- gradients -------------------------------------------------------------------------------

    def gradients(self) -> Gradients | None:
        """Return the gradients of the bucket, or None if no engine trains it."""
        if not isinstance(self.keeper, ZeroRuntime):
            return None
        if self.keeper.gathering.phase is not Phase.IDLE:
            raise UsageError(
                f"rank {self.ranks.rank}: the gradient of {self.slot.name} was requested inside"
                " forward or backward; request it between engine.backward(loss) and engine.step()"
            )
        return next((g for g in self.keeper.gradients if g.bucket is self.bucket), None)

    def agree_on(self, gradients: Gradients) -> tuple[bool, bool]:
        """Return if any rank has gradients since the last update, and any unreduced ones here."""
        assert isinstance(self.keeper, ZeroRuntime)  # it has gradients
        begun = any(g.state is not Arrival.EMPTY for g in self.keeper.gradients)
        report = torch.tensor([begun, gradients.waits], dtype=torch.uint8, device="cpu")
        max_(report, self.ranks, "the agreement on requested gradients")
        any_begun, any_waits = report.tolist()
        return bool(any_begun), bool(any_waits)

    # ---- the optimizer ---------------------------------------------------------------------------

    def state_slice(self) -> StateSlice | None:
        """Return the slice of the parameter that the optimizer steps on this rank, if any."""
        trainer, bucket = self.trainer, self.bucket
        if trainer is None or trainer.optimizer is None or not bucket.trainable:
            return None
        state = trainer.optimizer.state
        stepper = trainer.stepper
        whole = None if stepper is None else stepper.values_of(bucket.parameters[self.index])
        if whole is not None:
            return StateSlice(self.slot, state.get(whole, {}), whole, 0, 0, self.slot.numel)
        mine = self.cut(self.master())
        if not mine.numel():
            return None
        for group in trainer.optimizer.param_groups:
            for piece in group["params"]:
                offset = _offset_in(piece, mine)
                if offset is not None:
                    start = self.bounds(self.shards.rank)[0]
                    own = state.get(piece, {})
                    return StateSlice(self.slot, own, piece, offset, start, mine.numel())
        return None


def _offset_in(piece: Tensor, mine: Tensor) -> int | None:
    """Return the offset of `mine` in `piece`, in elements; None if it is in other memory."""
    if piece.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr():
        return None
    offset = (mine.data_ptr() - piece.data_ptr()) // mine.itemsize
    return offset if offset >= 0 and offset + mine.numel() <= piece.numel() else None


def place_of(param: nn.Parameter) -> Place | None:
    """Return a parameter's place; None if neither an engine nor `Init` holds it."""
    keeper = access.keeper_of(param)
    if keeper is None:
        return None
    bucket = keeper.bucket_of[param]
    trainer = _trainers.get(keeper) if isinstance(keeper, ZeroRuntime) else None
    return Place(bucket, bucket.index_of(param), keeper, None if trainer is None else trainer())


def held_place(param: nn.Parameter, name: str) -> Place:
    """Return the place of a parameter that the function `name` is about to change.

    Raises:
        UsageError: neither an engine nor `Init` holds it.
    """
    place = place_of(param)
    if place is None:
        raise UsageError(
            f"{name} got a parameter of shape {tuple(param.shape)} that no engine holds; change it"
            " in place"
        )
    return place


def exact(values: Tensor) -> Tensor:
    """Return floating-point values in fp32, or in their own dtype if that is wider."""
    if not values.is_floating_point():
        return values
    return values.to(torch.promote_types(values.dtype, torch.float32))
