"""The work of ranks in these tests, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from engine.logs import logged
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
import npu
from hadal.comm import get_rank
from hadal.device import current_device

TOKENS, WIDTH, LENGTH = 23, 16, 6
# Buckets of a few hundred elements, and nothing kept longer than its use.
TINY = {
    "reduce_bucket_size": 600,
    "allgather_bucket_size": 600,
    "stage3_prefetch_bucket_size": 600,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 20,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.narrow(F.gelu(self.wide(self.norm(values))))


class Model(nn.Module):
    def __init__(self, checkpointed: str = "") -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.tokens(tokens)
        for block in self.blocks:
            if self.checkpointed == "torch":
                values = torch.utils.checkpoint.checkpoint(block, values, use_reentrant=False)
            else:
                values = block(values)
        return self.head(values)


def config(
    stage: int, precision: str = "fp32", zero: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, **TINY, **(zero or {})},
    }
    if precision != "fp32":
        made[precision] = {"enabled": True}
    if precision == "fp16":
        made["fp16"]["initial_scale_power"] = 8
    return {**made, **more}


def built(
    config: dict[str, Any], *, born_sharded: bool = False, model: str = "", freezes: bool = False
) -> Any:
    torch.manual_seed(5)
    with hadal.zero.Init(config_dict_or_path=config) if born_sharded else contextlib.nullcontext():
        made = Model(model)
    if model == "turned":  # weights lie column by column
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.t().contiguous().t()
    made.blocks[:2].requires_grad_(not freezes)
    engine, *_ = hadal.initialize(model=made, model_parameters=made.parameters(), config=config)
    return engine


def batches(rank: int, updates: int, first: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + first)
    return [torch.randint(TOKENS, (2, LENGTH + 1), generator=generator) for _ in range(2 * updates)]


def advanced(engine: Any, updates: int, first: int = 0) -> dict[str, Any]:
    """Train; the losses and norms, as numbers."""
    rank = torch.distributed.get_rank()
    told: dict[str, Any] = {"losses": [], "norms": []}
    for tokens in batches(rank, updates, first):
        tokens = tokens.to(engine.device)
        outputs = engine(tokens[:, :-1])
        loss = F.cross_entropy(outputs.float().flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        told["losses"].append(loss.item())
        if engine.global_steps and engine.micro_steps % 2 == 0:
            told["norms"].append(float(engine.get_global_grad_norm() or 0.0))
    return told


class Following(hadal.Listener):
    """Adds up losses on the device, and keeps records of updates without reading them."""

    def __init__(self) -> None:
        self.updates: list[hadal.Update] = []
        self.total: Tensor | float = 0.0

    def after_backward(self, loss: Tensor | None) -> None:
        self.total = self.total + loss

    def after_update(self, update: hadal.Update) -> None:
        assert update.loss is not None
        self.updates.append(update)


PHASES = ("forward", "backward", "step", "update")


def waited(
    config: dict[str, Any], asks: bool = False, after: int = 3, **model: Any
) -> dict[str, list[str]]:
    """The waits for the device in update number `after`, by phase.

    `step` ends its first micro-step, and `update` its last. `asks`: for the norm, behind it.
    """
    with npu.asynchronous(), npu.with_float64():
        engine = built(config, **model)
        engine.add_listener(Following())
        advanced(engine, after)
        found: dict[str, list[str]] = {phase: [] for phase in PHASES}

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            with npu.waits() as waits:
                yield
            found[name] += [f"{wait.what} in {wait.where}" for wait in waits]

        for tokens in batches(get_rank(), 1, after):
            tokens = tokens.to(engine.device)
            with phase("forward"):
                outputs = engine(tokens[:, :-1])
            loss = F.cross_entropy(outputs.float().flatten(0, 1), tokens[:, 1:].flatten())
            with phase("backward"):
                engine.backward(loss)
            last = engine.is_gradient_accumulation_boundary()
            with phase("update" if last else "step"):
                engine.step()
                if last and asks:
                    engine.get_global_grad_norm()
        engine.destroy()
    return found


def overflowing(config: dict[str, Any]) -> dict[str, Any]:
    """A training whose third of five updates overflows on one rank, without reads in between."""
    is_here = current_device().type == "npu"
    with contextlib.ExitStack() as stack:
        if is_here:
            stack.enter_context(npu.asynchronous())
            stack.enter_context(npu.with_float64())
        lines = stack.enter_context(logged())
        engine, following = (
            built({**config, "scheduler": SCHEDULER, "wall_clock_breakdown": True}),
            Following(),
        )
        engine.add_listener(following)
        for update in range(5):
            for number, tokens in enumerate(batches(get_rank(), 1, update)):
                outputs = engine(tokens.to(engine.device)[:, :-1])
                is_bad = update == 2 and number == 1 and get_rank() == 1
                engine.backward(outputs.float().square().mean() * (torch.inf if is_bad else 1.0))
                engine.step()
        told = {"rates": engine.get_lr(), "skipped": engine.skipped_steps}
        told["overflow"] = engine.overflow
        told["updates"] = [
            (one.skipped, one.skipped_updates, one.rates, one.norm == torch.inf, list(one.times))
            for one in following.updates
        ]
        state = [*engine.optimizer.state.values()]
        told["steps"] = sorted({float(one["step"]) for one in state if "step" in one})
        told["weights"] = weights(engine)
        engine.destroy()
        return {**told, "lines": [line for line in lines if "skipped:" in line]}


SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 9, "warmup_max_lr": 0.01, "warmup_num_steps": 1},
}


def weights(engine: Any) -> dict[str, Tensor]:
    parameters = dict(engine.module.named_parameters())
    with hadal.zero.GatheredParameters(list(parameters.values())):
        return {name: one.detach().cpu().clone() for name, one in parameters.items()}


def trained(config: dict[str, Any], updates: int = 3, **model: Any) -> dict[str, Any]:
    """The results of a training."""
    engine = built(config, **model)
    told = advanced(engine, updates)
    assert engine.device == current_device()
    told["device"] = engine.device.type
    told["weights"] = weights(engine)
    engine.destroy()
    return told


def trained_turned(config: dict[str, Any]) -> dict[str, Any]:
    """The results of a training with weights in column-major order, before and after a resume."""
    told = trained(config, model="turned")
    weights = [one for one in told["weights"].values() if one.dim() == 2]
    assert weights and not any(one.is_contiguous() for one in weights)
    return told


def trained_late(
    config: dict[str, Any], updates: int = 3, longest_delay: float = 0.02, **model: Any
) -> dict[str, Any]:
    """The same where all that the device does is late."""
    before = npu.late_tasks()
    with npu.asynchronous(longest_delay), npu.with_float64():
        told = trained(config, updates, **model)
    return {**told, "late": npu.late_tasks() - before}


def wherever(config: dict[str, Any], **model: Any) -> dict[str, Any]:
    """`trained_late` on the test device, `trained` elsewhere."""
    way = trained_late if current_device().type == "npu" else trained
    return way(config, **model)


def trained_born_sharded(config: dict[str, Any]) -> dict[str, Any]:
    return wherever(config, born_sharded=True)


def trained_with_frozen(config: dict[str, Any]) -> dict[str, Any]:
    return wherever(config, freezes=True)


def trained_recomputing(config: dict[str, Any]) -> dict[str, Any]:
    return wherever(config, model="torch")
