"""The peak memory of a GPT with each option of `activation_checkpointing`, and its prediction.

    python benchmarks/activation_checkpointing.py --output recomputed.svg

A GPT-2-shaped model trains a few updates in a separate process for each option. On an accelerator
the peak is its allocator's; on a CPU it is the memory that the C library has allocated, including
the tensors of each operation, and the growth of the process's resident memory is shown too. See
``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import hadal
from hadal.plugins.activation_checkpointing.measuring import meter_of

MIB = 2**20
UPDATES = 5  # the second is measured, the fourth checked


class Block(nn.Module):
    """A transformer layer with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (
            t.view(shape).transpose(1, 2) for t in self.qkv(self.norms[0](hidden)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).reshape(hidden.shape)))
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norms[1](hidden)))))


class GPT(nn.Module):
    """Layers between an embedding and a tied head."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.words = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.words.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Groups:
    """All ranks hold parts of one model: here, the whole of it each, with the same inputs."""

    def __init__(self) -> None:
        hadal.init_distributed()
        alone = [dist.new_group([rank]) for rank in range(hadal.comm.get_world_size())]
        mine = alone[hadal.comm.get_rank()]
        for kind, group in (("model_parallel", dist.group.WORLD), ("data_parallel", mine)):
            setattr(self, f"get_{kind}_group", lambda group=group: group)
            setattr(self, f"get_{kind}_rank", lambda group=group: dist.get_rank(group))
            setattr(self, f"get_{kind}_world_size", lambda group=group: dist.get_world_size(group))


def train(args: argparse.Namespace, section: dict[str, Any]) -> dict[str, Any]:
    """Train in this process; return losses, the peak of an update, and the predicted peak."""
    gc.collect()  # an engine that was trained before in this process
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": args.stage},
        "activation_checkpointing": section,
    }
    if args.bf16:
        config["bf16"] = {"enabled": True}
    model = GPT(args)
    mpu = Groups() if section.get("partition_activations") else None
    engine, _, _, _ = hadal.initialize(model=model, config=config, mpu=mpu)
    budgeted = next((one for one in engine.listeners if hasattr(one, "verdict")), None)
    losses, seconds, peak = [], [], 0
    for update in range(UPDATES):
        tokens = torch.randint(args.vocabulary, (args.batch, args.length)).to(engine.device)
        is_last = update == UPDATES - 1
        meter = meter_of(engine.device)
        if is_last:
            meter.take_peak()
            meter.start()
        begun = time.perf_counter()
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if is_last:
            meter.stop()
            peak = meter.take_peak()
        else:
            seconds.append(time.perf_counter() - begun)
    found: dict[str, Any] = {"losses": losses, "peak": peak, "seconds": seconds[-1]}
    if budgeted is not None and budgeted.verdict is not None:
        verdict = budgeted.verdict
        found |= {"promised": verdict.peak, "least": verdict.least, "most": verdict.most}
        found["choices"] = [choice.name for choice in verdict.choices.values()]
    engine.destroy()
    return found


def run(args: argparse.Namespace, section: dict[str, Any]) -> dict[str, Any]:
    """Train in a new process; in two, if they share the inputs of blocks."""
    start = []
    if section.get("partition_activations"):
        start = ["-m", "hadal", "run", "--num_accelerators", "2"]
    command = [sys.executable, *start, __file__, *sys.argv[1:], "--section", json.dumps(section)]
    command += ["--threads", str(args.threads)]  # the same everywhere, or sums round differently
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    told = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"losses"' in line]
    found: dict[str, Any] = json.loads(told[0])
    return found


def main() -> None:
    """Measure every option, print a table, and draw a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"layers": 12, "length": 1024, "width": 256, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"vocabulary": 4096, "batch": 2, "stage": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--output", type=Path, help="the picture's file")
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if a prediction is off by more than 5 %%"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.section is not None:
        print(json.dumps(train(args, json.loads(args.section))))
        return
    rows: dict[str, dict[str, Any]] = {"nothing recomputed": run(args, {})}
    rows["every unit recomputed"] = run(args, {"modules": "units"})
    sharded = {"modules": "units", "partition_activations": True}
    if not torch.accelerator.is_available():
        rows["and inputs sharded over 2 ranks"] = run(args, sharded)
    else:
        rows["and inputs on the host"] = run(args, {"modules": "units", "cpu_checkpointing": True})
    most, least = (rows[name]["peak"] for name in list(rows)[:2])
    for share in (0.25, 0.5, 0.75):
        budget = int(least + share * (most - least))
        name = f"memory_budget {budget / MIB:,.0f} MiB"
        rows[name] = run(args, {"memory_budget": budget})
    # A table also predicts those two peaks.
    rows["nothing recomputed"]["promised"] = rows[name]["most"]
    rows["every unit recomputed"]["promised"] = rows[name]["least"]
    assert len({tuple(row["losses"]) for row in rows.values()}) == 1, "losses differ"
    show(rows, args.layers)
    if args.output is not None:
        draw(rows, args.output)
    promised = [row for row in rows.values() if "promised" in row]
    if args.strict and any(abs(row["peak"] / row["promised"] - 1) > 0.05 for row in promised):
        raise SystemExit("missed: a peak is off by more than 5 % of the prediction")


def show(rows: dict[str, dict[str, Any]], layers: int) -> None:
    """Print the table."""
    print("| option | recomputed | peak MiB | predicted MiB | off by | seconds |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        count = layers * (name != "nothing recomputed")
        if "choices" in row:
            count = sum(choice != "STORED" for choice in row["choices"])
        promise = ["", ""]
        if "promised" in row:
            off = row["peak"] / row["promised"] - 1
            promise = [f"{row['promised'] / MIB:,.0f}", f"{off:+.1%}"]
        cells = [name, str(count), f"{row['peak'] / MIB:,.0f}", *promise, f"{row['seconds']:.2f}"]
        print(f"| {' | '.join(cells)} |")


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the peaks as bars, with a mark at each prediction."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.5 * len(rows) + 1))
    names = list(rows)[::-1]
    axes.barh(
        names, [rows[name]["peak"] / MIB for name in names], color="#2a8cc0", label="measured"
    )
    marked = [name for name in names if "promised" in rows[name]]
    promised = [rows[name]["promised"] / MIB for name in marked]
    axes.plot(
        promised, marked, "|", color="#e0823d", markersize=22, markeredgewidth=3, label="promised"
    )
    axes.set_xlabel("peak memory of an update, MiB")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
