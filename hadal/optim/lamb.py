"""Lamb (You et al. 2020): Adam whose step for each parameter is as long as a share of its weights.

For a parameter w with the bias-corrected moments m and v of its gradient,

    update = m / (sqrt(v) + eps) + weight_decay * w
    ratio  = ||w|| / ||update||, kept within [min_coeff, max_coeff]; 1 where either norm is 0
    w     -= lr * ratio * update

The norms are those of whole parameters. Where these are cut over ranks each rank adds up the
squares of its own fragments, and one small sum over the ranks serves all parameters of an update;
so does a second one, over the ranks that hold the parts of one model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.collectives import sum_
from hadal.comm.faults import is_same_everywhere
from hadal.device import widest_float
from hadal.errors import MismatchError, OptimizerError
from hadal.offload.crossing import Crossing
from hadal.offload.tensors import DiskTensor, ReadOnly, Walked
from hadal.optim.desk import Multiplier, block_numel, blocks, scale_
from hadal.optim.elementwise import Zeros
from hadal.optim.norm import is_model_part
from hadal.optim.on_disk import (
    Deferred,
    DiskSteps,
    PartBuffers,
    rewriting_in_turn,
    update_on_disk,
    walk_parts,
)
from hadal.optim.own import Group, OwnOptimizer, State
from hadal.optim.pieces import Held, Piece, held_pieces, lay_pieces
from hadal.optim.state_on_disk import DiskState
from hadal.optim.step import RestingStepper, as_one_step, refresh, wait_all
from hadal.zero.gradients import Gradients
from hadal.zero.layout import Fragment

_DISK_STEPS = DiskSteps()


class Lamb(OwnOptimizer):
    """Lamb over whole parameters; an engine steps the same numbers on flat shards.

    State of each tensor: `exp_avg` and `exp_avg_sq` (its shape and dtype), and `step`.

    Raises:
        OptimizerError: `amsgrad`, which Lamb does not have.
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
    ) -> None:
        if amsgrad:
            raise OptimizerError("Lamb has no amsgrad; leave it out or give false")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def step_parameter(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Make one update of a whole parameter."""
        own = parameter.detach()
        moments = _begin(group, self.state[parameter], partial(torch.zeros_like, own))
        values = _Values(own, *moments.state)
        _learn(values, gradient, group)
        update = _update(values, group, moments.updates)
        sums = torch.stack([_square_sum(values.master), _square_sum(update)])
        ratio = _trust_ratios(sums[None], [group])[0]
        values.master.addcmul_(update, ratio.to(update.dtype), value=-group["lr"])


class _Values(NamedTuple):
    """A stretch of master values with its two moments: tensors of one shape and dtype."""

    master: Tensor
    first: Tensor
    second: Tensor

    def cut(self, start: int, stop: int) -> _Values:
        """The elements from `start` on before `stop`."""
        return _Values(*(values[start:stop] for values in self))


class _Moments(NamedTuple):
    """What is remembered of a tensor, in an update."""

    state: tuple[Tensor, Tensor]
    updates: float
    """How many lie in the moments, with this one."""


def _begin(group: Group, state: State, zeros: Zeros) -> _Moments:
    """Make the state of a tensor on first use; it counts this update."""
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = zeros()
        state["exp_avg_sq"] = zeros()
    state["step"] += 1
    return _Moments((state["exp_avg"], state["exp_avg_sq"]), float(state["step"]))


def _learn(values: _Values, gradient: Tensor, group: Group) -> None:
    """Put a gradient into the moments."""
    beta1, beta2 = group["betas"]
    values.first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    values.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def _update(values: _Values, group: Group, count: float) -> Tensor:
    """The update before it is scaled, of the values' shape; `count` updates lie in the moments."""
    beta1, beta2 = group["betas"]
    lacks = group["bias_correction"]
    first = values.first / (1 - beta1**count if lacks else 1.0)
    second = values.second / (1 - beta2**count if lacks else 1.0)
    if group["eps_inside_sqrt"]:
        divisor = second.add_(group["eps"]).sqrt_()
    else:
        divisor = second.sqrt_().add_(group["eps"])
    update = first.div_(divisor)
    if group["weight_decay"]:
        update.add_(values.master, alpha=group["weight_decay"])
    return update


def _square_sum(values: Tensor) -> Tensor:
    flat = values.reshape(-1).to(torch.promote_types(values.dtype, torch.float32))
    return torch.dot(flat, flat).to(widest_float(values.device))


def _trust_ratios(sums: Tensor, groups: Sequence[Group]) -> Tensor:
    """(parameters,) ratios, from (parameters, 2) sums of squares: of the weights, of the update."""
    weights, updates = sums.sqrt().unbind(1)
    # Bounds are passed as numbers: a tensor of them would make the host wait for an accelerator.
    bounds = [(group["min_coeff"], group["max_coeff"]) for group in groups]
    runs = [(bound, len([*same])) for bound, same in groupby(bounds)]
    parts = (weights / updates).split([count for _, count in runs])
    ratios = torch.cat([part.clamp(*bound) for part, (bound, _) in zip(parts, runs, strict=True)])
    return torch.where((weights > 0) & (updates > 0), ratios, 1.0)


class _Part(NamedTuple):
    """Where one parameter lies in a piece, counted from the span's start, and its row of norms."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What is in memory of a piece in an update."""

    values: _Values
    start: int
    """Where it begins, counted from the span's start."""
    parts: Sequence[_Part]
    group: Group
    updates: float
    """How many lie in the moments, with this one."""

    def blocks(self, numel: int) -> Iterator[tuple[int, int, _Values]]:
        """The stretch parameter by parameter, in cuts at the multiples of `numel`.

        Each with its row of norms, and with where it begins in the span.
        """
        stop = self.start + self.values.master.numel()
        for row, first, last in self.parts:
            for low, high in blocks(max(first, self.start), min(last, stop), numel):
                yield row, low, self.values.cut(low - self.start, high - self.start)


class LambStepper(RestingStepper):
    """Steps Lamb on flat cuts of the master, in blocks.

    The update is computed twice, for its norm and for the step itself: to keep it in between would
    move the same bytes and take a third moment's memory. So what is on the disk is read twice:
    the moments are written the first time, and the masters the second.
    """

    def __init__(
        self,
        optimizer: Lamb,
        gradients: Sequence[Gradients],
        model_parallel: Ranks | None = None,
        steps: DiskSteps = _DISK_STEPS,
    ) -> None:
        super().__init__(optimizer, steps)
        self._optimizer = optimizer
        self._model_parallel = model_parallel
        self._part_buffers = PartBuffers()
        self._gradients: list[Gradients] = []
        self._pieces: dict[Gradients, list[tuple[Piece, list[_Part]]]] = {}
        self._groups: list[int] = []
        """The param group of each row of norms: of each parameter, the same on every rank."""
        self._cut_rows: dict[int, str] = {}
        """The rows of parameters that are cut over the model's parts, with their names."""
        self._are_agreed = False
        """Whether the parts are known to have the same such rows."""
        for group in optimizer.param_groups:
            group["params"] = []
        for one in gradients:
            self._lay(one)

    def add(self, gradients: Sequence[Gradients], members: Sequence[nn.Parameter]) -> None:
        """Take up the buckets of the newest param group."""
        self._optimizer.param_groups[-1]["params"] = []
        for one in gradients:
            self._lay(one)

    def values_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """None: the optimizer has flat cuts of the masters, and no parameter for itself."""
        return None

    def held(self) -> Iterator[Held]:
        """The flat cuts."""
        for one, pieces in self._pieces.items():
            yield from held_pieces(one.bucket, (piece for piece, _ in pieces))

    def _lay(self, one: Gradients) -> None:
        layout, begin = one.bucket.layout, one.bucket.span[0]
        first = len(self._groups)
        self._groups += [slot.group for slot in layout.slots]
        for row, (slot, parameter) in enumerate(
            zip(layout.slots, one.bucket.parameters, strict=True), start=first
        ):
            if is_model_part(parameter):
                self._cut_rows[row] = slot.name
        self._are_agreed = False
        self._gradients.append(one)

        def part_of(piece: Piece, fragment: Fragment) -> _Part:
            start = piece.start + fragment.offset
            return _Part(first + fragment.slot, start, start + fragment.numel)

        with one.bucket.present():
            pieces = lay_pieces(self._optimizer, one)
            self._pieces[one] = [
                (
                    piece,
                    [
                        part_of(piece, fragment)
                        for fragment in layout.fragments(begin + piece.start, begin + piece.stop)
                    ],
                )
                for piece in pieces
            ]
            self._disk_states.put(one.bucket, pieces)

    def step(self, multiplier: Multiplier) -> None:
        """Make one update with the mean gradients times `multiplier`.

        Raises:
            OffloadError: the disk failed, on some rank; nothing has changed on any.
        """
        with as_one_step(self._optimizer):
            if self._disk_states:
                self._step_on_disk(multiplier)
                return
            sums = self._no_sums()
            stretches = [
                (one, stretch) for one in self._gradients for stretch in self._begun_in_memory(one)
            ]
            for one, stretch in stretches:
                _learn_stretch(stretch, one.mean, multiplier, sums)
            ratios = self._ratios(sums)
            for _, stretch in stretches:
                _step_stretch(stretch, ratios)
            refresh(self._gradients)

    def _begun_in_memory(self, one: Gradients) -> Iterator[_Stretch]:
        for piece, parts in self._pieces[one]:
            values = piece.values.detach()
            group, state = self._group(piece), self._optimizer.state[piece.values]
            moments = _begin(group, state, partial(torch.zeros_like, values))
            whole = _Values(values, *moments.state)
            yield _Stretch(whole, piece.start, parts, group, moments.updates)

    def _group(self, piece: Piece) -> Group:
        return self._optimizer.param_groups[piece.group]

    def _no_sums(self) -> Tensor:
        """Room for the (parameters, 2) sums of squares."""
        device = self._gradients[0].bucket.steps_on
        return torch.zeros(len(self._groups), 2, dtype=widest_float(device), device=device)

    def _ratios(self, sums: Tensor) -> Tensor:
        """(parameters,) ratios, from each rank's (parameters, 2) sums of squares."""
        bucket = self._gradients[0].bucket
        if bucket.partition.optimizer:
            bucket.sharing.sum_(sums, "the sum of Lamb's norms")
        if self._model_parallel is not None:
            self._add_up_parts(sums, self._model_parallel)
        return _trust_ratios(sums, [self._optimizer.param_groups[n] for n in self._groups])

    def _add_up_parts(self, sums: Tensor, model_parallel: Ranks) -> None:
        """Make the sums of parameters that are cut over the model's parts those of all parts."""
        if not self._are_agreed:
            self._are_agreed = is_same_everywhere(repr(self._cut_rows), model_parallel)
        if not self._are_agreed:
            raise MismatchError(
                "Lamb needs the norms of whole parameters, and the model-parallel ranks"
                f" {model_parallel.numbers} do not hold parts of the same ones (this one has"
                f" {len(self._cut_rows)} parameters that are marked tensor_model_parallel); mark"
                " the same parameters on each, or train with AdamW"
            )
        rows = torch.tensor(list(self._cut_rows), dtype=torch.long, device=sums.device)
        cut = sums[rows]
        sum_(cut, model_parallel, "the sum of Lamb's norms over the model's parts")
        sums[rows] = cut

    # ---- on the disk -----------------------------------------------------------------------------

    def _step_on_disk(self, multiplier: Multiplier) -> None:
        on_disk, deferred = self._on_disk(self._gradients), Deferred()
        ways = (one.bucket.start_sending() for one in on_disk)
        sending = next(filter(None, ways), None)
        with update_on_disk([*on_disk.values()], self._model_parallel):
            sums = self._no_sums()
            begun = deferred.run(partial(self._begin_on_disk, on_disk))
            deferred.run(lambda: self._learn_on_disk(begun or {}, multiplier, sums))
            ratios = self._ratios(sums)
            deferred.run(lambda: self._write_masters(begun or {}, ratios, sending))
            deferred.tell()
        wait_all([one.bucket.start_refresh() for one in on_disk])

    def _begin_on_disk(self, on_disk: Mapping[Gradients, DiskState]) -> dict[Gradients, _Begun]:
        """Those of which this rank has more than padding."""
        begun: dict[Gradients, _Begun] = {}
        for one, state in on_disk.items():
            pieces = state.begin(_begin)
            if pieces:
                *_, moments = pieces[0]  # the same for all
                begun[one] = _Begun(state.tensors[0], moments, [own for _, own, _ in pieces])
            if self._steps.clears_first:
                for run in state.tensors:
                    run.lay_out()
        return begun

    def _learn_on_disk(
        self, begun: Mapping[Gradients, _Begun], multiplier: Multiplier, sums: Tensor
    ) -> None:
        """Read everything, and write the moments."""
        runs: dict[Gradients, list[Walked]] = {
            one: [ReadOnly(own.master), *own.runs] for one, own in begun.items()
        }
        for one, stretches, _ in self._walk(begun, runs):
            for stretch in stretches:
                _learn_stretch(stretch, one.mean, multiplier, sums)

    def _write_masters(
        self, begun: Mapping[Gradients, _Begun], ratios: Tensor, sending: Crossing | None
    ) -> None:
        """Read everything once more, the moments as they are now, and write the masters."""
        runs: dict[Gradients, list[Walked]] = {
            one: [own.master, *(ReadOnly(run, latest=True) for run in own.runs)]
            for one, own in begun.items()
        }
        with rewriting_in_turn() as rewriting:
            for one, stretches, whole in self._walk(begun, runs):
                for stretch in stretches:
                    _step_stretch(stretch, ratios)
                rewriting(one.bucket)
                one.bucket.put_weights(*whole, sending)

    def _walk(
        self, begun: Mapping[Gradients, _Begun], runs: Mapping[Gradients, Sequence[Walked]]
    ) -> Iterator[tuple[Gradients, list[_Stretch], tuple[int, Tensor]]]:
        """Part by part: what of its pieces is in memory, and where its masters begin in the span.

        Parts end where blocks do, so that the sums are those of state in memory, bit for bit.
        """
        if not runs:
            return
        block = block_numel(torch.device("cpu"))
        for one, stop, read in walk_parts(runs, block, self._steps, self._part_buffers):
            whole = _Values(*read)
            one.bucket.absorb_edits_into(whole.master, stop.start)
            stretches = []
            for (piece, parts), moments in zip(self._pieces[one], begun[one].moments, strict=True):
                first = max(piece.start, stop.start)
                last = min(piece.stop, stop.start + stop.numel)
                if first < last:
                    values = whole.cut(first - stop.start, last - stop.start)
                    group = self._group(piece)
                    stretches.append(_Stretch(values, first, parts, group, moments.updates))
            yield one, stretches, (stop.start, whole.master)


class _Begun(NamedTuple):
    """An update of one bucket on the disk that was begun."""

    master: DiskTensor
    runs: list[DiskTensor]
    """Of the first and of the second moments."""
    moments: list[_Moments]
    """Of each piece."""


def _learn_stretch(stretch: _Stretch, mean: Tensor, multiplier: Multiplier, sums: Tensor) -> None:
    """Put gradients (`mean`, which lies like the span) into moments, and squares into the sums."""
    for row, start, block in stretch.blocks(block_numel(mean.device)):
        given = mean[start : start + block.master.numel()].to(block.master.dtype, copy=True)
        _learn(block, scale_(given, multiplier), stretch.group)
        # Some buckets may be updated on the host, and others on the device.
        sums[row, 0] += _square_sum(block.master).to(sums.device)
        update = _update(block, stretch.group, stretch.updates)
        sums[row, 1] += _square_sum(update).to(sums.device)


def _step_stretch(stretch: _Stretch, ratios: Tensor) -> None:
    """Make the update, each parameter's by its ratio."""
    ratios = ratios.to(stretch.values.master)
    for row, _, block in stretch.blocks(block_numel(ratios.device)):
        update = _update(block, stretch.group, stretch.updates)
        block.master.addcmul_(update, ratios[row], value=-stretch.group["lr"])
