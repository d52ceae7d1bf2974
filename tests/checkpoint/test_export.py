"""Export of weights from a checkpoint: in the Hugging Face layout, in fp32, as state dicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from hypothesis import given, strategies as st
from ranks import RankPools
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor

import hadal
from checkpoint.deepspeed_cases import Unpacked, toy, unpack
from hadal import comm
from hadal.checkpoint.export import export, state_dict_of
from hadal.checkpoint.huggingface import Value, shards_of, write_model
from hadal.checkpoint.opening import opened
from hadal.checkpoint.rules import NAME
from hadal.errors import CheckpointError
from hadal.units import nbytes_of
from hadal.utils import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

ROOT = Path(__file__).parents[2]
CASES = ["stage1_bf16_world2", "stage3_fp16_world2", "universal2_bf16_world2"]


def weights_of(saved: Unpacked) -> dict[str, Tensor]:
    """Return the fp32 values under all names, as DeepSpeed reported them."""
    masters = {k[5:]: v for k, v in saved.tensors.items() if k.startswith("fp32.")}
    module = {k[7:]: v.float() for k, v in saved.tensors.items() if k.startswith("module.")}
    found = {**module, **masters}
    found["head.weight"] = found["words.weight"]
    return found


def read_back(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def hadals(folder: str, stage: int, dtype: str) -> dict[str, Tensor] | None:
    """Save a Hadal checkpoint; return the expected export."""
    model = toy.Toy()
    engine, *_ = hadal.initialize(
        model=model, model_parameters=toy.groups_of(model), config=toy.config_of(stage, dtype)
    )
    for step in range(2):
        tokens = toy.batch_of(step, comm.get_rank())
        engine.backward(toy.loss_of(engine(tokens), tokens))
        engine.step()
    engine.save_checkpoint(folder, exclude_frozen_parameters=False)
    exact = {}
    for name, parameter in engine.module.named_parameters():
        master = hadal.utils.safe_get_full_fp32_param(parameter)
        exact[name] = engine.state_dict()[name].float() if master is None else master
    exact["shift"] = engine.state_dict()["shift"].float()
    exact["head.weight"] = exact["words.weight"]
    engine.destroy()
    return exact


@pytest.fixture(scope="module")
def own(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a Hadal checkpoint, stage 3 on two ranks in bf16, and its fp32 values."""
    folder = tmp_path_factory.mktemp("own")
    (exact, _) = ranks(2).run(hadals, str(folder), 3, "bf16")
    return folder, exact


@pytest.fixture(params=["hadal", *CASES])
def saved(
    request: pytest.FixtureRequest, own: tuple[Path, Any], tmp_path: Path
) -> tuple[Path, dict[str, Tensor]]:
    """Return a folder of checkpoints, and the fp32 values in it."""
    if request.param == "hadal":
        return own
    unpacked = unpack(request.param, tmp_path / "saved")
    return unpacked.folder, weights_of(unpacked)


def test_fp32_comes_from_the_masters(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, exact = saved
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.keys() == exact.keys()
    assert state["head.weight"] is state["words.weight"]
    for name, value in exact.items():
        assert state[name].dtype == torch.float32 and torch.equal(state[name], value), name
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(folder), lazy_mode=True)
    assert lazy["inner.weight"].shape == (11, 7)
    assert torch.equal(lazy["inner.weight"].contiguous(), exact["inner.weight"])
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert exact.keys() - trained.keys() == {"fixed.weight"}
    model = load_state_dict_from_zero_checkpoint(toy.Toy(), folder)
    assert torch.equal(model.inner.weight, exact["inner.weight"])


@pytest.mark.parametrize("size", ["700B", "1kB", "5GB"])
def test_files_have_the_hugging_face_layout(
    size: str, saved: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, exact = saved
    for dtype in (None, torch.float32):
        paths = export(
            opened(folder), tmp_path, NAME, dtype=dtype, max_shard_nbytes=nbytes_of(size)
        )
        assert sorted(tmp_path.glob("*.safetensors")) == paths
        tensors = read_back(tmp_path)
        # Tied ones once, under one name.
        assert exact.keys() - tensors.keys() == {"head.weight"}
        for name, value in tensors.items():
            if name != "shift":
                assert (value.dtype == torch.float32) == (dtype is torch.float32)
            assert torch.equal(value, exact[name].to(value.dtype)), name
        index = tmp_path / f"{NAME}.index.json"
        assert index.exists() == (len(paths) > 1)
        if index.exists():
            told = json.loads(index.read_text())
            assert told["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
            for name, file in told["weight_map"].items():
                with safe_open(tmp_path / file, "pt") as opened_file:
                    assert name in opened_file.keys()  # noqa: SIM118 - no dict
            assert told["weight_map"].keys() == tensors.keys()
    assert not list(tmp_path.glob(".*"))


def test_one_file_is_read_by_its_own_library(own: tuple[Path, Any], tmp_path: Path) -> None:
    folder, exact = own
    export(opened(folder), tmp_path, NAME, dtype=torch.float32, max_shard_nbytes=10**9)
    model = toy.Toy()
    load_model(model, str(tmp_path / NAME))
    assert model.head.weight is model.words.weight
    assert torch.equal(model.words.weight, exact["words.weight"])
    assert torch.equal(model.shift, exact["shift"])


def test_pickles_are_written_as_deepspeed_does(own: tuple[Path, Any], tmp_path: Path) -> None:
    folder, exact = own
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, max_shard_size="900B")
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    state: dict[str, Tensor] = {}
    for path in sorted(tmp_path.glob("pytorch_model-*-of-*.bin")):
        state |= torch.load(path, weights_only=True)
    assert state.keys() == index["weight_map"].keys() == exact.keys()
    assert all(torch.equal(state[name], value) for name, value in exact.items())
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pytorch_model.bin"]
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, safe_serialization=True)
    assert (tmp_path / "model.safetensors").exists()


def test_stage_0_has_no_named_masters_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unpacked = unpack("stage0_bf16_world2", tmp_path)
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert "those of the 16-bit weights" in caplog.text
    assert torch.equal(state["gain"], unpacked.tensors["module.gain"].float())
    with pytest.raises(CheckpointError, match="does not record which parameters were trained"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)


def test_missing_checkpoints_are_reported(own: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = own
    with pytest.raises(CheckpointError, match="no complete checkpoint 'other'"):
        get_fp32_state_dict_from_zero_checkpoint(folder, "other")
    with pytest.raises(CheckpointError, match="latest is missing"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="found 'big'"):
        convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, max_shard_size="big")
    by_itself = get_fp32_state_dict_from_zero_checkpoint(folder / "global_step2")
    assert len(by_itself) == 11


def test_a_whole_model_has_no_parts(tmp_path: Path) -> None:
    folder = unpack("stage1_bf16_world2", tmp_path).folder
    assert opened(folder, part=0).entries.keys() == opened(folder).entries.keys()
    with pytest.raises(CheckpointError, match="holds a whole model and has no part 1"):
        opened(folder, part=1)


@pytest.mark.fast_cells("zero_to_fp32.py")
@pytest.mark.parametrize("name", ["zero_to_fp32.py", "zero_to_torch.py"])
def test_the_scripts_beside_a_checkpoint_run(
    name: str, own: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, exact = own
    script = folder / name
    assert os.access(script, os.X_OK)
    options = ["--max_shard_size", "1kB", "--safe_serialization", "-t", "global_step2"]
    options += ["--dtype", "fp16"] * (name == "zero_to_torch.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [str(script), ".", str(tmp_path), *options]
    done = forks.run(words, env=env, cwd=str(folder), timeout=300)
    assert done.returncode == 0, done.stderr
    dtype = torch.float16 if name == "zero_to_torch.py" else torch.float32
    found = read_back(tmp_path)
    assert found.keys() == exact.keys() - {"head.weight"}  # it is tied, and written once
    assert {value.dtype for name, value in found.items() if name.endswith("weight")} == {dtype}
    for key, value in found.items():
        assert torch.equal(value, exact[key].to(value.dtype))  # buffers keep their own


def test_a_failing_export_leaves_the_earlier_one(own: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = own
    export(opened(folder), tmp_path, NAME, dtype=None, max_shard_nbytes=10**9)
    before = (tmp_path / NAME).read_bytes()
    values = [Value("a", (2,), torch.float32), Value("b", (2,), torch.float32)]
    cuts = iter([torch.ones(2), torch.ones(2, dtype=torch.float16)])
    with pytest.raises(CheckpointError, match="b must be written as 2 elements"):
        write_model(tmp_path, NAME, values, cuts, {}, 10)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == before


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 60))
def test_shards_hold_everything_in_order(numels: list[int], limit: int) -> None:
    values = [Value(str(i), (numel,), torch.int8) for i, numel in enumerate(numels)]
    shards = shards_of(values, limit)
    assert [value for shard in shards for value in shard] == values
    for shard in shards:
        assert len(shard) < 2 or sum(value.nbytes for value in shard) <= limit


def test_buffers_never_become_narrower(own: tuple[Path, Any]) -> None:
    folder, _ = own
    narrow = state_dict_of(opened(folder), torch.float16)
    assert narrow["inner.weight"].dtype == torch.float16
    # bf16 here, and fp16 cannot hold all of it
    assert narrow["shift"].dtype == torch.float32


MEASURED = """
import sys, threading, time
from pathlib import Path
from hadal.checkpoint.export import export
from hadal.checkpoint.formats.dcp import _Writer, export_dcp
from hadal.checkpoint.opening import opened

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

peak, over = 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.002):
        peak = max(peak, anonymous())

source = opened(Path(sys.argv[1]))
source.read("0.weight", "weight", 0, 1)
_Writer(Path(), 0, print)  # imports torch's part
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
if sys.argv[3] == "dcp":
    export_dcp(source, Path(sys.argv[2]), max_file_nbytes=10**8)
else:
    export(source, Path(sys.argv[2]), "model.safetensors", dtype=None, max_shard_nbytes=10**8)
over.set()
watcher.join()
print(peak - before)
"""


def save_large(folder: str) -> int:
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)))
    engine, *_ = hadal.initialize(model=model, config={"train_batch_size": comm.get_world_size()})
    engine.save_checkpoint(folder)
    engine.destroy()
    return 4 * 4096 * 4096 * 4


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own accounts")
@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_memory_is_that_of_one_chunk(kind: str, ranks: RankPools, tmp_path: Path) -> None:
    (nbytes,) = ranks(1).run(save_large, str(tmp_path / "in"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "in"), str(tmp_path / "out"), kind],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    print(f"{nbytes / 1e6:.0f} MB in files of 100 MB: {grown / 1e6:.1f} MB of memory")
    assert grown < 40e6 < 100e6 < nbytes
