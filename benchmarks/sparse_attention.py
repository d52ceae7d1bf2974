"""The time and memory of block-sparse attention over the length, against dense attention.

    python benchmarks/sparse_attention.py --output docs/pictures/sparse_attention.svg

Forward and backward of 8 heads of 64 in fp32. Dense attention is torch's
`scaled_dot_product_attention` without a mask (causal for the unidirectional pattern). At each
length every pattern is measured once per round, next to dense attention, and the ratios are
computed within a round. Memory is the growth of a process's peak beyond its inputs, each case in
its own process (Linux).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hadal.plugins.sparse_attention import SparseSelfAttention, attention, from_config
from hadal.plugins.sparse_attention.attention import BlockLayout, sparse_attention
from hadal.plugins.sparse_attention.masks import Masks

HEADS, WIDTH = 8, 64
PATTERNS: dict[str, dict[str, Any]] = {
    "fixed": {"mode": "fixed"},
    "fixed, unidirectional": {"mode": "fixed", "attention": "unidirectional"},
    "bigbird": {"mode": "bigbird", "num_random_blocks": 1},
    "bigbird, 2 random, window 5": {
        "mode": "bigbird",
        "num_random_blocks": 2,
        "num_sliding_window_blocks": 5,
    },
    "bslongformer, window 9": {"mode": "bslongformer", "num_sliding_window_blocks": 9},
}
GOALS = {("fixed", 4096): 2.3, ("bigbird", 4096): 2.8, ("bigbird", 8192): 6.0}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_of(name: str, length: int) -> Attention:
    if name.startswith("dense"):
        is_causal = "causal" in name
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return SparseSelfAttention(from_config(PATTERNS[name], HEADS), max_seq_length=length)


def beside(name: str) -> str:
    return "dense, causal" if "unidirectional" in name else "dense"


def inputs_of(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]


def once(attention: Attention, inputs: list[Tensor], gradient: Tensor) -> float:
    start = time.perf_counter()
    torch.autograd.grad(attention(*inputs), inputs, gradient)
    return (time.perf_counter() - start) * 1e3


def times(names: list[str], length: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, by name; the first, which creates the plans, is not counted."""
    inputs = inputs_of(length)
    gradient = torch.randn_like(inputs[0])
    every = list(dict.fromkeys([each for name in names for each in (beside(name), name)]))
    attentions = {name: attention_of(name, length) for name in every}
    found: dict[str, list[float]] = {name: [] for name in every}
    for attempt in range(rounds + 1):
        for name in every if attempt % 2 else reversed(every):
            if attempt == 0 and name.startswith("dense"):
                continue
            spent = once(attentions[name], inputs, gradient)
            if attempt:
                found[name].append(spent)
    return found


def layouts(length: int, share: float) -> dict[str, Tensor]:
    """Layouts with about this fraction of the pairs, in blocks of 16."""
    count = length // 16
    places = torch.arange(count)
    distance = (places[:, None] - places).abs()
    drawn = torch.rand(count, count, generator=torch.Generator().manual_seed(0))
    return {
        "scattered": (drawn < share)[None],
        "window": (distance <= count * (1 - (1 - share) ** 0.5))[None],
        "columns": ((places < share * count) | (distance == 0))[None],
    }


def densities(length: int, rounds: int) -> None:
    """Print the times of layouts by blocks, and whole with a mask."""
    inputs = inputs_of(length)
    gradient = torch.randn_like(inputs[0])
    print(f"at {length}:\n| layout | causal | share of pairs | blocks ms | whole ms | chosen |")
    print("|---|---|---|---|---|---|")
    for is_causal, share in itertools.product((False, True), (0.3, 0.45, 0.6, 0.8)):
        for name, found in layouts(length, share).items():
            layout = BlockLayout(found, 16)
            chosen = "whole" if layout.is_full(is_causal=is_causal) else "blocks"
            attend = partial(sparse_attention, layout=layout, masks=Masks(is_causal=is_causal))
            spent: dict[float, list[float]] = {math.inf: [], -1.0: []}
            for _ in range(rounds + 1):  # the first makes the plans
                for threshold, each in spent.items():
                    attention._FULL = threshold
                    each.append(once(attend, inputs, gradient))
            attention._FULL = 1.0
            blocks, whole = (statistics.median(each[1:]) for each in spent.values())
            pairs = (found.tril() if is_causal else found).float().mean()
            cells = (name, is_causal, f"{pairs:.2f}", f"{blocks:.0f}", f"{whole:.0f}", chosen)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def peak_of(name: str, length: int) -> None:
    """Print the MiB that a first forward and backward add to the process's peak."""
    small = inputs_of(16)
    F.scaled_dot_product_attention(*small).sum().backward()
    inputs = inputs_of(length)
    gradient = torch.randn_like(inputs[0])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    once(attention_of(name, length), inputs, gradient)
    print(resident("VmHWM") - before)


def resident(word: str) -> float:
    """Return MiB of this process's memory (VmRSS), or its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(word)]
    return int(line.split()[1]) / 1024


def memory(name: str, length: int) -> float:
    words = [sys.executable, __file__, "--peak", name, "--lengths", str(length)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for length in args.lengths:
        found = times(args.patterns, length, args.rounds)
        for name, spent in found.items():
            row: dict[str, Any] = {
                "pattern": name,
                "length": length,
                "ms": statistics.median(spent),
            }
            if name in PATTERNS:
                ratios = [d / s for d, s in zip(found[beside(name)], spent, strict=True)]
                row["ratio"] = statistics.median(ratios)
                row["range"] = [min(ratios), max(ratios)]
            rows.append(row)
            print(
                f"{length:6d}  {name:28s} {row['ms']:8.1f} ms"
                + (f"  {row['ratio']:5.2f} x dense" if "ratio" in row else ""),
                flush=True,
            )
    return rows


def add_memory(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["MiB"] = memory(row["pattern"], row["length"])
        print(f"{row['length']:6d}  {row['pattern']:28s} {row['MiB']:8.1f} MiB", flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| length | attention | ms | times faster than dense | MiB |", "|---|---|---|---|---|"]
    for row in rows:
        ratio = ""
        if "ratio" in row:
            ratio = f"{row['ratio']:.1f} ({row['range'][0]:.1f} to {row['range'][1]:.1f})"
        mib = f"{row['MiB']:.0f}" if "MiB" in row else ""
        name = row["pattern"]
        lines.append(f"| {row['length']:,} | {name} | {row['ms']:.0f} | {ratio} | {mib} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row["pattern"] for row in rows):
        own = [row for row in rows if row["pattern"] == name]
        lengths = [row["length"] for row in own]
        style = {"linestyle": "--"} if name.startswith("dense") else {}
        left.loglog(lengths, [row["ms"] for row in own], marker=".", label=name, **style)
        if all("MiB" in row for row in own):
            right.plot(lengths, [row["MiB"] for row in own], marker=".", label=name, **style)
    lengths = sorted({row["length"] for row in rows})
    ticks = (left, lengths), (right, lengths[-3:])
    for (axes, shown), title in zip(ticks, ("milliseconds", "MiB beyond the inputs"), strict=True):
        axes.set_title(f"{title}, forward and backward", fontsize=10)
        axes.set_xlabel("sequence length")
        axes.set_xticks(shown, [f"{length:,}" for length in shown], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    right.set_ylim(0, None)
    left.legend(fontsize=7, frameon=False)
    figure.savefig(path)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    found = {(row["pattern"], row["length"]): row.get("ratio", 0.0) for row in rows}
    return [
        f"{name} at {length}: {found[name, length]:.2f}, goal {goal}"
        for (name, length), goal in GOALS.items()
        if (name, length) in found and found[name, length] < goal
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384")
    parser.add_argument("--patterns", default=";".join(PATTERNS), help="separated by ;")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--times", type=Path, help="the --json of an earlier run, for its times")
    parser.add_argument("--output", type=Path, help="file for the plot over the length")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--densities", action="store_true", help="blocks against a mask instead")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.lengths = [int(length) for length in args.lengths.split(",")]
    args.patterns = args.patterns.split(";")
    torch.set_num_threads(args.threads)
    if args.peak:
        peak_of(args.peak, args.lengths[0])
        return 0
    if args.densities:
        for length in args.lengths:
            densities(length, args.rounds)
        return 0
    rows = json.loads(args.times.read_text()) if args.times else measure(args)
    if not args.no_memory and not all("MiB" in row for row in rows):
        add_memory(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.output:
        draw(rows, args.output)
    print(table(rows))
    for line in missed(rows):
        print(f"missed: {line}")
    return int(args.strict and bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
