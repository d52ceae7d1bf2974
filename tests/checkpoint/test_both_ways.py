"""A run goes on from DeepSpeed to Hadal, and back, with the same losses.

These tests train with a real DeepSpeed, on CPUs. `HADAL_DEEPSPEED` is the folder of its environment
(default: `.venv-deepspeed`, which `benchmarks/step.py --install-deepspeed` makes).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools

from checkpoint.deepspeed_cases import DATA, toy
from hadal import comm
from hadal.checkpoint.formats.universal import export_universal
from hadal.checkpoint.opening import opened

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("HADAL_DEEPSPEED", ROOT / ".venv-deepspeed"))

# Trains with DeepSpeed. At first it saves after three updates and goes on; with `universal` it
# loads and goes on. It writes the loss of every later update, the mean over ranks.
PROGRAM = """
import json, os, sys
folder, stage, dtype, data, first, last, saves = sys.argv[1:]
sys.path.insert(0, data)
import deepspeed, torch, toy
from deepspeed.accelerator import get_accelerator
deepspeed.init_distributed("gloo")
get_accelerator().is_fp16_supported = lambda: True  # it refuses before it tries
model = toy.Toy()
config = toy.config_of(int(stage), dtype)
config["optimizer"]["params"]["torch_adam"] = True  # its own is compiled first, for minutes
config["zero_optimization"]["memory_efficient_linear"] = False  # it rounds before it adds the bias
if not saves:
    config["checkpoint"] = {"load_universal": True}
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=toy.groups_of(model), config=config
)
if not saves:
    inner = engine.optimizer.optimizer
    decays = [group["weight_decay"] for group in inner.param_groups]
    engine.load_checkpoint(folder)
    if int(stage) == 3:  # its load makes one of all groups; docs/from_deepspeed.md
        for group, decay in zip(inner.param_groups, decays):
            group["weight_decay"] = decay
        for state in inner.state.values():
            state["step"] = state["step"].clone()
losses = []
for step in range(int(first), int(last)):
    if step == 3 and saves:
        engine.save_checkpoint(folder)
    tokens = toy.batch_of(step, engine.global_rank)
    loss = toy.loss_of(engine(tokens), tokens)
    engine.backward(loss)
    engine.step()
    told = loss.detach().float()
    torch.distributed.all_reduce(told)
    losses.append(told.item() / engine.dp_world_size)
if engine.global_rank == 0:
    with open(os.path.join(folder, "losses.json"), "w") as file:
        json.dump(losses, file)
torch.distributed.barrier()
os._exit(0)
"""


def with_deepspeed(
    folder: Path, stage: int, dtype: str, ranks: int, steps: range, *, saves: bool
) -> list[float]:
    """Train with DeepSpeed in processes of its own; return the loss of every update."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [str(ENVIRONMENT / "bin/python"), "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(program), str(folder), str(stage), dtype]
    command += [str(DATA), str(steps.start), str(steps.stop), "saves" if saves else ""]
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(ENVIRONMENT / "torch_extensions"))
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
    known = {"PATH": path, "TORCH_EXTENSIONS_DIR": extensions, "DS_ACCELERATOR": "cpu"}
    environment = {**os.environ, **known, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def with_hadal(
    folder: str, stage: int, dtype: str, rows: int, steps: range, saved: str
) -> list[float]:
    """Go on from a checkpoint in `folder`; save to `saved` after the third update."""
    from hadal.compat.engine import initialize

    model, world = toy.Toy(), comm.get_world_size()
    config = {**toy.config_of(stage, dtype), "train_micro_batch_size_per_gpu": rows}
    config["optimizer"]["params"]["torch_adam"] = True
    engine: Any = initialize(model=model, model_parameters=toy.groups_of(model), config=config)[0]
    engine.load_checkpoint(folder)
    losses = []
    for number, step in enumerate(steps):
        if number == 3:
            engine.save_checkpoint(saved)
        every = [toy.batch_of(step, rank) for rank in range(rows * world // toy.ROWS)]
        tokens = torch.cat(every)[comm.get_rank() * rows :][:rows]
        loss = toy.loss_of(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        told = loss.detach().float().reshape(1)
        comm.all_reduce(told)
        losses.append(told.item() / world)
    engine.destroy()
    return losses


# A few roundings of the weights, as a part of a loss of 2.5.
ALLOWED = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
CASES = [
    (1, "fp16", 2),
    (2, "bf16", 1),
    (2, "bf16", 2),
    (3, "bf16", 2),
    (3, "fp32", 2),
    (1, "fp32", 1),
]


@pytest.mark.slow
@pytest.mark.skipif(
    not (ENVIRONMENT / "bin/python").exists(),
    reason="HADAL_DEEPSPEED is no environment with DeepSpeed, nor is there a .venv-deepspeed",
)
@pytest.mark.parametrize(("stage", "dtype", "saved_by"), CASES)
def test_a_run_goes_on_there_and_back(
    stage: int, dtype: str, saved_by: int, ranks: RankPools, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    theirs = with_deepspeed(first, stage, dtype, saved_by, range(6), saves=True)[3:]
    for other, world in ((stage, saved_by), (stage % 3 + 1, 3 - saved_by)):
        rows = toy.ROWS * saved_by // world
        args = (str(first), other, dtype, rows, range(3, 9), f"{second}{world}")
        ours = ranks(world).run(with_hadal, *args)[0]
        assert ours[:3] == pytest.approx(theirs, abs=ALLOWED[dtype]), (other, world)
    second = Path(f"{second}{saved_by}")
    tag = (second / "latest").read_text()
    export_universal(opened(second / tag), second / f"{tag}_universal")
    back = with_deepspeed(second, stage, dtype, saved_by, range(6, 9), saves=False)
    ours = ranks(saved_by).run(
        with_hadal, str(first), stage, dtype, toy.ROWS, range(3, 9), str(tmp_path / "third")
    )[0]
    assert back == pytest.approx(ours[3:], abs=ALLOWED[dtype])
