"""Step time of stage 3 if ranks take the same path through a model, and if they never do.

A stack of blocks with two experts each is trained on CPU ranks by several engines in turns, in the
same processes. If nothing diverges, each expert gets half of a rank's tokens; if every step
diverges, one expert gets them all, in each block a different one on each rank. So the arithmetic is
the same, and so are the weights to gather. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

import hadal

_EXPERTS = 2


@dataclass(frozen=True)
class Way:
    """One engine of the comparison."""

    divergent_ranks: bool | str
    diverges: bool
    together: bool = False
    """True if a block's experts are one module, gathered as a whole."""

    @property
    def label(self) -> str:
        key = json.dumps(self.divergent_ranks)
        return f"{key}, as a whole" if self.together else key


_WAYS = (
    Way(False, diverges=False),
    Way("auto", diverges=False),
    Way(True, diverges=False),
    Way("auto", diverges=True, together=True),
    Way("auto", diverges=True),
    Way(True, diverges=True),
)


@dataclass
class Found:
    """The figures of one engine, step by step: seconds, and their ratio to the first engine's."""

    clock: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    clock_ratios: list[float] = field(default_factory=list)
    processor_ratios: list[float] = field(default_factory=list)


def _mixed(experts: Sequence[nn.Module], values: Tensor, chosen: int | None) -> Tensor:
    """Send all tokens to one expert, or half of them to each."""
    parts = zip(experts, values.chunk(_EXPERTS), strict=True)
    return (
        torch.cat([expert(part) for expert, part in parts])
        if chosen is None
        else experts[chosen](values)
    )


class Experts(nn.Module):
    """Experts that are gathered together, even if only one is used."""

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, values: Tensor, chosen: int | None) -> Tensor:
        return _mixed(list(self.experts), values, chosen)


class Model(nn.Module):
    """Blocks of a linear layer and two experts."""

    def __init__(self, blocks: int, width: int, *, together: bool = False) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        experts = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
            for _ in range(_EXPERTS * blocks)
        ]
        pairs = [experts[at : at + _EXPERTS] for at in range(0, len(experts), _EXPERTS)]
        self.experts = nn.ModuleList(map(Experts, pairs) if together else experts)
        self.together = together

    def forward(self, values: Tensor, shift: int | None) -> Tensor:
        for place, mixer in enumerate(self.mixers):
            chosen = None if shift is None else (place + shift) % _EXPERTS
            hidden = torch.tanh(mixer(values))
            if self.together:
                values = values + self.experts[place](hidden, chosen)
            else:
                at = _EXPERTS * place
                own = [self.experts[at + number] for number in range(_EXPERTS)]
                values = values + _mixed(own, hidden, chosen)
        return values


def _engine(options: argparse.Namespace, way: Way) -> hadal.Engine:
    torch.manual_seed(0)
    model = Model(options.blocks, options.width, together=way.together)
    block = sum(p.numel() for p in model.parameters()) // options.blocks
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "divergent_ranks": way.divergent_ranks,
            # Each weight is gathered for each use, up to three blocks ahead.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 3 * block,
            "stage3_max_reuse_distance": 0,
        },
    }
    return hadal.initialize(model=model, config=config)[0]


def _step(engine: hadal.Engine, inputs: Tensor, shift: int | None) -> tuple[float, float]:
    """Train one step; return the slower rank's seconds, and the processor's on all ranks."""
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    engine.backward(engine(inputs, shift).square().mean())
    engine.step()
    clock = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    processor = torch.tensor(time.process_time() - used, dtype=torch.float64)
    dist.all_reduce(clock, dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    return clock.item(), processor.item()


def _ratios(mine: Sequence[float], first: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(mine, first, strict=True)]


def _measure(options: argparse.Namespace) -> list[Found]:
    """Step all engines in turns, every other turn in reverse."""
    found = [Found() for _ in _WAYS]
    engines = [_engine(options, way) for way in _WAYS]
    inputs = torch.randn(options.tokens, options.width)
    for turn in range(options.warmup + options.turns):
        order = list(zip(_WAYS, engines, found, strict=True))
        for way, engine, one in order if turn % 2 == 0 else reversed(order):
            shift = turn + dist.get_rank() if way.diverges else None
            clock, processor = _step(engine, inputs, shift)
            if turn >= options.warmup:
                one.clock.append(clock)
                one.processor.append(processor)
    for one in found:
        one.clock_ratios = _ratios(one.clock, found[0].clock)
        one.processor_ratios = _ratios(one.processor, found[0].processor)
    for engine in engines:
        engine.destroy()
    return found


def _rank(rank: int, options: argparse.Namespace, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    hadal.init_distributed(dist_backend="gloo")
    found = _measure(options)
    if rank == 0:
        results.extend(found)
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _table(results: Sequence[Found]) -> str:
    lines = [
        "              |                     |         |   over the first   | processor's seconds",
        "ranks diverge | divergent_ranks     | step ms |  (its middle half) |      over the first",
    ]
    for way, one in zip(_WAYS, results, strict=True):
        low, _, high = quantiles(one.clock_ratios, n=4)
        lines.append(
            f"{'in every step' if way.diverges else 'never':13} | {way.label:19} |"
            f" {1e3 * median(one.clock):7.1f} | {median(one.clock_ratios):5.3f}"
            f" ({low:.2f} to {high:.2f}) | {median(one.processor_ratios):19.3f}"
        )
    return "\n".join(lines)


def _draw(results: Sequence[Found], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = [f"{'diverging' if way.diverges else 'even'}\n{way.label}" for way in _WAYS]
    axes.boxplot([one.clock_ratios for one in results], tick_labels=names, showfliers=False)
    axes.axhline(1.0, linewidth=0.5)
    axes.set(ylabel="step time over the first engine's")
    axes.tick_params(axis="x", labelsize="small")
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> list[Found]:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--blocks", type=int, default=8)
    add("--width", type=int, default=384)
    add("--tokens", type=int, default=256, help="of each rank")
    add("--turns", type=int, default=40, help="measured steps of each engine")
    add("--warmup", type=int, default=6, help="unmeasured steps of each engine")
    add("--processes", type=int, default=2)
    add("--json", type=Path, metavar="FILE", help="write every measurement as JSON")
    add("--output", type=Path, metavar="FILE", help="draw the ratios (PNG)")
    options = parser.parse_args(arguments)
    with processes.Manager() as manager:
        shared = manager.list()
        processes.start_processes(
            _rank, (options, _free_port(), shared), options.processes, start_method="spawn"
        )
        results = list(shared)
    numel = sum(p.numel() for p in Model(options.blocks, options.width).parameters())
    print(f"{numel:,} parameters in fp32 on {options.processes} ranks\n")
    print(_table(results))
    if options.json:
        rows = [{**asdict(way), **asdict(one)} for way, one in zip(_WAYS, results, strict=True)]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.output:
        _draw(results, options.output)
    return results


if __name__ == "__main__":
    main()
