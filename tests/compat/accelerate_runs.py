"""A training loop written for Accelerate, for the ranks of a pool."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hadal
from hadal.comm import get_rank
from hadal.errors import UsageError

_SAMPLES, _MICRO, _STEPS, _ACCUMULATION = 48, 2, 6, 2
# Small enough for fp16 under its first scale, 2^16, now and then.
_SHARE, _CLIP = 0.5, 1.0


class Net(nn.Module):
    """A layer used twice, a buffer and a frozen parameter."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A few numbers."""
        y = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        y = torch.tanh(self.middle(torch.tanh(self.middle(y))))
        return self.last(y).squeeze(-1).float() * self.scale.float() * self.frozen.mean().float()


def data() -> TensorDataset:
    """Always the same."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(_SAMPLES, 4, generator=draw)
    return TensorDataset(x, x[:, 0] - x[:, 1] * x[:, 2])


def net() -> Net:
    """Always the same."""
    torch.manual_seed(5)
    return Net()


def rate(step: int) -> float:
    """A warm-up of three steps."""
    return min(1.0, (step + 1) / 3)


def plain() -> dict[str, Any]:
    """The results of one process of torch on all ranks' batches together."""
    model = net()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses, norms = [], []
    x, y = data().tensors
    for batch in range(_STEPS * _ACCUMULATION):
        rows = slice(batch * 2 * _MICRO, (batch + 1) * 2 * _MICRO)
        loss = _SHARE * nn.functional.mse_loss(model(x[rows]), y[rows])
        losses.append(loss.item())
        (loss / _ACCUMULATION).backward()
        if batch % _ACCUMULATION:
            norms.append(float(nn.utils.clip_grad_norm_(trained, _CLIP)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            schedule.step()  # Accelerate steps it once for each process
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def plain_as_deepspeed(stage: int) -> dict[str, Any]:
    """The same in bf16 with DeepSpeed's roundings, written out: two ranks in one process.

    Masters start from rounded weights. Gradients are averaged over the ranks, and added up over
    micro-batches, in bf16: at stage 1 added up first, above it averaged first.
    """
    model = net().to(torch.bfloat16)
    weights = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses, norms = [], []
    x, y = data().tensors
    nothing = [torch.zeros_like(p) for p in weights]
    sums = [nothing, nothing]
    for batch in range(_STEPS * _ACCUMULATION):
        found, of_ranks = [], []
        for rank in range(2):
            start = (2 * batch + rank) * _MICRO
            rows = slice(start, start + _MICRO)
            loss = _SHARE * nn.functional.mse_loss(model(x[rows]), y[rows])
            of_ranks.append(torch.autograd.grad(loss / _ACCUMULATION, weights))
            found.append(loss.item())
        losses.append(sum(found) / 2)
        if stage > 1:
            of_ranks = [[(a + b) / 2 for a, b in zip(*of_ranks, strict=True)]] * 2
        for rank, gradients in enumerate(of_ranks):
            sums[rank] = [a + b for a, b in zip(sums[rank], gradients, strict=True)]
        if batch % _ACCUMULATION:
            for master, a, b in zip(masters, *sums, strict=True):
                master.grad = ((a + b) / 2).float()
            norms.append(float(nn.utils.clip_grad_norm_(masters, _CLIP)))
            optimizer.step()
            schedule.step()
            schedule.step()
            sums = [nothing, nothing]
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master)
    return {"losses": losses, "norms": norms}


def run(folder: Path, stage: int, precision: str = "no") -> dict[str, Any]:
    """Train with Accelerate; save, continue, load and continue again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=_ACCUMULATION,
        gradient_clipping=_CLIP,
        zero3_save_16bit_model=True,
        zero3_init_flag=False,
    )
    accelerator = Accelerator(
        mixed_precision=precision,
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=_ACCUMULATION,
    )
    inner = net()
    optimizer = torch.optim.AdamW([p for p in inner.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    loader = DataLoader(data(), batch_size=_MICRO)
    model, optimizer, loader, schedule = accelerator.prepare(inner, optimizer, loader, schedule)

    def train(batches: int) -> tuple[list[float], list[float]]:
        losses, norms = [], []
        for _, (x, y) in zip(range(batches), loader, strict=False):
            with accelerator.accumulate(model):
                loss = _SHARE * nn.functional.mse_loss(model(x).float(), y.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), _CLIP))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        return losses, norms

    losses, norms = train(_STEPS * _ACCUMULATION)
    told: dict[str, Any] = {
        "engine": type(model).__name__,
        "is_unwrapped": accelerator.unwrap_model(model) is inner,
        "losses": losses,
        "norms": norms,
        "steps": model.global_steps,
        "config": accelerator.deepspeed_config is model.config,
        "was_skipped": optimizer.step_was_skipped,
        "weights": accelerator.get_state_dict(model),
    }
    accelerator.save_state(str(folder / "state"))
    told["files"] = sorted(path.name for path in (folder / "state").iterdir())
    told["after"] = train(4)
    accelerator.load_state(str(folder / "state"))
    told["again"] = train(4)
    gathered = accelerator.gather_for_metrics(torch.full((1,), float(get_rank())))
    told["gathered"] = gathered.tolist()
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return told


def run_configured() -> dict[str, Any]:
    """Train with the optimizer and the schedule of the configuration."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {"stage": 3},
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    inner = net()
    dummy = DummyOptim([p for p in inner.parameters() if p.requires_grad], lr=1e-2)
    prepared = accelerator.prepare(
        inner,
        dummy,
        DataLoader(data(), batch_size=_MICRO),
        DummyScheduler(dummy, total_num_steps=24, warmup_num_steps=2),
    )
    model, optimizer, loader, schedule = prepared
    rates = []
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    told = {"rates": rates, "schedule": type(model.lr_scheduler).__name__}
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    return told


def run_alone(is_driven: bool) -> str:
    """Initialize while Accelerate counts one process; return what the program is told."""
    AcceleratorState._reset_state(reset_partial_state=True)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("hadal.engine.checks")
    log.addHandler(handler)
    try:
        if is_driven:
            Accelerator()
        else:
            PartialState()
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
        engine, *_ = hadal.initialize(model=net(), config=config)
        engine.destroy()
    except UsageError as error:
        return f"refused: {error}"
    finally:
        log.removeHandler(handler)
        AcceleratorState._reset_state(reset_partial_state=True)
    return "\n".join(told)
