"""A small GPT that the checks train in many ways, by Hadal and by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peers.model import Gpt
from peers.settings import Workload
from torch import Tensor, nn

import hadal
from gpu_checks.table import is_dry
from hadal.device import current_device

STEPS = 6
_BETAS = (0.9, 0.999)
ADAM = {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, "weight_decay": 0.01}
# About 10 ms of a GPU's time.
_SLEEP_CYCLES = 20_000_000
_MICRO_BATCH = 4

Config = dict[str, Any]

ON_HOST: Config = {"offload_optimizer": {"device": "cpu"}}
ALL_ON_HOST: Config = {**ON_HOST, "offload_param": {"device": "cpu"}}
INPUTS_ON_HOST: Config = {"modules": "units", "cpu_checkpointing": True}


def shape() -> Workload:
    """Return the model's shape."""
    if is_dry():
        return Workload(2, 32, 2, 64, 16, _MICRO_BATCH)
    return Workload(4, 256, 4, 1024, 128, _MICRO_BATCH)


def start() -> None:
    """Join the ranks of this job, which share the device; a second call does nothing."""
    if dist.is_initialized():
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    if is_dry() or os.environ["WORLD_SIZE"] == "1":
        hadal.init_distributed()
        return
    import staged

    staged.register("cuda")
    hadal.init_distributed("cpu:gloo,cuda:staged")


def config(stage: int, precision: str = "fp32", **more: Any) -> Config:
    """Return a configuration of AdamW without clipping."""
    zero = {"stage": stage, **more.pop("zero", {})}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    made: Config = {
        "train_micro_batch_size_per_gpu": _MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": [*_BETAS]}},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
        **more,
    }
    if precision != "fp32":
        made[precision] = {"enabled": True}
    return made


def engine_of(config: Config, make: Callable[[], nn.Module] | None = None) -> Any:
    """Return an engine over a small GPT, or another model, always with the same values."""
    torch.manual_seed(0)
    model = make() if make else Gpt(shape())
    return hadal.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batches(steps: int, accumulation: int = 1) -> list[list[Tensor]]:
    """Return this rank's micro-batches of each step, on the device."""
    size, ranks = (_MICRO_BATCH, shape().sequence + 1), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        made = [
            torch.randint(shape().vocabulary, size, generator=generator)
            for _ in range(accumulation * ranks)
        ]
        found.append([one.to(current_device()) for one in made[dist.get_rank() :: ranks]])
    return found


def make_step(engine: Any, given: list[Tensor]) -> Tensor:
    """Make one step; return its mean loss, on the device."""
    losses = []
    for batch in given:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@dataclass
class Trained:
    """The mean loss of each step over all ranks, and the weights."""

    losses: list[float]
    weights: list[Tensor]


def train(
    config: Config,
    steps: int = STEPS,
    save: str = "",
    load: str = "",
) -> Trained:
    """Train with deterministic kernels; save after half of the steps, or load before them."""
    engine = engine_of(config)
    if load:
        engine.load_checkpoint(load)
    given, losses = batches(steps, config["gradient_accumulation_steps"]), []
    with deterministic():
        for number in range(engine.global_steps, steps):
            losses.append(make_step(engine, given[number]))
            if save and number == steps // 2 - 1:
                engine.save_checkpoint(save)
    weights = [value.detach().cpu().clone() for value in engine.state_dict().values()]
    engine.destroy()
    return Trained(_over_ranks(losses), weights)


def _over_ranks(losses: list[Tensor]) -> list[float]:
    total = torch.stack(losses).double().cpu() / dist.get_world_size()
    dist.all_reduce(total)
    found: list[float] = total.tolist()
    return found


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch choose kernels that add in a fixed order; those of CPUs always do."""
    if is_dry():  # the call alone imports the compiler
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def train_by_hand(precision: str, steps: int, clip: float = 0.0, accumulation: int = 1) -> Trained:
    """Train in a loop with torch's fused AdamW, in fp32 or bf16 with fp32 masters."""
    torch.manual_seed(0)
    model = Gpt(shape()).to(current_device())
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    if precision == "bf16":
        model.bfloat16()
    parameters = list(model.parameters())
    keys: Any = ADAM
    optimizer = torch.optim.AdamW(masters, **keys, fused=True)
    losses = []
    with deterministic():
        for given in batches(steps, accumulation):
            parts = []
            for batch in given:
                loss = model(batch)
                (loss / accumulation).backward()
                parts.append(loss.detach())
            with torch.no_grad():
                for master, parameter in zip(masters, parameters, strict=True):
                    assert parameter.grad is not None
                    master.grad = parameter.grad.to(master.dtype)
                if clip:
                    nn.utils.clip_grad_norm_(masters, clip)
                optimizer.step()
                torch._foreach_copy_(parameters, masters)
            model.zero_grad(set_to_none=True)
            losses.append(torch.stack(parts).mean())
    weights = [value.detach().cpu() for value in model.state_dict().values()]
    return Trained(_over_ranks(losses), weights)


@contextmanager
def slow_copies() -> Iterator[None]:
    """Let the GPU sleep before all work of side streams, and before copies of `staged`."""
    if current_device().type == "cpu":
        yield
        return
    import staged

    with staged.delayed(partial(torch.cuda._sleep, _SLEEP_CYCLES)):
        yield
