"""The time that pipeline stages wait for each other, by schedule.

Run it with `torchrun --nproc-per-node 2 benchmarks/pipeline.py`. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import hadal
from hadal.comm import get_rank, get_world_size
from hadal.plugins.pipeline import LayerSpec, PipelineModule
from hadal.plugins.pipeline.orders import idle_share, order_of

_SCHEDULES = {"1f1b": 1, "gpipe": 1, "zero_bubble": 1, "interleaved": 2}
_GOAL = 1.1


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_time = backward
        time.sleep(forward)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.backward_time)
        return gradient, None, None


class Sleeper(nn.Module):
    """Sleeps 20 ms in forward and 40 ms in backward, divided by the layers (chunks) of a stage."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.times = 0.02 / share, 0.04 / share

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = _Sleep.apply(value * self.scale, *self.times)  # type: ignore[no-untyped-call]
        return found


class Layer(nn.Module):
    """A linear layer: its forward and both parts of its backward are equal work."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self.linear(value)
        return found


def mean(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss."""
    return (outputs - labels).square().mean()


def engine_of(schedule: str, layers: list[LayerSpec], rows: int, micro_batches: int) -> Any:
    """Return the engine of this stage."""
    module = PipelineModule(
        layers,
        num_stages=get_world_size(),
        loss_fn=mean,
        partition_method="uniform",
        chunks=_SCHEDULES[schedule],
    )
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "pipeline": {"schedule": schedule},
    }
    return hadal.initialize(model=module, config=config)[0]


def seconds(engine: Any, batch: tuple[Tensor, Tensor], micro_batches: int) -> float:
    """Return the wall time of one batch."""
    hadal.comm.barrier()
    start = time.perf_counter()
    engine.train_batch(iter([batch] * micro_batches))
    return time.perf_counter() - start


def rows_of(
    found: dict[tuple[str, str], list[float]], count: int, stages: int
) -> list[dict[str, Any]]:
    """Return a row for each kind of layers and schedule."""
    rows = []
    for (kind, name), taken in found.items():
        chunks = _SCHEDULES[name]
        orders = [order_of(name, count, stages, stage, chunks) for stage in range(stages)]
        idle = idle_share(orders)
        ideal = count * 0.06 / (1 - idle) if kind == "sleeps" and name != "zero_bubble" else None
        time_taken = statistics.median(taken)
        against = statistics.median(
            one / usual for one, usual in zip(taken, found[kind, "1f1b"], strict=True)
        )
        rows.append({
            "layers": kind, "schedule": name, "seconds": time_taken, "of 1f1b": against,
            "idle": idle, "of ideal": None if ideal is None else time_taken / ideal,
        })  # fmt: skip
    return rows


def main() -> int:
    """Measure all schedules in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4, help="linear ones of each stage")
    parser.add_argument("--width", type=int, default=1024, help="of linear layers")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hadal.init_distributed()
    stages, count = get_world_size(), options.micro_batches
    values = {"sleeps": torch.zeros(1, 4), "computes": torch.randn(options.rows, options.width)}
    engines = {}
    for name, chunks in _SCHEDULES.items():
        kinds = {
            "sleeps": [LayerSpec(Sleeper, chunks)] * (chunks * stages),
            "computes": [LayerSpec(Layer, options.width)] * (options.layers * stages),
        }
        for kind, layers in kinds.items():
            engines[kind, name] = engine_of(name, layers, len(values[kind]), count)
    found: dict[tuple[str, str], list[float]] = {key: [] for key in engines}
    for turn in range(options.rounds + 1):
        for key, engine in list(engines.items())[:: 1 if turn % 2 else -1]:
            value = values[key[0]]
            taken = seconds(engine, (value, value), count)
            if turn:
                found[key].append(taken)
    rows = rows_of(found, count, stages)
    if get_rank():
        return 0
    print(f"{stages} stages, {count} micro-batches, medians of {options.rounds} rounds")
    print(f"{'layers':10}{'schedule':13}{'s':>8}{'of 1f1b':>9}{'idle':>7}{'of ideal':>10}")
    for row in rows:
        ideal = "" if row["of ideal"] is None else f"{row['of ideal']:.3f}"
        print(
            f"{row['layers']:10}{row['schedule']:13}{row['seconds']:8.3f}{row['of 1f1b']:9.3f}"
            f"{row['idle']:7.1%}{ideal:>10}"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    missed = [row for row in rows if row["of ideal"] is not None and row["of ideal"] > _GOAL]
    for row in missed:
        print(f"missed: {row['schedule']} took {row['of ideal']:.3f} of its ideal time")
    return int(bool(missed) and options.strict)


if __name__ == "__main__":
    sys.exit(main())
