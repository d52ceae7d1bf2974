"""The peak memory of a rank over the sequence length, with each technique for long sequences.

    python benchmarks/long_sequences.py --output docs/pictures/long_sequences.svg

A GPT (4 layers of width 256, 4 heads, vocabulary 8,192, fp32, AdamW, ZeRO 2, one sequence) trains
two updates, the second of which is measured, in separate processes for each technique and length.
On an accelerator the peak is its allocator's; on a CPU it is the memory that the C library has
allocated, including the tensors of each operation. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
from hadal.plugins.activation_checkpointing.measuring import meter_of
from hadal.plugins.sequence import (
    DistributedAttention,
    TiledMLP,
    linear_cross_entropy,
    mean_over_sequence,
    ring_attention,
)
from hadal.plugins.sparse_attention import SparseSelfAttention, from_config

MIB = 2**20
WIDTH, HEADS, LAYERS, WORDS, TILES = 256, 4, 4, 8192, 8
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
PATTERN = {"sparse_attention": {"mode": "bigbird"}}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sparse attention": {"sparse": True},
    "tiles": {"tiles": True},
    "activation checkpointing": {"recomputes": True},
    "checkpointing and tiles": {"recomputes": True, "tiles": True},
    "Ulysses, 2 ranks": {"ranks": 2},
    "ring attention, 2 ranks": {"ranks": 2, "ring": True},
    "Ulysses, 4 ranks": {"ranks": 4},
    "all but sparse, 4 ranks": {"ranks": 4, "recomputes": True, "tiles": True},
}


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [batch, length, heads, size]."""
    given = (one.transpose(1, 2) for one in (query, key, value))
    return F.scaled_dot_product_attention(*given, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, tiles: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.attention: Attention = dense
        self.tiles = tiles

    def forward(self, hidden: Tensor) -> Tensor:
        given = self.qkv(self.norms[0](hidden)).chunk(3, -1)
        mixed = self.attention(*(one.unflatten(-1, (HEADS, -1)) for one in given))
        hidden = hidden + self.out(mixed.flatten(2))
        normed = self.norms[1](hidden)
        if self.tiles:
            return hidden + TiledMLP.apply(lambda block, some: block.mlp(some), self, normed, TILES)
        return hidden + self.mlp(normed)


class GPT(nn.Module):
    """Layers between an embedding and a tied head; the sum of the losses of targets."""

    def __init__(self, length: int, tiles: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block(tiles) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.tiles = tiles

    def forward(self, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        hidden, weight = self.norm(hidden), self.words.weight
        if self.tiles:
            return linear_cross_entropy(
                hidden, weight, targets, reduction="sum", rows=targets.numel() // TILES
            )
        logits = F.linear(hidden, weight).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")


def sparse(length: int) -> Attention:
    """Attention over a pattern, causal token by token."""
    attend = SparseSelfAttention(from_config(PATTERN, HEADS), max_seq_length=length, causal=True)

    def attention(*given: Tensor) -> Tensor:
        return attend(*(one.transpose(1, 2) for one in given)).transpose(1, 2)

    return attention


def around(group: Any) -> Attention:
    """Ring attention of [batch, length / ranks, heads, size]."""

    def attention(*given: Tensor) -> Tensor:
        return ring_attention(*(one.transpose(1, 2) for one in given), group).transpose(1, 2)

    return attention


def train(technique: str, length: int) -> dict[str, Any]:
    """Train in this process, one of the ranks that share the sequence."""
    choices = TECHNIQUES[technique]
    ranks = choices.get("ranks", 1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2},
        "activation_checkpointing": {"modules": "units"} if choices.get("recomputes") else {},
    }
    torch.manual_seed(0)
    model = GPT(length, choices.get("tiles", False))
    engine, _, _, _ = hadal.initialize(model=model, config=config)
    rank = hadal.comm.get_rank()
    group = engine.topology.sequence_parallel.group if ranks > 1 else None
    for block in model.blocks:
        if choices.get("sparse"):
            block.attention = sparse(length)
        elif choices.get("ring"):
            block.attention = around(group)
        elif group is not None:
            split = DistributedAttention(dense, group)
            block.attention = lambda q, k, v, split=split: split(q, k, v, 0)
    everything = torch.randint(WORDS, (1, length + 1), generator=torch.Generator().manual_seed(1))
    here = slice(rank * length // ranks, (rank + 1) * length // ranks)
    batch = [
        everything[:, :-1][:, here],
        torch.arange(length)[None, here],
        everything[:, 1:][:, here],
    ]
    batch = [one.contiguous().to(engine.device) for one in batch]
    meter, losses, begun = meter_of(engine.device), [], 0.0
    for update in range(2):
        if update:
            meter.take_peak()
            meter.start()
            begun = time.perf_counter()
        total, count = engine(*batch), batch[-1].new_tensor(batch[-1].numel())
        loss = total / count if group is None else mean_over_sequence(total, count, group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    meter.stop()
    found = {"losses": losses, "peak": meter.take_peak(), "seconds": time.perf_counter() - begun}
    engine.destroy()
    return found


def run(technique: str, length: int) -> dict[str, Any]:
    """Train in new processes; return the figures of the rank with the highest peak."""
    ranks = TECHNIQUES[technique].get("ranks", 1)
    start = ["-m", "hadal", "run", "--num_accelerators", str(ranks)] if ranks > 1 else []
    words = [sys.executable, *start, __file__, "--case", technique, "--lengths", str(length)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    told = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"losses"' in line]
    found: dict[str, Any] = max((json.loads(line) for line in told), key=lambda one: one["peak"])
    return found


def main() -> None:
    """Measure every technique, print a table, and draw a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--techniques", default=";".join(TECHNIQUES), help="separated by ;")
    parser.add_argument("--output", type=Path, help="the picture's file")
    parser.add_argument(
        "--json", type=Path, help="the figures; existing ones are not measured again"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.case is not None:
        print(json.dumps(train(args.case, lengths[0])))
        return
    peaks: dict[str, list[float]] = {}
    if args.json is not None and args.json.exists():
        peaks = json.loads(args.json.read_text())
    for technique in args.techniques.split(";"):
        if technique in peaks:
            continue
        rows = [run(technique, length) for length in lengths]
        peaks[technique] = [row["peak"] / MIB for row in rows]
        told = "  ".join(f"{row['peak'] / MIB:7.0f} MiB {row['seconds']:5.1f} s" for row in rows)
        if args.json is not None:
            args.json.write_text(json.dumps(peaks, indent=1))
        print(f"{technique:26s} {told}  loss {rows[-1]['losses'][-1]:.5f}", flush=True)
    print(f"| technique | {' | '.join(f'{length:,}' for length in lengths)} |")
    print("|---|" + "---|" * len(lengths))
    for technique, found in peaks.items():
        print(f"| {technique} | {' | '.join(f'{peak:,.0f}' for peak in found)} |")
    if args.output is not None:
        draw(lengths, peaks, args.output)


def draw(lengths: list[int], peaks: dict[str, list[float]], path: Path) -> None:
    """Draw the peaks over the length, the techniques of several ranks dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for technique, found in peaks.items():
        style = "--" if TECHNIQUES[technique].get("ranks", 1) > 1 else "-"
        axes.plot(lengths, found, style, marker=".", label=technique)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("sequence length")
    axes.set_ylabel("peak memory of a rank, MiB")
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
