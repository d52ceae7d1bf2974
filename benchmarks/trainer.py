"""Step of the Hugging Face Trainer under Hadal and under DeepSpeed, in turns, on CPUs.

The program is the same; only what `import deepspeed` finds differs. DeepSpeed's environment is that
of `benchmarks/step.py --install-deepspeed`, with transformers and accelerate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 2


def train(stage: int, layers: int, width: int, steps: int, out: str) -> None:
    """Train on one rank; rank 0 writes the median seconds of a step, also of processor time."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "vocab_size": 8192}
    model = GPT2LMHeadModel(GPT2Config(n_positions=64, **sizes))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(8192, (64, 64))]
    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

        on_step_end = on_step_begin

    arguments = TrainingArguments(
        out,
        max_steps=WARMUP + steps,
        per_device_train_batch_size=1,
        bf16=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        deepspeed={
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": "auto",
        },
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()])
    trainer.train()
    pairs = list(zip(marks[::2], marks[1::2], strict=True))[WARMUP:]
    wall, processor = (median(end[n] - start[n] for start, end in pairs) for n in range(2))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if os.environ["RANK"] == "0":
        told = {"wall": wall, "processor": processor, "losses": losses}
        Path(out, "measured.json").write_text(json.dumps(told))
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed's threads sometimes abort a plain exit


def measured(python: str, program: list[str]) -> dict[str, Any]:
    """Train in processes of their own, on two ranks with a thread each."""
    with tempfile.TemporaryDirectory() as out:
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        variables["PATH"] = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [*command, *program, "--out", out],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found: dict[str, Any] = json.loads(Path(out, "measured.json").read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", type=Path, default=ROOT / ".venv-deepspeed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    for name, default in (("stage", 2), ("layers", 12), ("width", 768), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.out:
        train(given.stage, given.layers, given.width, given.steps, given.out)
    sizes = ("stage", "layers", "width", "steps")
    program = [__file__]
    program += [word for name in sizes for word in (f"--{name}", str(getattr(given, name)))]
    pairs = []
    print("seconds a step  Hadal  DeepSpeed  ratio  of processor time")
    for number in range(given.rounds):
        ours = measured(sys.executable, ["-m", "hadal.compat", *program])
        theirs = measured(str(given.deepspeed / "bin/python"), program)
        ratios = [ours[key] / theirs[key] for key in ("wall", "processor")]
        pairs.append(ratios)
        times = f"{ours['wall']:5.3f}  {theirs['wall']:9.3f}"
        print(f"round {number + 1}         {times}  {ratios[0]:5.3f}  {ratios[1]:.3f}")
        print(f"  losses  {ours['losses'][-1]:.4f}  {theirs['losses'][-1]:.4f}", flush=True)
    wall, processor = (median(column) for column in zip(*pairs, strict=True))
    print(f"median of the pairs: {wall:.3f}, of processor time {processor:.3f}")


if __name__ == "__main__":
    main()
