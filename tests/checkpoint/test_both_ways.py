"""A run goes on from DeepSpeed to Hadal, and back, with the same losses.

These tests train with a real DeepSpeed, on CPUs. `HADAL_DEEPSPEED` is the folder of its environment
(default: `.venv-deepspeed`, which `benchmarks/step.py --install-deepspeed` makes).
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPools

from checkpoint.deepspeed_cases import DATA, toy
from hadal import comm, pipeline
from hadal.checkpoint.formats.universal import export_universal
from hadal.checkpoint.opening import opened
from hadal.errors import CheckpointError
from hadal.moe import MoE

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("HADAL_DEEPSPEED", ROOT / ".venv-deepspeed"))


def with_deepspeed(
    folder: Path, kind: str, stage: int, dtype: str, ranks: int, steps: range, *, saves: bool
) -> list[float]:
    """Train with DeepSpeed in processes of its own; return the loss of every update."""
    command = ["-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(DATA / "train.py"), str(folder), kind]
    command += [str(stage), dtype, str(steps.start), str(steps.stop), *["saves"] * saves]
    run_with_deepspeed(command)
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def run_with_deepspeed(arguments: list[str]) -> None:
    """Run Python in DeepSpeed's environment, on the CPU."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(ENVIRONMENT / "torch_extensions"))
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
    known = {"PATH": path, "TORCH_EXTENSIONS_DIR": extensions, "DS_ACCELERATOR": "cpu"}
    environment = {**os.environ, **known, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(ENVIRONMENT / "bin/python"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def with_hadal(
    folder: str, kind: str, stage: int, dtype: str, batches: int, steps: range, saved: str
) -> list[float]:
    """Go on from a checkpoint in `folder`; save to `saved` after the third update."""
    from hadal.compat.engine import initialize

    world = comm.get_world_size()
    model, config = toy.model_of(kind, MoE, pipeline, world), toy.config_of(stage, dtype)
    rows, accumulation = toy.ROWS * batches // world, 1
    if kind == "pipeline":
        rows, accumulation = toy.ROWS, batches
    config["train_micro_batch_size_per_gpu"] = rows
    config["gradient_accumulation_steps"] = accumulation
    config["optimizer"]["params"]["torch_adam"] = True
    engine: Any = initialize(model=model, model_parameters=toy.groups_of(model), config=config)[0]
    engine.load_checkpoint(folder)
    losses = []
    for number, step in enumerate(steps):
        if number == 3:
            engine.save_checkpoint(saved)
        losses.append(toy.update(engine, step, batches))
    engine.destroy()
    return losses


# A few roundings of the weights, as a part of a loss of 2.5.
ALLOWED = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
CASES = [
    ("plain", 1, "fp16", 2),
    ("plain", 2, "bf16", 1),
    ("plain", 2, "bf16", 2),
    ("plain", 3, "bf16", 2),
    ("plain", 3, "fp32", 2),
    ("plain", 1, "fp32", 1),
    ("experts", 2, "bf16", 2),
    ("experts", 1, "fp32", 2),
    ("pipeline", 1, "bf16", 2),
    ("pipeline", 1, "fp32", 2),
]


def unpacked(kind: str, stage: int, folder: Path) -> list[float]:
    """Unpack a kept checkpoint of three updates; return the losses of the next three."""
    with tarfile.open(DATA / f"{kind}{stage}_bf16_world2.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses[3:]


@pytest.mark.parametrize(("kind", "stage"), [("experts", 2), ("pipeline", 1)])
def test_a_kept_checkpoint_of_a_model_in_parts_goes_on(
    kind: str, stage: int, ranks: RankPools, tmp_path: Path
) -> None:
    """With the losses that DeepSpeed had, with the experts or stages of one rank and of two."""
    theirs = unpacked(kind, stage, tmp_path)
    for world in (1, 2):
        args = (str(tmp_path), kind, stage, "bf16", 2, range(3, 6), "")
        ours = ranks(world).run(with_hadal, *args)[0]
        assert ours == pytest.approx(theirs, abs=ALLOWED["bf16"]), world


def test_missing_stages_of_a_pipeline_are_reported(tmp_path: Path) -> None:
    unpacked("pipeline", 1, tmp_path)
    (tmp_path / "global_step3/mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="states of 1 stages of a pipeline of 2; copy all"):
        opened(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    not (ENVIRONMENT / "bin/python").exists(),
    reason="HADAL_DEEPSPEED is no environment with DeepSpeed, nor is there a .venv-deepspeed",
)
@pytest.mark.parametrize(("kind", "stage", "dtype", "saved_by"), CASES)
def test_a_run_goes_on_there_and_back(
    kind: str, stage: int, dtype: str, saved_by: int, ranks: RankPools, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    theirs = with_deepspeed(first, kind, stage, dtype, saved_by, range(6), saves=True)[3:]
    other = stage if kind == "pipeline" else stage % 3 + 1
    for here, world in ((stage, saved_by), (other, 3 - saved_by)):
        args = (str(first), kind, here, dtype, saved_by, range(3, 9), f"{second}{world}")
        ours = ranks(world).run(with_hadal, *args)[0]
        assert ours[:3] == pytest.approx(theirs, abs=ALLOWED[dtype]), (here, world)
    second = Path(f"{second}{saved_by}")
    tag = (second / "latest").read_text()
    export_universal(opened(second / tag), second / f"{tag}_universal")
    back = with_deepspeed(second, kind, stage, dtype, saved_by, range(6, 9), saves=False)
    args = (str(first), kind, stage, dtype, saved_by, range(3, 9), str(tmp_path / "third"))
    ours = ranks(saved_by).run(with_hadal, *args)[0]
    assert back == pytest.approx(ours[3:], abs=ALLOWED[dtype])
