"""Losses of a run of DeepSpeed, then Hadal, then DeepSpeed, beside those of DeepSpeed alone.

Writes docs/pictures/both_ways.json, of which docs/pictures/draw.py makes the picture. DeepSpeed's
environment is that of `benchmarks/step.py --install-deepspeed`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEG, BATCHES = 20, 4


def train(folder: str, first: int, last: int) -> None:
    """Train on one rank from the newest checkpoint in a folder, if any; save, and tell losses."""
    sys.path.insert(0, str(ROOT / "tests/data/deepspeed"))
    import deepspeed
    import torch
    import toy

    deepspeed.init_distributed("gloo")
    model, config = toy.Toy(), toy.config_of(2, "bf16")
    config["optimizer"]["params"]["torch_adam"] = True
    config["checkpoint"] = {"load_universal": Path(folder, "latest_universal").exists()}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=toy.groups_of(model), config=config
    )
    if first:
        engine.load_checkpoint(folder)
    losses = [toy.update(engine, step % BATCHES, 2) for step in range(first, last)]
    engine.save_checkpoint(folder)
    if torch.distributed.get_rank() == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed's threads sometimes abort a plain exit


def trained(python: str, program: list[str], folder: str, first: int, last: int) -> list[float]:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path}
    words = [*command, *program, "--leg", folder, str(first), str(last)]
    subprocess.run(words, env=environment, check=True)
    losses: list[float] = json.loads(Path(folder, "losses.json").read_text())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", type=Path, default=ROOT / ".venv-deepspeed")
    parser.add_argument("--leg", nargs=3, help="train on one rank")
    given = parser.parse_args()
    if given.leg:
        train(given.leg[0], int(given.leg[1]), int(given.leg[2]))
    theirs, ours = (
        (str(given.deepspeed / "bin/python"), [__file__]),
        (
            sys.executable,
            ["-m", "hadal.compat", __file__],
        ),
    )
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as folder:
        whole = trained(*theirs, alone, 0, 3 * LEG)
        legs = trained(*theirs, folder, 0, LEG) + trained(*ours, folder, LEG, 2 * LEG)
        export = [sys.executable, "-m", "hadal", "checkpoint", "export", folder, folder]
        subprocess.run([*export, "--format", "deepspeed-universal"], check=True)
        legs += trained(*theirs, folder, 2 * LEG, 3 * LEG)
    told = {"deepspeed": whole, "there and back": legs}
    (ROOT / "docs/pictures/both_ways.json").write_text(json.dumps(told) + "\n")
    print(max(abs(a - b) for a, b in zip(whole, legs, strict=True)), "is the largest difference")


if __name__ == "__main__":
    main()
