"""Lamb (You et al. 2020): Adam with each parameter's step scaled to the norm of its weights.

For a parameter w with the moments m and v of its gradient,

    update = m / (sqrt(v) + eps) + weight_decay * w
    ratio  = ||w|| / ||update||, clamped to [min_coeff, max_coeff]; 1 if either norm is 0
    w     -= rate * ratio * update

The moments start at zero, which `bias_correction` corrects in one of two places. In the rate, as
DeepSpeed does: rate = lr * sqrt(1 - beta2^t) / (1 - beta1^t) in update t. Or in the moments, as in
the paper: m / (1 - beta1^t) and v / (1 - beta2^t), with rate = lr. The ratio cancels a factor of
the whole update, so only the former makes the first steps shorter.

The norms are those of whole parameters. If these are sharded, each rank adds up the squares of its
own fragments, and one small sum over the ranks serves all parameters of an update; so does a
second one, over the ranks with the parts of one model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.collectives import sum_
from hadal.comm.faults import is_same_everywhere
from hadal.device import on_device, widest_float
from hadal.errors import MismatchError, OptimizerError, expect_one_of
from hadal.offload.crossing import Crossing
from hadal.offload.direct import cut
from hadal.offload.tensors import DiskTensor, Stop
from hadal.optim.elementwise import Group, OwnOptimizer, SliceUpdate, State, Zeros
from hadal.optim.on_disk import (
    Deferred,
    begin_on_disk,
    of_piece,
    rewriting_in_turn,
    update_on_disk,
    walk_parts,
)
from hadal.optim.pieces import Piece
from hadal.optim.state_on_disk import DiskState
from hadal.optim.step import OptimizerStepper, as_one_step, refresh, sending_of
from hadal.optim.workspace import Multiplier, block_numel, scale_
from hadal.zero.bucket import refresh_all
from hadal.zero.gradients import Gradients
from hadal.zero.layout import Fragment
from hadal.zero.sharing import Sharing, is_model_part

_PLACES = ("rate", "moments")


class Lamb(OwnOptimizer):
    """Lamb over whole parameters; an engine steps the same numbers on flat shards.

    State of each tensor: `exp_avg` and `exp_avg_sq` (its shape and dtype), and `step`.

    Raises:
        OptimizerError: `amsgrad` is given, which Lamb does not support, or an unknown
            `bias_correction_in`.
    """

    def __init__(  # noqa: PLR0913 - one argument for each key of its section
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        bias_correction_in: str = "rate",
    ) -> None:
        if amsgrad:
            raise OptimizerError("Lamb does not support amsgrad; remove it or set it to false")
        what = "Lamb's bias_correction_in"
        expect_one_of(_PLACES, what, bias_correction_in, OptimizerError)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "bias_correction_in": bias_correction_in,
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self.ratios: dict[nn.Parameter | None, Tensor] = {}
        """Ratios of the last update, by parameter; those of a stepper are one tensor."""

    def get_lamb_coeffs(self) -> list[float]:
        """Return each parameter's ratio in the last update; programs record their distribution."""
        return [ratio for found in self.ratios.values() for ratio in found.flatten().tolist()]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a loaded state; one that does not say where it was corrected is as by default."""
        super().__setstate__({"ratios": {}, **state})
        for group in self.param_groups:
            group.setdefault("bias_correction_in", "rate")

    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter."""
        own = parameter.detach()
        state = self.state[parameter]
        values = _Values(own, *_begin(group, state, partial(torch.zeros_like, own)).state)
        count = float(state["step"])
        _learn([values], [gradient], group)
        (update,) = updates = _updates([values], group, count)
        norms = _Norms(own.device)
        norms.add([0], [own], updates)
        self.ratios[parameter] = ratio = _trust_ratios(norms.square_sums(1), [group])[0]
        own.addcmul_(update, ratio.to(update.dtype), value=-_rate(group, count))


class _Values(NamedTuple):
    """A slice of master values with its two moments: tensors of one shape and dtype."""

    master: Tensor
    first: Tensor
    second: Tensor

    def cut(self, start: int, stop: int) -> _Values:
        """Return elements [start, stop)."""
        return _Values(*(values[start:stop] for values in self))


_Begun = tuple[Piece, SliceUpdate, list[DiskTensor]]
"""A begun update of a piece, with the first and second moments on the disk."""


def _begin(group: Group, state: State, zeros: Zeros) -> SliceUpdate:
    """Begin an update of a tensor's moments, created on first use, and count it."""
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = zeros()
        state["exp_avg_sq"] = zeros()
    state["step"] += 1
    return SliceUpdate((state["exp_avg"], state["exp_avg_sq"]), number=state["step"])


def _learn(blocks: Sequence[_Values], gradients: Sequence[Tensor], group: Group) -> None:
    """Update the moments with gradients."""
    _, first, second = (list(each) for each in zip(*blocks, strict=True))
    (beta1, beta2), given = group["betas"], list(gradients)
    torch._foreach_mul_(first, beta1)
    torch._foreach_add_(first, given, alpha=1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, given, given, value=1 - beta2)


def _updates(blocks: Sequence[_Values], group: Group, count: float) -> list[Tensor]:
    """Return the updates before scaling; `count` updates are in the moments."""
    master, first, second = (list(each) for each in zip(*blocks, strict=True))
    is_corrected = group["bias_correction"] and group["bias_correction_in"] == "moments"
    share1, share2 = _shares(group, count) if is_corrected else (1.0, 1.0)
    update = list(torch._foreach_div(first, share1))
    divisor = list(torch._foreach_div(second, share2))
    if group["eps_inside_sqrt"]:
        torch._foreach_add_(divisor, group["eps"])
        torch._foreach_sqrt_(divisor)
    else:
        torch._foreach_sqrt_(divisor)
        torch._foreach_add_(divisor, group["eps"])
    torch._foreach_div_(update, divisor)
    if group["weight_decay"]:
        torch._foreach_add_(update, master, alpha=group["weight_decay"])
    return update


def _rate(group: Group, count: float) -> float:
    """Return the learning rate of an update; `count` updates are in the moments."""
    rate: float = group["lr"]
    if group["bias_correction"] and group["bias_correction_in"] == "rate":
        share1, share2 = _shares(group, count)
        rate = rate * sqrt(share2) / share1
    return rate


def _shares(group: Group, count: float) -> tuple[float, float]:
    """Return the shares of the gradients' moments that `count` updates have learned from zero."""
    beta1, beta2 = group["betas"]
    return 1 - beta1**count, 1 - beta2**count


class _Norms:
    """The norms of blocks and of their updates, each with the row of its parameter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[int] = []
        self._found: list[Tensor] = []

    def add(self, rows: Sequence[int], masters: list[Tensor], updates: list[Tensor]) -> None:
        """Add blocks of one dtype, each of one parameter."""
        exact = torch.promote_types(masters[0].dtype, torch.float32)
        found = torch._foreach_norm([*masters, *updates], 2, dtype=exact)
        # Some buckets may be updated on the host and others on the device.
        self._found.append(torch.stack(list(found)).view(2, -1).to(self._device))
        self._rows += rows

    def square_sums(self, count: int) -> Tensor:
        """Return (count, 2) sums of squares: of each parameter's blocks, and of their updates."""
        wide = widest_float(self._device)
        none = torch.zeros(1, 2, dtype=wide, device=self._device)
        if not self._rows:
            return none.expand(count, 2).clone()
        squares = torch.cat(self._found, 1).to(wide).square().mT.split(1)
        sums = [none] * count
        for row, square in zip(self._rows, squares, strict=True):
            sums[row] = square if sums[row] is none else sums[row] + square
        return torch.cat(sums)


def _trust_ratios(sums: Tensor, groups: Sequence[Group]) -> Tensor:
    """Return (parameters,) ratios from (parameters, 2) sums of squares: weights, updates."""
    weights, updates = sums.sqrt().unbind(1)
    # Bounds are passed as numbers: a tensor of them would make the host wait for an accelerator.
    bounds = [(group["min_coeff"], group["max_coeff"]) for group in groups]
    runs = [(bound, len([*same])) for bound, same in groupby(bounds)]
    parts = (weights / updates).split([count for _, count in runs])
    ratios = torch.cat([part.clamp(*bound) for part, (bound, _) in zip(parts, runs, strict=True)])
    return torch.where((weights > 0) & (updates > 0), ratios, 1.0)


@dataclass(frozen=True, slots=True)
class _StepSlice:
    """The elements of a piece that are in memory in an update."""

    values: _Values
    start: int
    """The first element, counted from the span's start."""
    fragments: Sequence[Fragment]
    """The fragments of parameters in it."""
    first_row: int
    """The row of norms of the bucket's first parameter."""
    group: Group
    updates: float
    """The number of updates in the moments, with this one."""

    def batches(self) -> Iterator[list[tuple[int, int, _Values]]]:
        """Yield batches of blocks of parameters, each with its row of norms and start in the span.

        On a CPU a batch is one block, which stays in the cache; on an accelerator it has up to the
        elements of the largest block, so that few kernels are launched.
        """
        device = self.values.master.device
        numel, total, batch = block_numel(device), 0, list[tuple[int, int, _Values]]()
        for part in self.fragments:
            row, first = self.first_row + part.slot, self.start + part.offset
            for low, high in cut(first, first + part.numel, numel):
                total += high - low
                if batch and (device.type == "cpu" or total > numel):
                    yield batch
                    total, batch = high - low, []
                batch.append((row, low, self.values.cut(low - self.start, high - self.start)))
        if batch:
            yield batch

    def learn(self, mean: Tensor, multiplier: Multiplier, norms: _Norms) -> None:
        """Update moments with gradients (`mean` is laid out like the span), and add the norms."""
        for batch in self.batches():
            rows, starts, values = zip(*batch, strict=True)
            first, stop = starts[0], starts[-1] + values[-1].master.numel()
            whole = scale_(mean[first:stop].to(values[0].master.dtype, copy=True), multiplier)
            gradients = [whole[low - first :][: own.master.numel()] for _, low, own in batch]
            _learn(values, gradients, self.group)
            updates = _updates(values, self.group, self.updates)
            norms.add(rows, [own.master for own in values], updates)

    def step(self, ratios: Tensor) -> None:
        """Make the update of each parameter, scaled by its ratio."""
        ratios, rate = ratios.to(self.values.master), _rate(self.group, self.updates)
        for batch in self.batches():
            updates = _updates([own for *_, own in batch], self.group, self.updates)
            for (row, _, own), update in zip(batch, updates, strict=True):
                own.master.addcmul_(update, ratios[row], value=-rate)


@contextmanager
def _chosen(sums: Tensor, rows: Sequence[int]) -> Iterator[Tensor]:
    """Yield these rows, all of them in place; else a copy, which is written back."""
    if len(rows) == len(sums):
        yield sums
        return
    places = on_device(torch.tensor(rows, dtype=torch.long, device="cpu"), sums.device)
    some = sums[places]
    yield some
    sums[places] = some


class LambStepper(OptimizerStepper):
    """A stepper of Lamb on flat slices of the master, in blocks.

    The update is computed twice, for its norm and for the step itself: keeping it in between would
    move the same bytes and take the memory of a third moment. So state on a disk is read twice: the
    first pass writes the moments, the second the masters.
    """

    _optimizer: Lamb

    def __init__(self, *given: Any) -> None:
        self._first_rows: dict[Gradients, int] = {}
        """The row of each bucket's first parameter."""
        self._groups: list[int] = []
        """The param group of each row; there is a row per parameter, the same on every rank."""
        self._cut_rows: dict[int, str] = {}
        """The rows of parameters that are sharded over the model's parts, with their names."""
        self._are_agreed = False
        """True once the parts are known to have the same such rows."""
        super().__init__(*given)

    def _lay(self, one: Gradients) -> list[Piece]:
        slots, first = one.bucket.layout.slots, len(self._groups)
        self._first_rows[one] = first
        self._groups += [slot.group for slot in slots]
        for row, (slot, parameter) in enumerate(
            zip(slots, one.bucket.parameters, strict=True), start=first
        ):
            if is_model_part(parameter):
                self._cut_rows[row] = slot.name
        self._are_agreed = False
        return super()._lay(one)

    def step(self, multiplier: Multiplier) -> None:
        """Make one update with the mean gradients times `multiplier`.

        Raises:
            OffloadError: the disk failed on some rank; nothing has changed on any rank.
        """
        on_disk, deferred = self._on_disk(), Deferred()
        parts = None if self._parts is None else self._parts.ranks
        sending = sending_of(on_disk)
        update = update_on_disk([*on_disk.values()], parts) if on_disk else None
        with as_one_step(self._optimizer), update or nullcontext():
            norms = _Norms(self._gradients[0].bucket.steps_on)
            begun = deferred.run(partial(self._begin, on_disk)) or {}
            deferred.run(partial(self._learn, begun, multiplier, norms))
            ratios = self._ratios(norms.square_sums(len(self._groups)))
            self._optimizer.ratios = {None: ratios}
            deferred.run(partial(self._move, begun, ratios, sending))
            deferred.tell()
        if on_disk:
            refresh_all([one.bucket for one in on_disk])
        else:
            refresh(self._gradients)

    def _ratios(self, sums: Tensor) -> Tensor:
        """Return (parameters,) ratios from each rank's (parameters, 2) sums of squares."""
        rows_of: dict[Sharing, list[int]] = {}
        for one in self._gradients:
            if one.bucket.partition.optimizer:
                first = self._first_rows[one]
                mine = range(first, first + len(one.bucket.layout.slots))
                rows_of.setdefault(one.bucket.sharing, []).extend(mine)
        for sharing, rows in rows_of.items():
            with _chosen(sums, rows) as chosen:
                sharing.sum_(chosen, "the sum of Lamb's norms")
        if self._parts is not None and self._parts.slices is not None:
            self._add_up_slices(sums, self._parts.slices)
        return _trust_ratios(sums, [self._optimizer.param_groups[n] for n in self._groups])

    def _add_up_slices(self, sums: Tensor, slices: Ranks) -> None:
        """Sum the rows of split layers over the ranks that hold their slices."""
        if not self._are_agreed:
            self._are_agreed = is_same_everywhere(repr(self._cut_rows), slices)
        if not self._are_agreed:
            raise MismatchError(
                "Lamb needs the norms of whole parameters, but the model-parallel ranks"
                f" {slices.numbers} do not hold parts of the same ones (this one has"
                f" {len(self._cut_rows)} parameters marked tensor_model_parallel); mark the same"
                " parameters on each rank, or train with AdamW"
            )
        with _chosen(sums, list(self._cut_rows)) as cut:
            sum_(cut, slices, "the sum of Lamb's norms over the model's parts")

    def _begin(self, on_disk: Mapping[Gradients, DiskState]) -> dict[Gradients, list[_Begun]]:
        """Begin the update of every piece."""
        begun = begin_on_disk(on_disk, _begin, self._steps)
        for one in self._gradients:
            if one not in on_disk:
                pieces = self._pieces[one]
                begun[one] = [(piece, self._begun(one, piece, _begin), []) for piece in pieces]
        return begun

    def _learn(
        self, begun: Mapping[Gradients, list[_Begun]], multiplier: Multiplier, norms: _Norms
    ) -> None:
        """Read all state, and write the moments."""
        for one, slices, _ in self._walk(begun, written=slice(1, None)):
            for piece_slice in slices:
                piece_slice.learn(one.mean, multiplier, norms)

    def _move(
        self, begun: Mapping[Gradients, list[_Begun]], ratios: Tensor, sending: Crossing | None
    ) -> None:
        """Read all state again, with the new moments, and write the masters."""
        with rewriting_in_turn() as rewriting:
            for one, slices, part in self._walk(begun, written=slice(1)):
                for piece_slice in slices:
                    piece_slice.step(ratios)
                if part is not None:
                    rewriting(one.bucket)
                    one.bucket.put_weights(*part, sending)

    def _walk(
        self, begun: Mapping[Gradients, list[_Begun]], written: slice
    ) -> Iterator[tuple[Gradients, list[_StepSlice], tuple[int, Tensor] | None]]:
        """Yield the masters and moments of buckets: in memory at once, on the disk part by part.

        For a part on the disk it also yields its masters and their start in the span. Parts end at
        block borders, so that the sums are bit for bit those of state in memory. `written` selects
        the masters and moments on the disk that are written.
        """
        whole: dict[Gradients, Stop] = {}
        for one, pieces in begun.items():
            state = self._disk_states.of(one.bucket)
            if state is None:
                here = [
                    self._slice_of(
                        one, piece, own, piece.start, [piece.values.detach(), *own.state]
                    )
                    for piece, own, _ in pieces
                ]
                yield one, here, None
            elif pieces:  # otherwise there is only padding
                whole[one] = state.stop(written)
        block = block_numel(torch.device("cpu"))
        for one, stop, values in walk_parts(whole, block, self._steps, self._pool_of):
            one.bucket.absorb_edits_into(values[0], stop.start)
            here = [
                self._slice_of(one, piece, own, *of_piece(stop, values, piece, runs))
                for piece, own, runs in begun[one]
            ]
            yield one, here, (stop.start, values[0])

    def _slice_of(
        self, one: Gradients, piece: Piece, own: SliceUpdate, start: int, values: list[Tensor]
    ) -> _StepSlice:
        """Return the elements of a piece from `start` of the span on, which are `values`."""
        first = one.bucket.span[0] + start
        fragments = [*one.bucket.layout.fragments(first, first + values[0].numel())]
        assert own.number is not None  # `_begin` has counted it
        group, count = self._group(piece), float(own.number)
        return _StepSlice(_Values(*values), start, fragments, self._first_rows[one], group, count)
