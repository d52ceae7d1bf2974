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

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm import Ranks
from hadal.comm.collectives import sum_
from hadal.comm.faults import is_same_everywhere
from hadal.errors import MismatchError, OptimizerError
from hadal.optim.desk import block_numel
from hadal.optim.norm import is_model_part
from hadal.optim.own import Group, OwnOptimizer
from hadal.optim.pieces import Held, Piece, held_pieces, lay_pieces
from hadal.optim.step import StepperInMemory, as_one_step, refresh
from hadal.zero.gradients import Gradients
from hadal.zero.layout import Fragment


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
        moments = _moments(self, parameter)
        count = float(self.state[parameter]["step"])
        values = _Values(parameter.detach(), *moments)
        _learn(values, gradient, group)
        update = _update(values, group, count)
        sums = torch.stack([_square_sum(values.master), _square_sum(update)])
        ratio = _trust_ratios(sums[None], [group])[0]
        values.master.addcmul_(update, ratio.to(update.dtype), value=-group["lr"])


class _Values(NamedTuple):
    """A stretch of master values with its two moments: tensors of one shape and dtype."""

    master: Tensor
    first: Tensor
    second: Tensor

    def blocks(self, numel: int) -> Iterator[tuple[int, _Values]]:
        """The stretch in cuts of `numel` elements, each with where it starts."""
        for start in range(0, self.master.numel(), numel):
            yield start, _Values(*(values[start : start + numel] for values in self))


def _moments(optimizer: Optimizer, values: nn.Parameter) -> tuple[Tensor, Tensor]:
    """The state of a tensor, made on first use; it counts this update."""
    state = optimizer.state[values]
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(values.detach())
        state["exp_avg_sq"] = torch.zeros_like(values.detach())
    state["step"] += 1
    return state["exp_avg"], state["exp_avg_sq"]


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
    return torch.dot(flat, flat).double()


def _trust_ratios(sums: Tensor, groups: Sequence[Group]) -> Tensor:
    """(parameters,) ratios, from (parameters, 2) sums of squares: of the weights, of the update."""
    weights, updates = sums.sqrt().unbind(1)
    low = sums.new_tensor([group["min_coeff"] for group in groups])
    high = sums.new_tensor([group["max_coeff"] for group in groups])
    ratios = (weights / updates).clamp(low, high)
    return torch.where((weights > 0) & (updates > 0), ratios, 1.0)


class _Part(NamedTuple):
    """The fragment of one parameter in a piece, and the row of its norms."""

    row: int
    fragment: Fragment


class LambStepper(StepperInMemory):
    """Steps Lamb on flat cuts of the master, in blocks.

    The update is computed twice, for its norm and for the step itself: to keep it in between would
    move the same bytes and take a third moment's memory.
    """

    def __init__(
        self, optimizer: Lamb, gradients: Sequence[Gradients], model_parallel: Ranks | None = None
    ) -> None:
        self._optimizer = optimizer
        self._model_parallel = model_parallel
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
        self._pieces[one] = [
            (
                piece,
                [
                    _Part(first + fragment.slot, fragment)
                    for fragment in layout.fragments(begin + piece.start, begin + piece.stop)
                ],
            )
            for piece in lay_pieces(self._optimizer, one)
        ]

    def step(self, multiplier: float) -> None:
        """Make one update with the mean gradients times `multiplier`."""
        with as_one_step(self._optimizer):
            groups = [self._optimizer.param_groups[number] for number in self._groups]
            ratios = _trust_ratios(self._learn_all(multiplier), groups)
            for piece, parts in chain.from_iterable(self._pieces.values()):
                self._step_piece(piece, parts, ratios)
            refresh(self._gradients)

    def _learn_all(self, multiplier: float) -> Tensor:
        """Put the gradients into the moments; (parameters, 2) sums of squares over all ranks."""
        bucket = self._gradients[0].bucket
        sums = torch.zeros(len(self._groups), 2, dtype=torch.float64, device=bucket.steps_on)
        for one in self._gradients:
            for piece, parts in self._pieces[one]:
                self._learn_piece(
                    piece, parts, one.mean[piece.start : piece.stop], multiplier, sums
                )
        if bucket.partition.optimizer:
            bucket.sharing.sum_(sums, "the sum of Lamb's norms")
        if self._model_parallel is not None:
            self._add_up_parts(sums, self._model_parallel)
        return sums

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

    def _learn_piece(
        self, piece: Piece, parts: Sequence[_Part], mean: Tensor, multiplier: float, sums: Tensor
    ) -> None:
        group = self._optimizer.param_groups[piece.group]
        moments = _moments(self._optimizer, piece.values)
        count = float(self._optimizer.state[piece.values]["step"])
        whole = _Values(piece.values.detach(), *moments)
        for row, fragment in parts:
            stretch = _Values(*(_cut(values, fragment) for values in whole))
            gradients = _cut(mean, fragment)
            for start, block in stretch.blocks(block_numel(mean.device)):
                numel = block.master.numel()
                given = gradients[start : start + numel].to(block.master.dtype, copy=True)
                _learn(block, given.mul_(multiplier), group)
                # Some buckets may be updated on the host, and others on the device.
                sums[row, 0] += _square_sum(block.master).to(sums.device)
                sums[row, 1] += _square_sum(_update(block, group, count)).to(sums.device)

    def _step_piece(self, piece: Piece, parts: Sequence[_Part], ratios: Tensor) -> None:
        group = self._optimizer.param_groups[piece.group]
        state = self._optimizer.state[piece.values]
        whole = _Values(piece.values.detach(), state["exp_avg"], state["exp_avg_sq"])
        ratios = ratios.to(whole.master)
        for row, fragment in parts:
            stretch = _Values(*(_cut(values, fragment) for values in whole))
            for _, block in stretch.blocks(block_numel(ratios.device)):
                update = _update(block, group, float(state["step"]))
                block.master.addcmul_(update, ratios[row], value=-group["lr"])


def _cut(values: Tensor, fragment: Fragment) -> Tensor:
    return values[fragment.offset : fragment.offset + fragment.numel]
