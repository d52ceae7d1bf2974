"""One rank of a cell, trained by Hadal in the processes of a pool."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import torch
from torch import Tensor

import hadal

from . import cells
from .cover import Cell
from .models import SUBJECTS, Moment, Trainee, built, groups_of
from .reference import Outcome, cast, play


class Trained(Trainee):
    """A Hadal engine, driven as a user drives it."""

    def __init__(self, cell: Cell, compilation: str = "") -> None:
        self.subject = SUBJECTS[cell["model"]]
        self.dtype = cells.compute_dtype_of(cell)
        self.settings = cells.departing_settings(cell)
        model = built(self.subject)
        self.parameters = dict(model.named_parameters())
        _, params = cells.optimizer_of(cell)
        whole = compilation == "torch.compile"
        self.engine, _, _, _ = hadal.initialize(
            model=torch.compile(model, backend="aot_eager") if whole else model,
            model_parameters=groups_of(self.subject, model, params),
            config=cells.config_of(cell),
        )
        if compilation == "engine.compile":
            self.engine.compile(backend="aot_eager")
        self.outcome = Outcome()

    def start(self, moment: Moment) -> None:
        self.moment = moment

    def __call__(self, *inputs: Any) -> Tensor:
        here = [
            each.to(self.engine.device) if isinstance(each, Tensor) else each for each in inputs
        ]
        return self.engine(*cast(tuple(here), self.dtype))

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.outcome.losses.setdefault(self.moment.rank, []).append(loss.item())
        if retain_graph:
            self.engine.backward(loss, retain_graph=True)
        else:
            self.engine.backward(loss)

    def end(self, moment: Moment) -> None:
        self.engine.step()

    def end_update(self) -> None:
        self.outcome.norms.append(float(self.engine.get_global_grad_norm()))
        self.outcome.coefficients.append(float(self.engine.clip_coefficient))

    def evaluate(self, inputs: Tensor) -> None:
        self.engine.eval()
        with torch.no_grad():
            self.outcome.evaluations.append(self(inputs).float().cpu())
        self.engine.train()

    def edit(self, name: str, values: Tensor, gathered: bool) -> None:
        parameter = self.parameters[name]
        if not (gathered or self.settings.get("gathered", False)):
            with torch.no_grad():
                parameter.copy_(values)
            return
        with hadal.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if os.environ["RANK"] == "0":
                parameter.copy_(values)


def trained_by_hadal(cell: Cell, compilation: str = "") -> Outcome:
    """Train a cell's model as one rank of a world."""
    trained = Trained(cell, compilation)
    rank = int(os.environ["RANK"])
    play(trained.subject, trained, [rank], cells.accumulation_of(cell))
    engine, outcome = trained.engine, trained.outcome
    assert engine.global_steps == cells.UPDATES, engine.global_steps
    outcome.skipped = engine.skipped_steps
    engine.destroy()
    outcome.weights = {
        name: parameter.detach().float().cpu().clone()
        for name, parameter in trained.parameters.items()
    }
    return outcome


def trained_compiled(cell: Cell, compilation: str) -> tuple[Outcome, int]:
    """The same with a compiled model, and how many graphs were made."""
    from torch._dynamo.utils import counters

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about itself
        torch.compiler.reset()
        counters.clear()
        outcome = trained_by_hadal(cell, compilation)
        graphs = counters["stats"]["unique_graphs"]
        torch.compiler.reset()
    return outcome, graphs


# What DeepSpeed's dynamic loss scale does under these overflows, from 1024 with a window of 3 and a
# hysteresis of 2, which counts where ZeRO is on.
OVERFLOWN = [letter == "O" for letter in "OO..OO.....O...."]
SCALES = [1024, 512, 512, 512, 256, 128, 128, 128, 128, 256, 256, 256, 256, 256, 256, 512]
SCALES_AT_0 = [512, 256, 256, 256, 128, 64, 64, 64, 64, 128, 128, 64, 64, 64, 64, 128]


def trained_through_overflow(stage: int) -> dict[str, Any]:
    """Train in fp16 while the last rank's gradients overflow in chosen updates."""
    torch.manual_seed(3)
    model = torch.nn.Linear(6, 4)
    engine, _, _, _ = hadal.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage},
            "fp16": {
                "enabled": True,
                "initial_scale_power": 10,
                "loss_scale_window": 3,
                "hysteresis": 2,
            },
        },
    )
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    inputs = torch.linspace(-1, 1, 12).reshape(2, 6).half()
    scales, infinite = [], []
    for overflows in OVERFLOWN:
        loss = engine(inputs).float().square().mean()
        engine.backward(loss * 1e9 if overflows and is_last else loss)
        engine.step()
        scales.append(engine.loss_scale)
        infinite.append(not math.isfinite(float(engine.get_global_grad_norm())))
    skipped = engine.skipped_steps
    engine.destroy()
    weight = model.weight.detach().float().flatten().tolist()
    return {"skipped": skipped, "scales": scales, "infinite": infinite, "weight": weight}


SMALL_STEPS = 16


def trained_by_small_steps(stage: int, precision: str, start: float, step: float) -> list[float]:
    """Train weights whose gradient is always one, and return them."""
    model = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(start)
    scale = {"initial_scale_power": 8} if precision == "fp16" else {}
    engine, _, _, _ = hadal.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": step}},
            "zero_optimization": {"stage": stage},
            precision: {"enabled": True, **scale},
        },
    )
    inputs = torch.ones(2, 4, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    for _ in range(SMALL_STEPS):
        engine.backward(engine(inputs).float().mean())
        engine.step()
    engine.destroy()
    return model.weight.detach().float().flatten().tolist()
