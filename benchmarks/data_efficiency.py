"""Validation loss with and without the curricula and token dropping of `docs/data.md`.

    python benchmarks/data_efficiency.py --json benchmarks/results/data_efficiency.json \
        --output docs/pictures/data_efficiency.svg

A small demo GPT (examples/gpt) learns Python's own source text on one CPU thread. Every run reads
the same number of tokens, with three seeds each: as it is (baseline), with short windows first,
with windows of common bytes first, with random token dropping, and with short windows and token
dropping together. Each run's learning rate decays over its own updates. Seconds are processor time
of training, without validation: a busy machine does not count.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import hadal
from hadal.data.loader import RepeatingLoader
from hadal.plugins.data_efficiency.indexed import RowsBuilder
from hadal.plugins.data_efficiency.pacing import PaceRule, difficulty_at
from hadal.plugins.data_efficiency.token_drop import convert_to_random_ltd

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "gpt"))
from data import batch, read_standard_library
from model import GPT, Block, Shape

METHODS = {
    "baseline": (),
    "short first": ("length",),
    "common first": ("rarity",),
    "token dropping": ("dropping",),
    "short first + dropping": ("length", "dropping"),
}
ROWS, POINTS = 8, 16


@dataclass(frozen=True)
class Task:
    """The model, the tokens to read, and the windows of text."""

    shape: Shape
    tokens: int
    rate: float

    @property
    def updates(self) -> int:
        """Updates of a run that reads whole windows."""
        return self.tokens // (ROWS * self.shape.context)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Adjacent windows of a text: the bytes, and the next bytes."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def write_rarity(windows: Windows, folder: Path) -> Path:
    """Write the windows in the order of their rarity: the mean of -log p of their bytes."""
    count = len(windows) * windows.context
    rows = windows.text[:count].numpy().reshape(len(windows), -1)
    shares = np.bincount(rows.ravel(), minlength=256) / count
    order = np.argsort(-np.log(np.maximum(shares, 1e-12))[rows].mean(1), kind="stable")
    path = folder / "rarity_index_to_sample_percentile_merged"
    with RowsBuilder(path, np.int64) as builder:
        for part in np.array_split(order, 100):
            builder.add(part)
    return path


def length_rule(task: Task) -> PaceRule:
    """Return the length: from a quarter to all of it over 40 % of the baseline's updates."""
    full = task.shape.context
    return PaceRule("fixed_linear", full // 4, full, total=int(task.updates * 0.4), multiple=8)


def lengths_of(task: Task, features: tuple[str, ...]) -> Iterator[int]:
    """Yield the length of each update until the tokens are read."""
    read, update = 0, 0
    while read < task.tokens:
        update += 1
        is_short = "length" in features
        length = difficulty_at(length_rule(task), update) if is_short else task.shape.context
        read += ROWS * length
        yield length


def config_of(task: Task, features: tuple[str, ...], updates: int, rarity: Path, seed: int) -> Any:
    rule, full = length_rule(task), task.shape.context
    pace = {"total_curriculum_step": rule.total, "difficulty_step": rule.multiple}
    middle = list(range(1, task.shape.depth - 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": task.rate, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": updates, "warmup_num_steps": updates // 20},
        },
        "curriculum_learning": {
            "enabled": "length" in features,
            "curriculum_type": "seqlen",
            "min_difficulty": rule.first,
            "max_difficulty": full,
            "schedule_type": "fixed_linear",
            "schedule_config": pace,
        },
    }
    metric = {
        "index_to_sample_path": str(rarity),
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 20,
        "max_difficulty": 100,
        "schedule_type": "fixed_root",
        "schedule_config": {**pace, "difficulty_step": 1, "root_degree": 2},
    }
    dropping = {
        "enabled": "dropping" in features,
        "total_layer_num": task.shape.depth,
        "random_ltd_layer_num": len(middle),
        "random_ltd_layer_id": middle,
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": full // 2,
            "max_value": full,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": int(updates * 0.7), "seq_per_step": 8},
        },
    }
    sampling = {"enabled": "rarity" in features, "curriculum_metrics": {"rarity": metric}}
    config["data_efficiency"] = {
        "seed": seed,
        "data_sampling": {"curriculum_learning": sampling},
        "data_routing": {"random_ltd": dropping},
    }
    return config


def run(task: Task, name: str, seed: int, text: Any, rarity: Path) -> dict[str, Any]:
    """Train once; return the validation losses by tokens and seconds."""
    features = METHODS[name]
    lengths = list(lengths_of(task, features))
    torch.manual_seed(seed)
    model = GPT(task.shape)
    if "dropping" in features:
        convert_to_random_ltd(model, Block)
    engine, _, loader, _ = hadal.initialize(
        model=model,
        training_data=Windows(text.train, task.shape.context),
        config=config_of(task, features, len(lengths), rarity, seed),
    )
    batches = iter(RepeatingLoader(loader))
    points, tokens, seconds, due = [], 0, 0.0, 0.0
    for length in [*lengths, 0]:
        if tokens >= due or not length:
            points.append((tokens, round(seconds, 2), validate(engine, text, task)))
            due += task.tokens / POINTS
        if not length:
            break
        began = time.process_time()
        x, y = next(batches)
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        seconds += time.process_time() - began
        tokens += ROWS * length
    engine.destroy()
    return {"method": name, "seed": seed, "updates": len(lengths), "points": points}


@torch.no_grad()
def validate(engine: hadal.Engine, text: Any, task: Task) -> float:
    """Return the loss on whole windows of files that no run trains on."""
    engine.eval()
    losses = []
    for part in range(4):
        x, y = batch(text.validation, 64, task.shape.context, seed=part)
        losses.append(float(engine(x.to(engine.device), y.to(engine.device))))
    engine.train()
    return round(statistics.fmean(losses), 4)


def seconds_until(points: list[Any], goal: float) -> float | None:
    """Return the seconds until the loss reaches `goal`, interpolated; None if it never does."""
    for (_, before, higher), (_, after, loss) in pairwise(points):
        if loss <= goal:
            share = (higher - goal) / max(higher - loss, 1e-9)
            return before + share * (after - before)
    return None


def table(runs: list[dict[str, Any]]) -> str:
    """Return the means over seeds as Markdown."""
    last = {name: [one["points"][-1] for one in runs if one["method"] == name] for name in METHODS}
    base = [loss for _, _, loss in last["baseline"]]
    goal = statistics.fmean(base)
    head = (
        "| | updates | seconds | validation loss | against the baseline, by seed"
        " | seconds until the baseline's loss |"
    )
    lines = [head, "|---|---|---|---|---|---|"]
    for name, ends in last.items():
        if not ends:
            continue
        mine = [one for one in runs if one["method"] == name]
        losses = [loss for _, _, loss in ends]
        apart = ", ".join(f"{a - b:+.3f}" for a, b in zip(losses, base, strict=False))
        reached = [seconds_until(one["points"], goal) for one in mine]
        met = [one for one in reached if one is not None]
        when = f"{statistics.fmean(met):.0f}" if len(met) == len(mine) else "-"
        if met and len(met) < len(mine):
            when = f"{len(met)} of {len(mine)} reach it"
        seconds = statistics.fmean(second for _, second, _ in ends)
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        lines.append(
            f"| {name} | {mine[0]['updates']} | {seconds:.0f} |"
            f" {statistics.fmean(losses):.3f}{spread} | {apart} | {when} |"
        )
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Draw the mean losses by tokens and by seconds."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for name in METHODS:
        curves = np.array([one["points"] for one in runs if one["method"] == name], dtype=float)
        if not curves.size:
            continue
        tokens, seconds, losses = curves.mean(0)[2:].T
        for axes, places in ((left, tokens / 1e6), (right, seconds)):
            (line,) = axes.plot(places, losses, label=name, linewidth=1.4)
            low, high = curves[:, 2:, 2].min(0), curves[:, 2:, 2].max(0)
            axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    left.set(xlabel="tokens read (millions)", ylabel="validation loss (nats per byte)")
    right.set(xlabel="seconds of processor time")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens that each run reads")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="figures of all runs; existing ones are kept")
    parser.add_argument("--output", type=Path, help="picture (SVG)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("hadal").setLevel(logging.ERROR)
    shape = Shape(options.width, options.depth, max(1, options.width // 32), options.context)
    task = Task(shape, options.tokens, options.rate)
    text = read_standard_library()
    runs = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    done = {(one["method"], one["seed"]) for one in runs}
    with tempfile.TemporaryDirectory() as folder:
        rarity = write_rarity(Windows(text.train, options.context), Path(folder))
        for seed in range(options.seeds):
            for name in METHODS:
                if (name, seed) in done:
                    continue
                runs.append(run(task, name, seed, text, rarity))
                print(json.dumps({**runs[-1], "points": runs[-1]["points"][-1]}), flush=True)
                if options.json:
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps(runs))
    print(table(runs))
    if options.output:
        draw(runs, options.output)


if __name__ == "__main__":
    main()
