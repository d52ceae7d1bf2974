"""Steppers: one update of an optimizer; elementwise ones read and write each byte once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.config.optimizer import in_blocks
from hadal.device import has_fused_kernels, is_host_memory
from hadal.errors import OptimizerError
from hadal.offload.buffers import BufferPool
from hadal.offload.crossing import Crossing
from hadal.offload.direct import cut
from hadal.offload.tensors import StoredSlice
from hadal.optim.elementwise import (
    BEGINNERS,
    Beginner,
    ElementwiseOptimizer,
    Group,
    SliceUpdate,
    count_up,
)
from hadal.optim.on_disk import (
    Deferred,
    DiskSteps,
    KeptPool,
    bring_weights_to_disk,
    rewriting_in_turn,
    step_on_disk,
    update_on_disk,
    walk_whole,
)
from hadal.optim.pieces import HeldTensor, Piece, lay_pieces
from hadal.optim.state_on_disk import DiskState, DiskStates
from hadal.optim.whole import WholeParameters, hand_over
from hadal.optim.workspace import Item, Multiplier, Workspace, block_numel, scale_
from hadal.zero.bucket import Bucket, refresh_all, write_back_all
from hadal.zero.gradients import Gradients
from hadal.zero.sharing import ModelParts

_R = TypeVar("_R")
DISK_STEPS = DiskSteps()
# The update of a parameter depends only on that parameter's gradient and state. Subclasses are not
# trusted: they may override the update.
_ONE_BY_ONE = frozenset({torch.optim.Adafactor, torch.optim.Muon})


class OptimizerStepper(ABC):
    """A stepper: it steps an optimizer once per update and leaves new weights in the buckets.

    It owns the tensors in the optimizer's param groups, and their state. The tensors are flat
    slices of masters, one per group and bucket, or whole parameters (see `WholeParameters`) for
    groups selected by `_is_whole`. Masters and state may be on a disk.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Gradients],
        parameters: Sequence[Sequence[nn.Parameter]] | None = None,
        steps: DiskSteps = DISK_STEPS,
        parts: ModelParts | None = None,
    ) -> None:
        self._optimizer, self._parts = optimizer, parts
        self._steps = steps
        self._pool_of: KeptPool = lru_cache(maxsize=1)(BufferPool)
        self._gradients: list[Gradients] = []
        self._pieces: dict[Gradients, list[Piece]] = {}
        self._wholes = WholeParameters(optimizer)
        self._disk_states = DiskStates(optimizer)
        groups = range(len(optimizer.param_groups))
        self._take_up(gradients, groups, parameters or [()] * len(groups))

    @abstractmethod
    def step(self, multiplier: Multiplier) -> None:
        """Make one update with the mean gradients times `multiplier`."""

    def add(self, gradients: Sequence[Gradients], members: Sequence[nn.Parameter]) -> None:
        """Add the buckets of the newest param group, whose parameters are `members`."""
        self._take_up(gradients, [len(self._optimizer.param_groups) - 1], [members])

    def expect_same_groups(self) -> None:
        """Expect the param groups, and the tensors in them, as this stepper has made them.

        Raises:
            OptimizerError: the program has edited them, which no update would follow.
        """
        self._expect_same_memory()
        now = self._members_now()
        if now == self._members:
            return
        if len(now) != len(self._members):
            found = f"has {len(now)} param groups, expected {len(self._members)}"
        else:
            pairs = enumerate(zip(now, self._members, strict=True))
            number = next(index for index, (mine, laid) in pairs if mine != laid)
            found = (
                f'has other tensors in param_groups[{number}]["params"] than the engine put there'
            )
        raise OptimizerError(
            f"the optimizer {found}: the program edited the list, and no update would follow."
            " Add parameters by optimizer.add_param_group, exclude them from updates by"
            " requires_grad_(False) before initialize, and set only options (lr, weight_decay, ...)"
            " of a group in place"
        )

    def _expect_same_memory(self) -> None:
        """Raise `OptimizerError` if a flat slice is no longer a view of its master."""
        for one, pieces in self._pieces.items():
            stored = one.bucket.stored_master
            if stored is None or not stored.is_present:
                continue
            for piece in pieces:
                place = stored.values[piece.start : piece.stop]
                if piece.values.data_ptr() != place.data_ptr():
                    raise OptimizerError(
                        f'the program replaced .data of a tensor in param_groups[{piece.group}]["'
                        "params\"]: the tensors there are slices of this rank's masters, and no"
                        " update would follow. Change the model's parameters instead, inside `with"
                        " hadal.zero.GatheredParameters(parameters, modifier_rank=0):`"
                    )

    def values_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return a parameter's whole values in the optimizer if this rank owns them, else None."""
        return self._wholes.values.get(parameter)

    def held(self) -> Iterator[HeldTensor]:
        """Yield all tensors in the optimizer's param groups on this rank."""
        yield from self._wholes.held()
        for one, pieces in self._pieces.items():
            for piece in pieces:
                start = one.bucket.span[0] + piece.start
                yield HeldTensor(piece.values, one.bucket, start, piece.group, None)

    def present(self, bucket: Bucket, *, writes: bool = True) -> AbstractContextManager[None]:
        """Hold a bucket's masters and state in memory in a block; changes are kept."""
        state = self._disk_states.of(bucket)
        return bucket.present(writes=writes) if state is None else state.present(writes=writes)

    def slices(self, held: HeldTensor) -> Mapping[str, StoredSlice]:
        """Return the state on the disk, by key, of a tensor in the optimizer's param groups."""
        state = self._disk_states.of(held.bucket)
        return {} if state is None else state.slices(held)

    def _is_whole(self, group: int) -> bool:
        """Return whether a param group's parameters are stepped whole."""
        return False

    def _take_up(
        self,
        gradients: Sequence[Gradients],
        groups: Sequence[int],
        parameters: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        self._gradients += gradients
        self._wholes.add(gradients, self._is_whole)
        for number, members in zip(groups, parameters, strict=True):
            group = self._optimizer.param_groups[number]
            if self._is_whole(number):
                hand_over(self._optimizer, group, members, self._wholes)
            else:
                group["params"] = []
        for one in gradients:
            has_flat = not all(self._is_whole(slot.group) for slot in one.bucket.layout.slots)
            with one.bucket.present() if has_flat else nullcontext():
                self._pieces[one] = self._lay(one) if has_flat else []
                pieces = [*self._pieces[one], *self._wholes.pieces(one)]
                self._disk_states.put(one.bucket, pieces)
        self.bring_values()
        self._members = self._members_now()

    def bring_values(self) -> None:
        """Put new masters into the whole parameters, which a program may read before an update.

        All ranks must call it.
        """
        if not self._on_disk():
            self._wholes.bring_values()

    def _members_now(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _lay(self, one: Gradients) -> list[Piece]:
        return lay_pieces(self._optimizer, one, lambda group: not self._is_whole(group))

    def _group(self, piece: Piece) -> Group:
        return self._optimizer.param_groups[piece.group]

    def _begun(self, one: Gradients, piece: Piece, begin: Beginner) -> SliceUpdate:
        """Begin the update of a piece that is in memory."""
        dtype = one.bucket.precision.state_dtype
        zeros = partial(torch.zeros_like, piece.values.detach(), dtype=dtype)
        return begin(self._group(piece), self._optimizer.state[piece.values], zeros)

    def _on_disk(self) -> dict[Gradients, DiskState]:
        """Return the buckets whose state is on the disk, with that state."""
        pairs = ((one, self._disk_states.of(one.bucket)) for one in self._gradients)
        return {one: state for one, state in pairs if state is not None}

    def change(self, method: Callable[[], _R]) -> _R:
        """Call a method of the optimizer that may change values, and refresh the weights.

        All ranks must call it. The method has no gradients.

        Raises:
            OffloadError: the disk failed on some rank; nothing has changed on any rank.
        """
        returned: list[_R] = []
        self._step_whole_buckets(None, lambda _: returned.append(method()))
        return returned[0]

    def _step_whole_buckets(
        self,
        multiplier: Multiplier | None,
        step: Callable[[Sequence[Gradients]], None],
        *,
        at_once: bool = True,
    ) -> None:
        """Make one update. All ranks must call it.

        `multiplier` is that of the gradients; None: there are none. `step` updates some buckets'
        tensors in the optimizer, once masters, state and the gradients of whole parameters are in
        memory: all buckets, or, if they are on the disk and `at_once` is false, one at a time.

        Raises:
            OffloadError: the disk failed on some rank; nothing has changed on any rank.
        """
        on_disk, wholes = self._on_disk(), self._wholes
        if not on_disk:
            wholes.to_owners(multiplier)
            step(self._gradients)
            wholes.to_shards()
            refresh(self._gradients)
            return
        batches = [[*on_disk]] if at_once else [[one] for one in on_disk]
        states = [[on_disk[one] for one in batch] for batch in batches]
        sending, deferred = sending_of(on_disk), Deferred()
        with (
            update_on_disk([*on_disk.values()]),
            wholes.without_gradients_after(),
            rewriting_in_turn() as rewriting,
            closing(walk_whole(states, self._steps)) as walked,
        ):
            for batch in batches:
                found = deferred.run(partial(next, walked))
                if found is None:  # arbitrary values will do, as the update will be rolled back
                    found = [_nothing_like(one.bucket) for one in batch]
                masters = dict(zip(batch, found, strict=True))
                deferred.run(partial(_absorb_edits, masters))
                wholes.to_owners(multiplier, masters)
                deferred.run(partial(step, batch))
                wholes.to_shards(masters)
                deferred.run(partial(_put_weights, masters, rewriting, sending))
            deferred.run(partial(next, walked, None))
            deferred.tell()
        refresh_all([one.bucket for one in on_disk])


def sending_of(gradients: Iterable[Gradients]) -> Crossing | None:
    """Return the path of new weights to the device, if any bucket is updated on the host.

    It follows the device's work so far, but not the updates that start now.
    """
    ways = (one.bucket.start_sending() for one in gradients)
    return next(filter(None, ways), None)


def _nothing_like(bucket: Bucket) -> Tensor:
    return torch.zeros(bucket.span[1] - bucket.span[0], dtype=bucket.precision.master)


def _absorb_edits(masters: Mapping[Gradients, Tensor]) -> None:
    for one, master in masters.items():
        one.bucket.absorb_edits_into(master, 0)


def _put_weights(
    masters: Mapping[Gradients, Tensor],
    rewriting: Callable[[Bucket], None],
    sending: Crossing | None,
) -> None:
    for one, master in masters.items():
        rewriting(one.bucket)
        one.bucket.put_weights(0, master, sending)


class WholeStepper(OptimizerStepper):
    """A stepper of optimizers that need whole parameters in their shapes (Adafactor, ...).

    It calls the optimizer's own `step` once per update, on the parameters that this rank owns. If
    state is on the disk, and a parameter's update is known not to depend on others, it calls it
    once per bucket.
    """

    def _is_whole(self, group: int) -> bool:
        return True

    def step(self, multiplier: Multiplier) -> None:
        """Make one update with the mean gradients times `multiplier`.

        Raises:
            OffloadError: the disk failed on some rank; nothing has changed on any rank.
        """
        optimizer = self._optimizer
        at_once = type(optimizer) not in _ONE_BY_ONE or has_step_hooks(optimizer)
        self._step_whole_buckets(multiplier, lambda _: optimizer.step(), at_once=at_once)


class FlatStepper(OptimizerStepper):
    """A stepper of elementwise optimizers on flat slices of the master, in blocks if possible."""

    @property
    def steps_in_blocks(self) -> bool:
        """True if `step` updates masters block by block, and looks for edits in each."""
        return _beginner_of(self._optimizer, self._gradients) is not None

    @property
    def may_skip_on_device(self) -> bool:
        """True if `step` accepts a flag on the device for the next update.

        Only updates in blocks read it, and only for existing state: a skipped first update must not
        create any.
        """
        optimizer = self._optimizer
        if _beginner_of(optimizer, self._gradients) is None:
            return False
        on_device = {one.bucket.steps_on for one in self._gradients}
        if len(on_device) != 1 or is_host_memory(*on_device):
            return False
        is_plain = not any(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups)
        pieces = (piece for pieces in self._pieces.values() for piece in pieces)
        stateless = {n for n, g in enumerate(optimizer.param_groups) if g.get("momentum") == 0}
        return is_plain and all(p.group in stateless or optimizer.state[p.values] for p in pieces)

    def step(self, multiplier: Multiplier, overflowed: Tensor | None = None) -> None:
        """Make one update with the mean gradients times `multiplier`.

        `overflowed` is a flag on the device: if it is 1, nothing changes; see `may_skip_on_device`.

        Raises:
            OffloadError: the disk failed on some rank. If masters are on the disk, nothing has
                changed.
        """
        begin = _beginner_of(self._optimizer, self._gradients)
        if begin is None:
            refuse_other_state_dtype(self._optimizer, self._gradients)
            refuse_disk_beside_memory(self._optimizer, self._gradients)
            at_once = has_step_hooks(self._optimizer)  # they may read everything
            self._step_whole_buckets(
                multiplier, partial(self._step_pieces, multiplier), at_once=at_once
            )
            return
        ordered = _in_order(self._gradients)
        workspace = Workspace(multiplier, sending_of(ordered), overflowed)
        known = self._on_disk()
        on_disk = {one: known[one] for one in ordered if one in known}
        if on_disk:
            step_on_disk(on_disk, begin, workspace, self._steps, self._pool_of)
            for one in on_disk:
                one.bucket.start_refresh()
        in_memory = [one for one in ordered if one not in on_disk]
        if any(one.bucket.disk_weights is not None for one in in_memory):
            bring_weights_to_disk(
                in_memory, lambda one: self._step_buckets([one], begin, workspace)
            )
            for one in in_memory:
                one.bucket.start_refresh()
        else:
            for some in _together(in_memory):
                self._step_buckets(some, begin, workspace)
                for one in some:
                    one.bucket.start_refresh()
        if overflowed is not None:
            self._uncount(overflowed)
        # torch's schedulers check whether the optimizer has stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        for one in ordered:
            one.bucket.overlap_refresh()

    def _uncount(self, overflowed: Tensor) -> None:
        """Subtract the update from the step counts if the kernels have skipped it."""
        states = (self._optimizer.state[p.values] for ps in self._pieces.values() for p in ps)
        counts = [state["step"] for state in states if "step" in state]
        if counts:
            # A list, as torch would read a single tensor on the host.
            torch._foreach_sub_(counts, [overflowed.to(torch.float32)] * len(counts))

    def _step_buckets(
        self, gradients: Sequence[Gradients], begin: Beginner, workspace: Workspace
    ) -> None:
        """Cast, scale, step and write back: a cache-sized block at a time, or several buckets."""
        begun = [
            (one, piece, self._begun(one, piece, begin))
            for one in gradients
            for piece in self._pieces[one]
        ]
        count_up(update for *_, update in begun)
        if len(gradients) > 1:
            workspace.apply(
                [_item(one, piece, update, piece.start, piece.stop) for one, piece, update in begun]
            )
            write_back_all([(one.bucket, piece.start, piece.stop) for one, piece, _ in begun])
            return
        numel = block_numel(gradients[0].bucket.steps_on)
        for one, piece, update in begun:
            bucket = one.bucket
            for start, stop in cut(piece.start, piece.stop, numel):
                item = _item(one, piece, update, start, stop)
                if is_host_memory(bucket.device):
                    bucket.absorb_edits_into(item.owned[0], start)
                workspace.apply([item])
                bucket.write_back(start, stop, workspace.sending)

    def _step_pieces(self, multiplier: Multiplier, gradients: Iterable[Gradients]) -> None:
        """Call the optimizer's own `step` on the flat slices of these buckets."""
        stepped = []
        for one in gradients:
            for piece in self._pieces[one]:
                gradient = one.mean[piece.start : piece.stop].to(piece.values.dtype)
                # The mean itself may be scaled: it is not read again.
                is_one = not isinstance(multiplier, Tensor) and multiplier == 1.0
                piece.values.grad = gradient if is_one else scale_(gradient, multiplier)
                stepped.append(piece)
        try:
            self._optimizer.step()
        finally:
            for piece in stepped:
                piece.values.grad = None


def _item(one: Gradients, piece: Piece, update: SliceUpdate, start: int, stop: int) -> Item:
    """Return the block of a piece between these elements of the span."""
    cut = slice(start - piece.start, stop - piece.start)
    owned = [run[cut] for run in (piece.values.detach(), *update.state)]
    return Item(update, one.mean[start:stop], owned)


def _together(gradients: Iterable[Gradients]) -> Iterator[list[Gradients]]:
    """Yield groups of buckets that one kernel updates: on an accelerator up to a block's elements.

    A larger bucket keeps it busy alone, and its refresh starts while the next ones are updated. On
    a CPU a block should fit in the cache.
    """
    some: list[Gradients] = []
    numel = 0
    for one in gradients:
        device, (start, stop) = one.bucket.steps_on, one.bucket.span
        room = 0 if is_host_memory(device) else block_numel(device)
        if some and (some[0].bucket.steps_on != device or numel + stop - start > room):
            yield some
            some, numel = [], 0
        some.append(one)
        numel += stop - start
    if some:
        yield some


def _in_order(gradients: Sequence[Gradients]) -> list[Gradients]:
    """Return an update's buckets in order, which is the same on all ranks.

    Those of a device come first: it updates them while the host updates the others. Among the
    host's, those that backward reached first come first, as their gradients arrived first.
    """
    on_device = [one for one in gradients if not is_host_memory(one.bucket.steps_on)]
    return [*on_device, *(one for one in reversed(gradients) if one not in set(on_device))]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether the user has registered step hooks."""
    before = optimizer._optimizer_step_pre_hooks.values()
    own = sum(getattr(hook, "__module__", "").startswith("hadal.") for hook in before)
    return len(before) > own or bool(optimizer._optimizer_step_post_hooks)


def refuse_disk(optimizer: Optimizer, gradients: Sequence[Gradients]) -> None:
    """Raise `OptimizerError` if state is configured on the disk but must be in memory."""
    if any(one.bucket.offload.disk_of_state is not None for one in gradients):
        raise OptimizerError(
            f"{type(optimizer).__name__} keeps its state in memory, but"
            ' zero_optimization.offload_optimizer.device "nvme" puts it on the disk; use'
            ' another optimizer, or device "cpu"'
        )


def refuse_disk_beside_memory(optimizer: Optimizer, gradients: Sequence[Gradients]) -> None:
    """Raise `OptimizerError` if an update of state in two tiers could not be rolled back."""
    rests = [one.bucket.offload.disk_of_state is not None for one in gradients]
    if any(rests) and not all(rests):
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot be combined with"
            ' zero_optimization.offload_optimizer.device "nvme" and a ratio below 1: if the disk'
            f" failed, state in memory could not be rolled back; set ratio 1, or use"
            f" {in_blocks('or')} (without step hooks, and without foreach or capturable)"
        )


def refuse_other_state_dtype(optimizer: Optimizer, gradients: Sequence[Gradients]) -> None:
    """Raise `OptimizerError` if state must have the master's dtype but is configured otherwise."""
    for one in gradients:
        precision = one.bucket.precision
        if precision.state_dtype != precision.master:
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps its state in the dtype of the master"
                f" ({precision.master}), but the configuration requires {precision.state_dtype};"
                f" use {in_blocks('or')} (without step hooks, and without foreach or capturable),"
                " or one dtype for both"
            )


def _beginner_of(optimizer: Optimizer, gradients: Sequence[Gradients]) -> Beginner | None:
    """Return the function that steps an optimizer in blocks exactly as its own step, or None."""
    if has_step_hooks(optimizer):
        return None
    if isinstance(optimizer, ElementwiseOptimizer):
        return optimizer.begin
    begin = BEGINNERS.get(type(optimizer))
    fits = all(_is_fused(group) for group in optimizer.param_groups)
    has_kernels = all(has_fused_kernels(one.bucket.steps_on) for one in gradients)
    return begin if fits and has_kernels else None


def _is_fused(group: dict[str, Any]) -> bool:
    """Return whether a group allows torch's fused implementation."""
    if group.get("capturable"):
        return False
    return bool(group.get("fused")) or (group.get("fused") is None and not group.get("foreach"))


def refresh(gradients: Iterable[Gradients]) -> None:
    """Write stepped masters back into the weights, and gather these if required."""
    stepped = list(gradients)
    bring_weights_to_disk(stepped, lambda one: one.bucket.write_back())
    refresh_all([one.bucket for one in stepped])


@contextmanager
def as_one_step(optimizer: Optimizer) -> Iterator[None]:
    """Make an update in the block look like a call of the optimizer's own `step`.

    The user's step hooks are called, and torch's schedulers see that there was a step.
    """
    for before in [*optimizer._optimizer_step_pre_hooks.values()]:
        before(optimizer, (), {})
    yield
    optimizer._opt_called = True  # type: ignore[attr-defined]
    for after in [*optimizer._optimizer_step_post_hooks.values()]:
        after(optimizer, (), {})
