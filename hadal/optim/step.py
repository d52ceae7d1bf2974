"""How an optimizer is stepped; elementwise ones on flat cuts, each byte read and written once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hadal.comm.pending import Pending
from hadal.device import has_fused_kernels, is_host_memory
from hadal.errors import NotBuiltYetError, OptimizerError
from hadal.offload.runs import RunCut
from hadal.optim.desk import Desks, blocks
from hadal.optim.elementwise import Beginner, ElementwiseOptimizer
from hadal.optim.fused import BEGINNERS
from hadal.optim.on_disk import (
    DiskSteps,
    PartBuffers,
    StateOnDisk,
    bring_weights_to_disk,
    step_on_disk,
)
from hadal.optim.pieces import Held, Piece, held_pieces, lay_pieces
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients

_DISK_STEPS = DiskSteps()


class Stepper(Protocol):
    """Steps an optimizer once per update and leaves the new weights in the buckets."""

    def step(self, multiplier: float) -> None:
        """Make one update with the mean gradients times `multiplier`."""

    def add(self, gradients: Sequence[Gradients], members: Sequence[nn.Parameter]) -> None:
        """Take up the buckets of the newest param group, whose parameters are `members`."""

    def values_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The whole values that stand for a parameter in the optimizer, if this rank owns them."""

    def held(self) -> Iterator[Held]:
        """All that the optimizer has in its param groups on this rank."""

    def present(self, bucket: Bucket, *, writes: bool = True) -> AbstractContextManager[None]:
        """Have a bucket's masters and state in memory; what is written into them is kept."""

    def at_rest(self, held: Held) -> Mapping[str, RunCut]:
        """Where state rests on the disk of what the optimizer has in its param groups, by key."""


class StepperInMemory:
    """What steppers share whose masters and state are in memory."""

    def present(self, bucket: Bucket, *, writes: bool = True) -> AbstractContextManager[None]:
        """Have a bucket's weights in memory too; what is written into them is kept."""
        return bucket.present(writes=writes)

    def at_rest(self, held: Held) -> Mapping[str, RunCut]:
        """Nothing: all state is in memory."""
        return {}


class FlatStepper:
    """Steps elementwise optimizers on flat cuts of the master: one tensor per group and bucket."""

    def __init__(
        self, optimizer: Optimizer, gradients: Sequence[Gradients], steps: DiskSteps = _DISK_STEPS
    ) -> None:
        self._optimizer = optimizer
        self._steps = steps
        self._part_buffers = PartBuffers()
        self._gradients: list[Gradients] = []
        self._pieces: dict[Gradients, list[Piece]] = {}
        self._on_disk: dict[Gradients, StateOnDisk] = {}
        self._state_guard: RemovableHandle | None = None
        for group in optimizer.param_groups:
            group["params"] = []
        self._take_up(gradients)

    def add(self, gradients: Sequence[Gradients], members: Sequence[nn.Parameter]) -> None:
        """Take up the buckets of the newest param group."""
        self._optimizer.param_groups[-1]["params"] = []
        self._take_up(gradients)

    def _take_up(self, gradients: Sequence[Gradients]) -> None:
        for one in gradients:
            bucket, disk = one.bucket, one.bucket.home.disk_of_state
            with bucket.present():
                self._pieces[one] = lay_pieces(self._optimizer, one)
                if disk is not None:
                    self._on_disk[one] = StateOnDisk(
                        self._optimizer, bucket, self._pieces[one], disk
                    )
        if self._on_disk and self._state_guard is None:
            self._state_guard = self._optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        self._gradients += gradients

    def step(self, multiplier: float) -> None:
        """Make one update with the mean gradients times `multiplier`.

        Raises:
            OffloadError: the disk failed, on some rank. Where masters rest on the disk nothing has
                changed then.
        """
        begin = _beginner_of(self._optimizer, self._gradients)
        if begin is None:
            refuse_other_state_dtype(self._optimizer, self._gradients)
            refuse_disk(self._optimizer, self._gradients)
            self._step_at_once(multiplier)
            return
        ordered = _in_order(self._gradients)
        ways = (one.bucket.start_sending() for one in ordered)
        # It follows what the device was given so far, and not the updates that it is given now.
        desks = Desks(multiplier, next(filter(None, ways), None))
        refreshing: list[Pending | None] = []
        if self._on_disk:
            on_disk = {one: self._on_disk[one] for one in ordered if one in self._on_disk}
            step_on_disk(on_disk, begin, desks, self._steps, self._part_buffers)
            refreshing += [one.bucket.start_refresh() for one in on_disk]
        in_memory = [one for one in ordered if one not in self._on_disk]
        if any(one.bucket.weights_on_disk for one in in_memory):
            bring_weights_to_disk(in_memory, lambda one: self._step_bucket(one, begin, desks))
            refreshing += [one.bucket.start_refresh() for one in in_memory]
        else:
            for one in in_memory:
                self._step_bucket(one, begin, desks)
                refreshing.append(one.bucket.start_refresh())
        # A scheduler that was made by torch asks whether the optimizer has stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        wait_all(refreshing)

    def values_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """None: the optimizer has flat cuts of the masters, and no parameter for itself."""
        return None

    def held(self) -> Iterator[Held]:
        """The flat cuts."""
        for one, pieces in self._pieces.items():
            yield from held_pieces(one.bucket, pieces)

    def at_rest(self, held: Held) -> Mapping[str, RunCut]:
        """Where state of a flat cut rests on the disk, by key."""
        for one, on_disk in self._on_disk.items():
            if one.bucket is held.bucket:
                piece = next(p for p in self._pieces[one] if p.values is held.values)
                return on_disk.cuts(piece)
        return {}

    @contextmanager
    def present(self, bucket: Bucket, *, writes: bool = True) -> Iterator[None]:
        """Have a bucket's masters and state in memory; what is written into them is kept."""
        on_disk = next((d for d in self._on_disk.values() if d.bucket is bucket), None)
        with bucket.present(writes=writes) if on_disk is None else on_disk.present(writes=writes):
            yield

    def _step_bucket(self, one: Gradients, begin: Beginner, desks: Desks) -> None:
        """Cast, scale, step and write back a cache-sized block at a time."""
        bucket = one.bucket
        desk = desks.on(bucket.steps_on)
        for piece in self._pieces[one]:
            values = piece.values.detach()
            zeros = partial(torch.zeros_like, values, dtype=bucket.precision.state_dtype)
            group = self._optimizer.param_groups[piece.group]
            update = begin(group, self._optimizer.state[piece.values], zeros)
            for start, stop in blocks(piece.start, piece.stop, desk.numel):
                cut = slice(start - piece.start, stop - piece.start)
                owned = [run[cut] for run in (values, *update.state)]
                desk.apply(update, one.mean[start:stop], owned)
                bucket.write_back(start, stop, desks.sending)

    def _step_at_once(self, multiplier: float) -> None:
        """Whatever does not step in blocks: its own `step`, once, on all pieces."""
        for one in self._gradients:
            for piece in self._pieces[one]:
                gradient = one.mean[piece.start : piece.stop].to(piece.values.dtype)
                # The mean itself may be scaled: it is not read again.
                piece.values.grad = gradient if multiplier == 1.0 else gradient.mul_(multiplier)
        self._optimizer.step()
        for piece in chain.from_iterable(self._pieces.values()):
            piece.values.grad = None
        refresh(self._gradients)


def _in_order(gradients: Sequence[Gradients]) -> list[Gradients]:
    """The order of an update's buckets: the same on all ranks.

    Those of a device come first: it makes them while the host makes the others. Of these, what
    backward has reached first comes first, as its gradients have landed first.
    """
    on_device = [one for one in gradients if not is_host_memory(one.bucket.steps_on)]
    return [*on_device, *(one for one in reversed(gradients) if one not in set(on_device))]


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise NotBuiltYetError(
        f"{type(optimizer).__name__}.state_dict() of state that rests on the disk is not built yet;"
        " save it by engine.save_checkpoint, or look at one parameter's by"
        " hadal.utils.safe_get_full_optimizer_state"
    )


def refuse_disk(optimizer: Optimizer, gradients: Sequence[Gradients]) -> None:
    """Raise `OptimizerError` where state should rest on the disk, but must be whole in memory."""
    if any(one.bucket.home.disk_of_state is not None for one in gradients):
        raise OptimizerError(
            f"{type(optimizer).__name__} works on all its state at once, and"
            ' zero_optimization.offload_optimizer.device "nvme" keeps it on the disk; choose Adam,'
            " AdamW, Lion, Adagrad or SGD (without step hooks, and without foreach or capturable),"
            ' or device "cpu"'
        )


def refuse_other_state_dtype(optimizer: Optimizer, gradients: Sequence[Gradients]) -> None:
    """Raise `OptimizerError` where state should not be kept in the master's dtype, but must be."""
    for one in gradients:
        precision = one.bucket.precision
        if precision.state_dtype != precision.master:
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps its state in the dtype of the master"
                f" ({precision.master}), and the configuration asks for {precision.state_dtype};"
                " choose Adam, AdamW, Lion, Adagrad or SGD (without step hooks, and without"
                " foreach or capturable), or one dtype for both"
            )


def _beginner_of(optimizer: Optimizer, gradients: Sequence[Gradients]) -> Beginner | None:
    """What steps this optimizer in blocks, if that does exactly what its own step would do."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    if isinstance(optimizer, ElementwiseOptimizer):
        return optimizer.begin
    begin = BEGINNERS.get(type(optimizer))
    fits = all(_is_fused(group) for group in optimizer.param_groups)
    has_kernels = all(has_fused_kernels(one.bucket.steps_on) for one in gradients)
    return begin if fits and has_kernels else None


def _is_fused(group: dict[str, Any]) -> bool:
    """Whether a group asks for no other implementation than torch's fused one."""
    if group.get("capturable"):
        return False
    return bool(group.get("fused")) or (group.get("fused") is None and not group.get("foreach"))


def refresh(gradients: Iterable[Gradients]) -> None:
    """Put masters that were stepped anywhere into the weights, and gather these where asked."""
    stepped = list(gradients)
    bring_weights_to_disk(stepped, _write_all_back)
    wait_all([one.bucket.start_refresh() for one in stepped])


def _write_all_back(one: Gradients) -> None:
    one.bucket.write_back(0, one.bucket.span[1] - one.bucket.span[0])


def wait_all(pendings: Iterable[Pending | None]) -> None:
    """Wait for every collective that was started; None stands for one that was not needed."""
    for pending in pendings:
        if pending is not None:
            pending.wait()


@contextmanager
def as_one_step(optimizer: Optimizer) -> Iterator[None]:
    """Around an update that is not made by the optimizer's own `step`: whoever watches that hears.

    The user's step hooks are called, and a scheduler of torch's learns that there was a step.
    """
    for before in [*optimizer._optimizer_step_pre_hooks.values()]:
        before(optimizer, (), {})
    yield
    optimizer._opt_called = True  # type: ignore[attr-defined]
    for after in [*optimizer._optimizer_step_post_hooks.values()]:
        after(optimizer, (), {})
