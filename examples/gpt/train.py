"""Train a small GPT on the source text of Python's standard library, with ZeRO-2 in bf16.

    make demo          # or, by hand, with one process per GPU or CPU core:
    torchrun --standalone --nproc_per_node=2 examples/gpt/train.py

The configuration is `ds_config.json` in this directory: change the stage, the precision or the
schedule there. A CPU that only emulates bf16 trains in fp32, which is ten times as fast there.
`model.py` is plain torch, `data.py` reads the text. The run shows the loss, the
validation loss, the text's unigram entropy, tokens per second, learning rate and gradient norm. It
writes `demo/loss.png` and `demo/checkpoint`, and ends with a sample of generated code. A second run
resumes from the checkpoint; `make demo-clean` starts over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import Text, batch, read_standard_library
from model import GPT, Shape
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import hadal

HERE = Path(__file__).parent
VALIDATE_EVERY = 20
VALIDATION_WINDOWS = 16


@dataclass
class Curve:
    """The losses of a run: pairs of (step, nats per byte)."""

    train: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "ds_config.json")
    parser.add_argument("--steps", type=int, help="steps of this run (default: the schedule's)")
    parser.add_argument("--minutes", type=float, default=3.7, help="stop after this long")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="directory for results")
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--depth", type=int, default=Shape.depth)
    parser.add_argument("--sample", type=int, default=320, help="bytes to generate at the end")
    return parser.parse_args()


def mean_over_ranks(value: torch.Tensor) -> float:
    """Average one number over all ranks."""
    total = value.detach().float().reshape(1).clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train_one_step(engine: Any, text: Text, context: int) -> float:
    """Make one update, and return its mean loss.

    A window's position depends only on step, micro-step and rank, so a resumed run reads the same
    text as an uninterrupted one.
    """
    step, losses = engine.global_steps, []
    for micro in range(engine.gradient_accumulation_steps()):
        seed = (step * 1000 + micro) * 1000 + dist.get_rank()
        x, y = batch(text.train, engine.train_micro_batch_size_per_gpu(), context, seed=seed)
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def validate(engine: Any, text: Text, context: int, windows: int = VALIDATION_WINDOWS) -> float:
    """Return the loss on the same unseen windows each time; each rank evaluates its own."""
    engine.eval()
    x, y = batch(text.validation, windows, context, seed=dist.get_rank())
    loss = engine(x.to(engine.device), y.to(engine.device))
    engine.train()
    return mean_over_ranks(loss)


def progress_bar(console: Console) -> Progress:
    """Return the line that is drawn during training."""
    return Progress(
        BarColumn(bar_width=12),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def train(engine: Any, text: Text, curve: Curve, args: argparse.Namespace) -> None:
    """Train for `args.steps` steps or `args.minutes`, whichever ends first."""
    console = Console(quiet=dist.get_rank() > 0, soft_wrap=True)
    context, first, began = engine.module.shape.context, engine.global_steps, time.perf_counter()
    if not curve.validation:
        curve.validation.append((0, validate(engine, text, context)))
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=args.steps)
        last = time.perf_counter()
        for done in range(1, args.steps + 1):
            loss = train_one_step(engine, text, context)
            now = time.perf_counter()
            speed, last = engine.train_batch_size() * context / (now - last), now
            curve.train.append((first + done, loss))
            words = (
                f"loss {loss:.3f}  {speed:,.0f} tokens/s  lr {engine.get_lr()[0]:.1e}"
                f"  norm {float(engine.get_global_grad_norm()):.2f}"
            )
            progress.update(bar, completed=done, description=words)
            # The clocks of two ranks differ; they must leave the loop together.
            late = torch.tensor(float(now - began > args.minutes * 60), device=engine.device)
            is_over = mean_over_ranks(late) > 0
            if done % VALIDATE_EVERY == 0 or done == args.steps or is_over:
                held_out = validate(engine, text, context)
                curve.validation.append((first + done, held_out))
                progress.console.print(
                    f"step {first + done:4d}  {words}  validation {held_out:.3f}"
                )
                last = time.perf_counter()
            if is_over:
                progress.console.print(f"Stopped after {args.minutes:g} minutes.")
                return


def draw(curve: Curve, entropy: float, file: Path) -> None:
    """Draw both losses and the unigram entropy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, losses = zip(*curve.train, strict=True)
    smooth = [
        sum(near) / len(near)
        for near in (losses[max(0, i - 9) : i + 1] for i in range(len(losses)))
    ]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(steps, smooth, color="tab:blue", label="train (mean of 10 steps)")
    axes.plot(*zip(*curve.validation, strict=True), "o-", color="tab:orange", label="validation")
    axes.axhline(entropy, color="gray", linestyle="--", label=f"unigram entropy {entropy:.2f}")
    axes.set(xlabel="step", ylabel="nats per byte", title="A GPT on the standard library's source")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def finish(engine: Any, text: Text, curve: Curve, args: argparse.Namespace) -> None:
    """Save the checkpoint and the picture, and print a sample."""
    held_out = validate(engine, text, engine.module.shape.context, 4 * VALIDATION_WINDOWS)
    engine.save_checkpoint(
        str(args.folder / "checkpoint"),
        client_state={"train": curve.train, "validation": curve.validation},
    )
    if dist.get_rank() > 0:
        return
    console, entropy = Console(soft_wrap=True), text.unigram_entropy()
    draw(curve, entropy, args.folder / "loss.png")
    engine.eval()
    prompt = b'class Reader:\n    """'
    written = engine.module.generate(prompt, args.sample, seed=1).decode("utf-8", errors="replace")
    sample = "".join(c if c.isprintable() or c == "\n" else "?" for c in written)
    console.rule("what the model writes")
    console.print(sample, markup=False, highlight=False)
    console.rule()
    console.print(f"validation loss  {held_out:.3f} nats per byte, in unseen files")
    console.print(f"unigram entropy  {entropy:.3f} nats per byte, the best without any context")
    console.print(f"picture          {args.folder / 'loss.png'}")
    console.print(f"checkpoint       {args.folder / 'checkpoint'} (step {engine.global_steps})")
    console.print("Run `make demo` again to continue, or `make demo-clean` to start over.")


def emulates_bf16() -> bool:
    """Return True on a CPU whose bf16 products are far slower than those of fp32."""
    on_cpu = not torch.accelerator.is_available()
    return on_cpu and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def main() -> None:
    """Train, save, draw, generate."""
    args = arguments()
    config = json.loads(args.config.read_text())
    if emulates_bf16():
        config.pop("bf16", None)
    args.steps = args.steps or config["scheduler"]["params"]["total_num_steps"]
    args.folder.mkdir(parents=True, exist_ok=True)

    hadal.init_distributed()
    torch.manual_seed(0)
    model = GPT(Shape(width=args.width, depth=args.depth))
    engine, _, _, _ = hadal.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    text, console = read_standard_library(), Console(quiet=dist.get_rank() > 0, soft_wrap=True)
    try:
        path, kept = engine.load_checkpoint(str(args.folder / "checkpoint"))
    except hadal.CheckpointError as error:
        raise SystemExit(f"{error}\n`make demo-clean` starts over.") from error
    curve = Curve()
    if path is not None:
        curve = Curve(*([tuple(pair) for pair in kept[name]] for name in ("train", "validation")))
        console.print(f"Continuing from step {engine.global_steps} ({path}).")
    console.print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, "
        f"{len(text.train) / 1e6:.1f} MB of text, {dist.get_world_size()} processes on "
        f"{engine.device.type} in {'bf16' if 'bf16' in config else 'fp32'}, "
        f"ZeRO stage {config['zero_optimization']['stage']}, "
        f"{args.steps} steps of {engine.train_batch_size()} windows"
    )
    train(engine, text, curve, args)
    finish(engine, text, curve, args)
    dist.barrier()
    engine.destroy()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    main()
