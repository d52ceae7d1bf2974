"""One update: a norm over the shards, one multiply, the optimizer, and the weights written back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm import Ranks
from hadal.comm.collectives import Pending, slice_of, sum_
from hadal.device import AdamRule, fused_adam_
from hadal.errors import OptimizerError
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.layout import Run

# Elements that are cast, scaled, stepped and written back together: on a CPU so few that a gradient
# in float32 stays in the cache between these, on an accelerator enough to keep it busy.
_CPU_BLOCK_NUMEL = 1 << 18
_ACCELERATOR_BLOCK_NUMEL = 1 << 25
# Squares summed in float32 at a time; the blocks' sums are added in float64, which keeps digits.
_CPU_NORM_NUMEL = 1 << 16


def block_numel(device: torch.device) -> int:
    """How many elements are worked on at a time."""
    return _CPU_BLOCK_NUMEL if device.type == "cpu" else _ACCELERATOR_BLOCK_NUMEL


def global_norm(gradients: Sequence[Gradients], ranks: Ranks) -> float:
    """The L2 norm of all mean gradients, each counted once; one small sum over the ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for one in gradients:
        # Where the mean is whole on every rank, each rank counts its even cut of it.
        cut = one.bucket.partition.optimizer
        mine = one.mean if cut else slice_of(one.mean, ranks.rank, ranks)
        total += _square_sum(mine)
    sum_(total, ranks, "the sum of the gradient norm")
    return math.sqrt(float(total))


def _square_sum(values: Tensor) -> float:
    exact = torch.promote_types(values.dtype, torch.float32)
    total = 0.0
    step = _CPU_NORM_NUMEL if values.device.type == "cpu" else _ACCELERATOR_BLOCK_NUMEL
    for start in range(0, values.numel(), step):
        block = values[start : start + step].to(exact)
        total += float(torch.dot(block, block))
    return total


def clip_coefficient(norm: float, limit: float) -> float:
    """What gradients are multiplied with so that their norm is at most `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


class Stepper(Protocol):
    """Steps an optimizer once per update and leaves the new weights in the buckets."""

    def step(self, multiplier: float) -> None:
        """Make one update with the mean gradients times `multiplier`."""


class _Piece(NamedTuple):
    """A contiguous run of one param group in one bucket's master."""

    group: int
    start: int
    stop: int
    values: nn.Parameter


class FlatStepper:
    """Steps elementwise optimizers on flat cuts of the master: one tensor per group and bucket."""

    def __init__(self, optimizer: Optimizer, gradients: Sequence[Gradients]) -> None:
        self._optimizer = optimizer
        self._gradients = list(gradients)
        self._pieces: dict[Gradients, list[_Piece]] = {}
        for group in optimizer.param_groups:
            group["params"] = []
        for one in gradients:
            master = one.bucket.master
            assert master is not None  # every bucket with gradients is trained
            pieces = []
            for run in one.bucket.layout.runs(*one.bucket.span):
                values = nn.Parameter(master[run.start : run.stop])
                optimizer.param_groups[run.group]["params"].append(values)
                state = _state_of_run(optimizer, one.bucket, run, values)
                if state:
                    optimizer.state[values] = state
                pieces.append(_Piece(run.group, run.start, run.stop, values))
            self._pieces[one] = pieces
        for one in gradients:
            for parameter in one.bucket.parameters:
                optimizer.state.pop(parameter, None)

    def step(self, multiplier: float) -> None:
        """Make one update with the mean gradients times `multiplier`."""
        if _is_plain_adam(self._optimizer):
            self._step_in_blocks(multiplier)
        else:
            self._step_at_once(multiplier)

    def _step_in_blocks(self, multiplier: float) -> None:
        """Adam, a cache-sized block at a time: every byte is read and written once."""
        refreshing: list[Pending] = []
        for one in self._gradients:
            for piece in self._pieces[one]:
                self._step_piece(one, piece, multiplier)
            append(refreshing, one.bucket.start_refresh())
        # A scheduler that was made by torch asks whether the optimizer has stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        wait_all(refreshing)

    def _step_piece(self, one: Gradients, piece: _Piece, multiplier: float) -> None:
        group = self._optimizer.param_groups[piece.group]
        values = piece.values.detach()
        moments, largest, count = self._adam_state(piece, values, bool(group["amsgrad"]))
        count += 1
        rule = _adam_rule(self._optimizer, group)
        mean = one.mean[piece.start : piece.stop]
        step = min(block_numel(values.device), values.numel())
        gradient = torch.empty(step, dtype=values.dtype, device=values.device)
        for start in range(0, values.numel(), step):
            stop = min(start + step, values.numel())
            block = gradient[: stop - start]
            block.copy_(mean[start:stop])
            if multiplier != 1.0:
                block.mul_(multiplier)
            fused_adam_(
                values[start:stop],
                block,
                (moments[0][start:stop], moments[1][start:stop]),
                None if largest is None else largest[start:stop],
                count,
                rule,
            )
            one.bucket.write_back(piece.start + start, piece.start + stop)

    def _adam_state(
        self, piece: _Piece, values: Tensor, amsgrad: bool
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None, Tensor]:
        """Adam's state of one piece, under torch.optim's own names, made on first use."""
        state = self._optimizer.state[piece.values]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=values.device)
            state["exp_avg"] = torch.zeros_like(values)
            state["exp_avg_sq"] = torch.zeros_like(values)
            if amsgrad:
                state["max_exp_avg_sq"] = torch.zeros_like(values)
        largest = state["max_exp_avg_sq"] if amsgrad else None
        return (state["exp_avg"], state["exp_avg_sq"]), largest, state["step"]

    def _step_at_once(self, multiplier: float) -> None:
        """Any other elementwise optimizer: its own `step`, once, on all pieces."""
        for one in self._gradients:
            for piece in self._pieces[one]:
                mean = one.mean[piece.start : piece.stop]
                piece.values.grad = mean.to(piece.values.dtype, copy=True).mul_(multiplier)
        self._optimizer.step()
        refreshing: list[Pending] = []
        for one in self._gradients:
            for piece in self._pieces[one]:
                piece.values.grad = None
                one.bucket.write_back(piece.start, piece.stop)
            append(refreshing, one.bucket.start_refresh())
        wait_all(refreshing)


def _state_of_run(optimizer: Optimizer, bucket: Bucket, run: Run, values: Tensor) -> dict[str, Any]:
    """What the optimizer holds for the parameters of a run, laid out like the run.

    Tensors of a parameter's shape are cut and joined; anything else must be the same for all.
    """
    begin = bucket.span[0] + run.start
    parts = list(bucket.layout.fragments(begin, bucket.span[0] + run.stop))
    states = [optimizer.state.get(bucket.parameters[part.slot], {}) for part in parts]
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for known in states for key in known):
        for part, known in zip(parts, states, strict=True):
            slot, value = bucket.layout.slots[part.slot], known.get(key)
            # A 0-dim parameter's own state is 0-dim too; a count of steps is no element of it.
            fits = isinstance(value, Tensor) and tuple(value.shape) == slot.shape
            if fits and key != "step":
                whole = state.setdefault(key, torch.zeros_like(values, dtype=value.dtype))
                cut = value.detach().reshape(-1)[part.start : part.start + part.numel]
                whole[part.offset : part.offset + part.numel].copy_(cut)
            elif key not in state:
                state[key] = value.clone() if isinstance(value, Tensor) else value
            elif value is None or bool(state[key] != value):
                raise OptimizerError(
                    f"the state {key!r} that the {type(optimizer).__name__} brings along is"
                    f" {value!r} for {slot.name} and {state[key]!r} for the parameters before it;"
                    " parameters of one group are stepped together. Give a fresh optimizer."
                )
    return state


def _is_plain_adam(optimizer: Optimizer) -> bool:
    """Whether torch's fused kernel does exactly what this optimizer's own step would do."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    unusual = any(
        group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups
    )
    return not hooked and not unusual


def _adam_rule(optimizer: Optimizer, group: dict[str, object]) -> AdamRule:
    beta1, beta2 = group["betas"]  # type: ignore[misc]
    decoupled = type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    return AdamRule(
        lr=float(group["lr"]),  # type: ignore[arg-type]
        beta1=float(beta1),  # type: ignore[has-type]
        beta2=float(beta2),  # type: ignore[has-type]
        eps=float(group["eps"]),  # type: ignore[arg-type]
        weight_decay=float(group["weight_decay"]),  # type: ignore[arg-type]
        decoupled=decoupled,
        maximize=bool(group["maximize"]),
    )


def append(pendings: list[Pending], pending: Pending | None) -> None:
    """Remember a collective that was started, if one was."""
    if pending is not None:
        pendings.append(pending)


def wait_all(pendings: Sequence[Pending]) -> None:
    """Wait for every one of them."""
    for pending in pendings:
        pending.wait()


def check_groups(optimizer: Optimizer, known: Sequence[nn.Parameter], rank: int) -> None:
    """Raise `OptimizerError` where the optimizer holds a parameter that the model does not have."""
    in_model = {id(parameter) for parameter in known}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in in_model:
                raise OptimizerError(
                    f"rank {rank}: parameter {index} of param group {number}"
                    f" ({tuple(parameter.shape)}, {parameter.dtype}) is not a parameter of the"
                    " model. Make the optimizer after the model has its final form and device."
                )
