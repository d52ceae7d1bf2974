"""The speed of the elementwise optimizers relative to the speed of memory.

Each one is measured in turn with a plain copy and torch's own optimizers, in one process and on one
core. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import hadal
from hadal.comm import Ranks
from hadal.device import current_device, synchronize
from hadal.optim.elementwise import UncorrectedAdam
from hadal.optim.lion import Lion
from hadal.optim.norm import global_norm
from hadal.optim.step import FlatStepper
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.grouping import BucketPlan, Member
from hadal.zero.offload import Offload
from hadal.zero.policy import Partition, Precision
from hadal.zero.sharing import Sharing

# The fraction of a copy's bytes per second that AdamW must reach.
GOAL_CPU, GOAL_ACCELERATOR = 0.90, 0.85
# The factor by which clipping multiplies gradients.
CLIP = 0.7
F32, BF16 = torch.float32, torch.bfloat16

_ON_DEVICE = Offload()

Action = Callable[[], object]
Stopwatch = Callable[[], float]
"""Runs, and returns its seconds."""


@dataclass(frozen=True)
class Precisions:
    """One row of dtypes: the gradient's, the weights', the master's and the state's."""

    gradient: torch.dtype
    weights: torch.dtype
    master: torch.dtype
    state: torch.dtype

    def nbytes(self, kept: int) -> int:
        """Bytes that an update must move for each element, with `kept` values of state.

        The gradient is read; master and state are read and written; weights that are not the
        master are written.
        """
        cast = self.weights.itemsize if self.weights != self.master else 0
        owned = 2 * self.master.itemsize + 2 * kept * self.state.itemsize
        return self.gradient.itemsize + owned + cast


PRECISIONS = {
    "fp32": Precisions(F32, F32, F32, F32),
    "bf16, fp32 master": Precisions(BF16, BF16, F32, F32),
    "bf16, fp32 state": Precisions(BF16, BF16, BF16, F32),
    "bf16 throughout": Precisions(BF16, BF16, BF16, BF16),
}


@dataclass(frozen=True)
class Kind:
    """An optimizer that is measured."""

    make: Callable[[list[nn.Parameter]], Optimizer]
    kept: int
    """Values of state per element."""


KINDS = {
    "AdamW": Kind(lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.01), 2),
    "Adam": Kind(lambda p: torch.optim.Adam(p, lr=1e-4), 2),
    "AdamW uncorrected": Kind(lambda p: UncorrectedAdam(p, lr=1e-4, weight_decay=0.01), 2),
    "Lion": Kind(lambda p: Lion(p, lr=1e-4, weight_decay=0.01), 1),
    "SGD with momentum": Kind(lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9), 1),
    "Adagrad": Kind(lambda p: torch.optim.Adagrad(p, lr=1e-4), 1),
}


@dataclass(frozen=True)
class Row:
    """The result of one contestant."""

    kind: str
    precision: str
    who: str
    bytes_per_element: int
    milliseconds: float
    gigabytes_per_second: float
    of_copy: float


def gradients_of(
    numel: int, precisions: Precisions, device: torch.device, offload: Offload = _ON_DEVICE
) -> Gradients:
    """A bucket of one parameter, with a mean gradient as after a reduction."""
    parameter = nn.Parameter(torch.randn(numel, device=device).to(precisions.weights))
    plan = BucketPlan("benchmark", Partition(), [Member("weight", parameter, 0)], [])
    precision = Precision(
        compute=precisions.weights,
        master=precisions.master,
        accumulate=precisions.gradient,
        reduce=precisions.gradient,
        state=precisions.state,
    )
    sharing = Sharing.over(Ranks.world())
    gradients = Gradients(Bucket(plan, precision, sharing, device, offload=offload))
    gradients.count_as_zero()
    gradients.mean.normal_(std=1e-3)
    return gradients


def hadal_step(kind: Kind, gradients: Gradients, multiplier: float) -> Action:
    """Hadal's update of these gradients."""
    optimizer = kind.make(list(gradients.bucket.parameters))
    stepper = FlatStepper(optimizer, [gradients])
    return lambda: stepper.step(multiplier)


def torch_step(
    gradients: Gradients, options: dict[str, bool], *, keeps_cast: bool = False
) -> Action:
    """torch's AdamW as a program would use it: with 16-bit weights, on its own master.

    With `keeps_cast`, gradients are cast into the same memory each time.
    """
    bucket = gradients.bucket
    master = nn.Parameter(bucket.full.to(F32, copy=True))
    optimizer = torch.optim.AdamW([master], lr=1e-4, weight_decay=0.01, **options)
    kept = torch.empty_like(master) if keeps_cast else None

    def step() -> None:
        master.grad = gradients.mean.to(F32) if kept is None else kept.copy_(gradients.mean)
        optimizer.step()
        if bucket.full.dtype != F32:
            bucket.full.copy_(master.detach())

    return step


def clocked(action: Action, device: torch.device) -> Stopwatch:
    """Seconds of an action, until the device has finished it."""

    def act() -> float:
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        return time.perf_counter() - start

    return act


def in_turns(watches: Mapping[str, Stopwatch], rounds: int) -> dict[str, list[float]]:
    """Seconds of each one in each round; every other round runs in reverse."""
    for watch in watches.values():
        watch()
    seconds: dict[str, list[float]] = {name: [] for name in watches}
    for number in range(rounds):
        for name in list(watches)[:: -1 if number % 2 else 1]:
            seconds[name].append(watches[name]())
    return seconds


def measure(name: str, precision: str, numel: int, rounds: int, device: torch.device) -> list[Row]:
    """One optimizer in one row of dtypes, a copy of the same number of bytes, and its peers."""
    gc.collect()
    kind, precisions = KINDS[name], PRECISIONS[precision]
    nbytes = precisions.nbytes(kind.kept)
    # A copy reads and writes each byte: its bytes are counted twice as well.
    source = torch.randn(nbytes * numel // 8, device=device)
    target = torch.empty_like(source)
    gradients = gradients_of(numel, precisions, device)
    actions: dict[str, Action] = {
        "copy": lambda: target.copy_(source),
        "Hadal": hadal_step(kind, gradients, 1.0),
        "Hadal, clipping": hadal_step(kind, gradients, CLIP),
    }
    if name == "AdamW" and precisions.master == F32:
        actions["torch, fused"] = torch_step(gradients, {"fused": True})
        actions["torch, foreach"] = torch_step(gradients, {"foreach": True})
    counted = dict.fromkeys(actions, nbytes)
    if name == "AdamW":
        actions["the norm"] = lambda: global_norm([gradients], gradients.bucket.sharing)
        counted["the norm"] = precisions.gradient.itemsize
    seconds = in_turns({who: clocked(act, device) for who, act in actions.items()}, rounds)
    rows = []
    for who, times in seconds.items():
        # Ratios are computed within a round, so that a machine that slows down does not bias them.
        shares = [
            copy / spent * counted[who] / nbytes
            for copy, spent in zip(seconds["copy"], times, strict=True)
        ]
        rate = counted[who] * numel / median(times) / 1e9
        rows.append(
            Row(name, precision, who, counted[who], median(times) * 1e3, rate, median(shares))
        )
    return rows


def _told(rows: Sequence[Row], goal: float) -> tuple[str, bool]:
    """The table, with a verdict on each row that has a goal; and whether all are reached."""
    lines = [
        "| optimizer | dtypes | who | bytes/element | ms | GB/s | of a copy | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reached = True
    for row in rows:
        verdict = ""
        judged = row.kind == "AdamW" and row.precision in ("fp32", "bf16, fp32 master")
        if judged and row.who.startswith("Hadal"):
            passes = row.of_copy >= goal
            reached = reached and passes
            verdict = f"{'PASS' if passes else 'FAIL'} (goal {goal:.2f})"
        lines.append(
            f"| {row.kind} | {row.precision} | {row.who} | {row.bytes_per_element} |"
            f" {row.milliseconds:.1f} | {row.gigabytes_per_second:.1f} | {row.of_copy:.2f} |"
            f" {verdict} |"
        )
    return "\n".join(lines), reached


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--numel", type=int, default=1 << 25, help="elements that are stepped")
    add("--rounds", type=int, default=11, help="measured rounds")
    add("--threads", type=int, default=1, help="threads on a CPU; 1 is bound to one core")
    add("--optimizers", default=",".join(KINDS), help="only these")
    add("--all", action="store_true", help="every optimizer in every row of dtypes")
    add("--json", type=Path, help="also write the figures here")
    add("--strict", action="store_true", help="exit with 1 if a goal is missed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and judge."""
    options = _parse(arguments)
    torch.manual_seed(0)
    hadal.init_distributed()
    device = current_device()
    rows: list[Row] = []
    with kept_to_threads(options.threads):
        for name, precision in product(KINDS, PRECISIONS):
            if _is_wanted(options, name, precision):
                rows += measure(name, precision, options.numel, options.rounds, device)
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    text, reached = _told(rows, GOAL_CPU if device.type == "cpu" else GOAL_ACCELERATOR)
    threads = f"{options.threads} thread(s), " if device.type == "cpu" else ""
    print(f"{options.numel} elements on {device}, {threads}torch {torch.__version__}\n\n{text}")
    if options.json:
        found: dict[str, Any] = {"torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    torch.distributed.destroy_process_group()
    return 1 if options.strict and not reached else 0


@contextmanager
def kept_to_threads(threads: int) -> Iterator[None]:
    """Use this many threads on a CPU; a single one is bound to one core."""
    torch.set_num_threads(threads)
    if threads > 1 or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _is_wanted(options: argparse.Namespace, name: str, precision: str) -> bool:
    if options.all:
        return True
    # Only informative rows: the other dtypes are measured only for AdamW.
    listed = name in options.optimizers.split(",")
    return listed and (name == "AdamW" or precision in ("fp32", "bf16, fp32 master"))


if __name__ == "__main__":
    sys.exit(main())
