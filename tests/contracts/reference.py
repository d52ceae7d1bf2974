"""The reference: one process and torch alone, over the batches of all ranks and micro-steps.

It shares no line with Hadal. Masters are fp32 copies of the weights as given; the model computes
in the compute dtype with weights cast from them; every rank's micro-batch gives a gradient in that
dtype; the gradients are averaged in fp32, clipped by their global norm, and torch's optimizer
steps the masters.

A parameter that got no gradient on any rank in an update counts as having a gradient of zero, so
momentum and weight decay move it: all ranks must agree on what is stepped, and DeepSpeed does the
same. (Plain torch would leave a parameter whose `grad` is None where it is.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from optim.plain import PlainAdam
from torch import Tensor, nn

from . import cells
from .cover import Cell
from .models import (
    SUBJECTS,
    Moment,
    Subject,
    Trainee,
    batch_at,
    built,
    groups_of,
    named_by_identity,
)


@dataclass
class Outcome:
    """The results of training, with the same fields for the reference and for Hadal."""

    weights: dict[str, Tensor] = field(default_factory=dict)  # fp32 copies of the final ones
    losses: dict[int, list[float]] = field(default_factory=dict)  # of each rank played
    norms: list[float] = field(default_factory=list)  # before clipping, of each update
    coefficients: list[float] = field(default_factory=list)  # of clipping, of each update
    evaluations: list[Tensor] = field(default_factory=list)
    skipped: int = 0
    # Of the reference only. How far one relative rounding error in every single gradient could
    # move a tensor, and the norm, if all errors added up.
    rounding: dict[str, float] = field(default_factory=dict)
    norm_rounding: list[float] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)


def play(subject: Subject, trainee: Any, ranks: Iterable[int], accumulation: int) -> None:
    """Drive a trainee through every micro-step of every update, for the ranks it represents."""
    ranks = list(ranks)
    for update in range(cells.UPDATES):
        for micro in range(accumulation):
            for rank in ranks:
                moment = Moment(rank, update, micro)
                trainee.start(moment)
                subject.micro_step(trainee, batch_at(subject, moment), moment)
                trainee.end(moment)
        trainee.end_update()
        between = batch_at(subject, Moment(rank=7, update=update, micro=7))
        subject.after_update(trainee, between, update)


class Reference(Trainee):
    """A model in the compute dtype, its fp32 masters, and torch's optimizer over them."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.subject = SUBJECTS[cell["model"]]
        self.world_size = cells.world_of(cell)
        self.accumulation = cells.accumulation_of(cell)
        self.max_norm = cells.max_norm_of(cell)
        self.scale = cells.loss_scale_of(cell)
        self.dtype = cells.compute_dtype_of(cell)
        given = built(self.subject)
        self.kind, self.settings = cells.optimizer_of(cell)
        groups = groups_of(self.subject, given, self.settings)
        names = named_by_identity(given)
        self.start_values = {name: p.detach().clone() for p, name in names.items()}
        self.masters: dict[str, nn.Parameter] = {}
        for group in groups:
            group_names = [names[p] for p in group["params"] if p.requires_grad]
            masters = {name: nn.Parameter(self.start_values[name].clone()) for name in group_names}
            self.masters.update(masters)
            group["params"] = list(masters.values())
        self.optimizer = self._made(groups)
        self.module = given.to(self.dtype)
        self.parameters = dict(self.module.named_parameters())
        self.outcome = Outcome(start=self.start_values)
        self.speeds: dict[str, float] = {}
        self._reset()

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        settings = dict(self.settings)
        if settings.pop("bias_correction", True):
            made: torch.optim.Optimizer = getattr(torch.optim, self.kind)(
                groups, **settings, foreach=False
            )
            return made
        return PlainAdam(groups, **settings)

    def _reset(self) -> None:
        self.gradients = {name: torch.zeros_like(p) for name, p in self.masters.items()}
        self.magnitudes = {name: torch.zeros_like(p) for name, p in self.masters.items()}

    def start(self, moment: Moment) -> None:
        self.moment = moment

    def __call__(self, *inputs: Any) -> Tensor:
        with cells.autocast_of(self.cell):
            return self.module(*cast(inputs, self.dtype))

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.outcome.losses.setdefault(self.moment.rank, []).append(loss.item())
        (loss * (self.scale / self.accumulation)).backward(retain_graph=retain_graph)
        for name in self.masters:
            gradient = self.parameters[name].grad
            if gradient is not None:
                share = gradient.float() / (self.scale * self.world_size)
                self.gradients[name] += share
                self.magnitudes[name] += share.abs()
            self.parameters[name].grad = None

    def end(self, moment: Moment) -> None:
        pass

    def end_update(self) -> None:
        norm = norm_of(self.gradients.values())
        clips = self.max_norm > 0
        coefficient = min(1.0, self.max_norm / (norm + 1e-6)) if clips else 1.0
        for name, master in self.masters.items():
            master.grad = self.gradients[name] * coefficient
        self.optimizer.step()
        self._note_rounding(coefficient)
        self.outcome.norms.append(norm)
        self.outcome.norm_rounding.append(norm_of(self.magnitudes.values()))
        self.outcome.coefficients.append(coefficient)
        self._reset()
        self._recast()

    def _note_rounding(self, coefficient: float) -> None:
        """Add up how far errors of relative size one in the gradients can move each tensor."""
        gain = cells.steepness_of(self.cell, len(self.outcome.norms))
        for name, magnitude in self.magnitudes.items():
            largest = magnitude.max().item() if magnitude.numel() else 0.0
            carried = self.settings.get("momentum", 0.0) * self.speeds.get(name, 0.0)
            self.speeds[name] = carried + gain * coefficient * largest
            moved = self.outcome.rounding.get(name, 0.0)
            self.outcome.rounding[name] = moved + self.speeds[name]

    def _recast(self) -> None:
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)

    def evaluate(self, inputs: Tensor) -> None:
        self.module.eval()
        with torch.no_grad():
            self.outcome.evaluations.append(self(inputs).float())
        self.module.train()

    def edit(self, name: str, values: Tensor, gathered: bool) -> None:
        with torch.no_grad():
            self.masters[name].copy_(values)
        self._recast()


def trained_by_reference(cell: Cell) -> Outcome:
    """Train a cell's model as one process does."""
    reference = Reference(cell)
    play(reference.subject, reference, range(reference.world_size), reference.accumulation)
    final = dict(reference.start_values)
    final.update({name: master.detach().clone() for name, master in reference.masters.items()})
    reference.outcome.weights = final
    return reference.outcome


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The L2 norm of all elements together."""
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def cast(inputs: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Floating-point tensors in the compute dtype, everything else as it is."""
    return tuple(
        each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in inputs
    )
