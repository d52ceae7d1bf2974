"""DeepSpeed's universal format: written from Hadal's and DeepSpeed's checkpoints, and read back."""

from __future__ import annotations

import json
import os
import pickletools
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal
from checkpoint.deepspeed_cases import toy, unpack
from checkpoint.test_dcp import (
    engine_of,
    go_on,
    own as own,  # a fixture
    state_of,
    train,
)
from hadal.checkpoint.deepspeed.pickles import Attributes
from hadal.checkpoint.formats.universal import (
    VERSION,
    export_universal,
    nbytes_of_universal,
    read_named,
    write_named,
)
from hadal.checkpoint.opening import opened
from hadal.cli.deepspeed import ds_to_universal
from hadal.cli.main import main
from hadal.compat import surface
from hadal.errors import CheckpointError, NotBuiltYetError

ROOT = Path(__file__).parents[2]
DEEPSPEED = ROOT / ".venv-deepspeed/bin/python"


def plain(value: Any) -> Any:
    """Return a value as what can be compared, with the types of tensors and objects."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, Attributes):
        return type(value).__module__, type(value).__qualname__, plain(vars(value))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return type(value).__name__, value


def names_in(path: Path) -> set[str]:
    """Return the classes and functions that a file names."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        found = pickletools.genops(archive.read(name))
        return {str(given) for code, given, _ in found if code.name == "GLOBAL"}


@pytest.mark.slow_cells("2_bf16_world2")
@pytest.mark.parametrize("case", ["1_fp16_world2", "2_bf16_world2", "3_bf16_world2"])
def test_deepspeeds_become_what_its_converter_makes(case: str, tmp_path: Path) -> None:
    """File for file: the two kept checkpoints are of the same training."""
    saved = unpack(f"stage{case}", tmp_path / "saved")
    expected = unpack(f"universal{case}", tmp_path / "expected").checkpoint
    out = saved.folder / f"{saved.tag}_universal"
    export_universal(opened(saved.checkpoint), out)
    assert (saved.folder / "latest_universal").read_text() == out.name
    files = {path.relative_to(expected) for path in expected.rglob("*.pt")}
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_file()} == files
    for file in files:
        if file.name.endswith("_model_states.pt"):
            # A copy; the kept ones differ in padding that was never written.
            assert (out / file).read_bytes() == (saved.checkpoint / file).read_bytes()
            continue
        found, theirs = read_named(out / file), read_named(expected / file)
        assert plain(found) == plain(theirs), file
        assert names_in(out / file) == names_in(expected / file), file


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world"), [(2, 1), (3, 4), (1, 2)])
def test_training_goes_on_from_it(
    stage: int, world: int, own: tuple[Path, Any], ranks: RankPools, tmp_path: Path
) -> None:
    """Hadal's checkpoint, its universal form, and back: the same bits at other numbers of ranks."""
    folder, _ = own
    source, seen = opened(folder), list[int]()
    export_universal(source, tmp_path / "step3_universal", progress=seen.append)
    assert sum(seen) == nbytes_of_universal(source)
    done = ranks(world).run(go_on, str(folder), str(tmp_path), stage, "bf16")
    for same, client_state, _ in done:
        assert same == [True, True, True]
        assert client_state["epoch"] == 4 and torch.equal(client_state["table"], torch.arange(3))


def save_in_fp16(folder: str) -> tuple[Any, dict[str, Tensor]]:
    engine = engine_of(1, "fp16")
    train(engine, range(3))
    engine.save_checkpoint(folder)
    found = engine.loss_scale, state_of(engine)
    engine.destroy()
    return found


def load_in_fp16(folder: str) -> tuple[Any, dict[str, Tensor]]:
    engine = engine_of(2, "fp16")
    engine.load_checkpoint(folder)
    found = engine.loss_scale, state_of(engine)
    engine.destroy()
    return found


def test_the_loss_scale_goes_along(ranks: RankPools, tmp_path: Path) -> None:
    saved = ranks(2).run(save_in_fp16, str(tmp_path / "saved"))[0]
    out = export_universal(opened(tmp_path / "saved"), tmp_path / "out" / "u")
    scaler = read_named(out / "zero/optimizer_state.pt")["loss_scaler"]
    assert type(scaler).__qualname__ == "DynamicLossScaler"
    # The toy's scale has doubled after two updates without overflow.
    assert scaler.cur_scale == saved[0] == 512.0 and scaler.cur_iter == 3
    (loaded,) = ranks(1).run(load_in_fp16, str(tmp_path / "out"))
    assert loaded[0] == saved[0]
    assert all(torch.equal(value, loaded[1][name]) for name, value in saved[1].items())


def save_golden(folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    engine, *_ = hadal.initialize(model=model, config=config)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
        engine.step()
    engine.save_checkpoint(folder, client_state={"mine": 1})
    engine.destroy()


def test_the_layout_is_that_of_deepspeed(ranks: RankPools, tmp_path: Path) -> None:
    golden = json.loads((ROOT / "tests/data/universal_layout.json").read_text())
    ranks(1).run(save_golden, str(tmp_path / "saved"))
    out = export_universal(opened(tmp_path / "saved"), tmp_path / "ucu")
    files = {f"ucu/{path.relative_to(out)}" for path in out.rglob("*") if path.is_file()}
    # The second name of the model states is the one that stage 3 looks for.
    assert files - golden.keys() == {"ucu/zero_pp_rank_0_mp_rank_00_model_states.pt"}
    assert golden.keys() <= files
    for name, expected in golden.items():
        found = read_named(tmp_path / name)
        if name.endswith("/step.pt"):
            assert str(found) == expected
        elif "/zero/optimizer_state" in name:
            # Gradients are clipped as configured there. At stage 3 DeepSpeed looks for a second
            # place of the groups.
            assert found.keys() ^ expected.keys() == {"clip_grad", "optimizer_state_dict"}
            assert found["loss_scaler"].cur_scale == 1.0 and not found["loss_scaler"].dynamic
            (group,), (theirs,) = found["param_groups"], expected["param_groups"]
            assert {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()} == theirs
            for key in ("group_paddings", "param_alignment_paddings", "partition_count"):
                assert found[key] == expected[key]
        elif "/zero/" in name:
            assert found.keys() == expected.keys() and found["cat_dim"] == expected["cat_dim"]
            shape, dtype = list(found["param"].shape), str(found["param"].dtype)
            assert [shape, dtype] == expected["param"]
        else:
            assert found.keys() == expected.keys()
            assert list(found["module"]) != [] and set(found["module"]) == set(expected["module"])
            shapes = [{k: list(v) for k, v in one.items()} for one in found["param_shapes"]]
            assert shapes == expected["param_shapes"]
            assert (found["global_steps"], found["mine"]) == (3, 1)


def load_latest(folder: str, is_universal: bool) -> str:
    model = toy.Toy()
    config = {**toy.config_of(1, "bf16"), "checkpoint": {"load_universal": is_universal}}
    groups = toy.groups_of(model)
    engine, *_ = hadal.initialize(model=model, model_parameters=groups, config=config)
    path, _ = engine.load_checkpoint(folder)
    engine.destroy()
    return str(path)


@pytest.mark.claims("checkpoint.load_universal")
def test_the_key_chooses_which_latest_counts(
    own: tuple[Path, Any], ranks: RankPools, tmp_path: Path
) -> None:
    saved = unpack("stage2_bf16_world2", tmp_path)
    assert ranks(1).run(load_latest, str(tmp_path), True) == [str(saved.checkpoint)]
    export_universal(opened(saved.checkpoint), tmp_path / "u")
    assert ranks(1).run(load_latest, str(tmp_path), True) == [str(tmp_path / "u")]
    assert ranks(1).run(load_latest, str(tmp_path), False) == [str(saved.checkpoint)]


def test_the_command_writes_it(
    own: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, exact = own
    words = ["checkpoint", "export", str(folder), str(tmp_path), "--format", "deepspeed-universal"]
    assert main(words) == 0
    out = tmp_path / "global_step3_universal"
    assert capsys.readouterr().out.startswith(f"{out}  ")
    assert (tmp_path / "latest_universal").read_text() == out.name
    found = read_named(out / "zero/words.weight/exp_avg.pt")["param"]
    assert torch.equal(found, exact["words.weight.exp_avg"])
    assert os.path.samefile(out / "zero/head.weight/fp32.pt", out / "zero/words.weight/fp32.pt")
    assert main([*words, "--dtype", "bf16"]) == 1
    assert "is fp32 and has the optimizer's state" in capsys.readouterr().err


def test_deepspeeds_command_converts(
    own: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = own
    out = tmp_path / "u"
    words = ["--input_folder", str(folder / "global_step3"), "--output_folder", str(out)]
    more = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    assert ds_to_universal([*words, *more]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert (tmp_path / "latest_universal").read_text() == "u"
    assert ds_to_universal([*words]) == 0  # again, over it
    assert ds_to_universal([words[0], str(out), words[2], str(tmp_path / "v")]) == 1
    assert "is in the universal format already" in capsys.readouterr().err


def test_the_same_release_is_told_everywhere() -> None:
    assert surface.VERSION == VERSION


def put(path: Path, value: Any) -> None:
    """Replace a file that may be mapped."""
    write_named(value, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.slow_cells("info3-entry3")
@pytest.mark.parametrize(
    ("info", "entry"),
    [
        ({"parameter_with_row_parallelism_patterns": ["inner.*"]}, {"cat_dim": 1}),
        ({"tp_replicated_parameter_patterns": ["inner.*"]}, {}),
        (
            {"parameter_with_2_sub_params_cat_dim_0": ["inner.*"]},
            {"cat_dim": 0, "param_n_sub_params": 2},
        ),
        (
            {"vocabulary_parameter_patterns": ["inner.weight"], "original_vocab_size": 9},
            {"cat_dim": 0, "vocab_tensor": True},
        ),
    ],
)
def test_patterns_are_noted(info: Any, entry: Any, tmp_path: Path) -> None:
    saved = unpack("stage2_bf16_world2", tmp_path)
    path = saved.checkpoint / "mp_rank_00_model_states.pt"
    model = read_named(path)
    put(path, {**model, "universal_checkpoint_info": info})
    out = export_universal(opened(saved.checkpoint), tmp_path / "u")
    found = read_named(out / "zero/inner.weight/exp_avg.pt")
    value = found.pop("param")
    assert found == entry
    rows = info.get("original_vocab_size", 11)
    assert torch.equal(value, saved.tensors["exp_avg.inner.weight"][:rows])
    put(path, {**model, "universal_checkpoint_info": {"parameter_to_average_patterns": ["nil"]}})
    with pytest.raises(
        CheckpointError, match="nil in universal_checkpoint_info match no parameter"
    ):
        export_universal(opened(saved.checkpoint), tmp_path / "v")
    export_universal(opened(saved.checkpoint), tmp_path / "v", strict=False)
    put(path, {**model, "universal_checkpoint_info": {"affine_map": {"params": {}}}})
    with pytest.raises(NotBuiltYetError, match="convert it with DeepSpeed"):
        export_universal(opened(saved.checkpoint), tmp_path / "w")


def test_patterns_in_the_client_state_are_noted(tmp_path: Path, ranks: RankPools) -> None:
    """Megatron-DeepSpeed has them in every checkpoint."""
    name, info = "inner.weight", {"parameter_with_row_parallelism_patterns": ["inner.*"]}
    client_state = {"universal_checkpoint_info": info}
    ranks(1).run(save_with, str(tmp_path / "own"), client_state)
    theirs = unpack("stage3_bf16_world2", tmp_path / "theirs")
    for path in theirs.checkpoint.glob("*_model_states.pt"):
        put(path, {**read_named(path), **client_state})
    assert opened(theirs.checkpoint).client_state().items() >= client_state.items()
    for place, dims in ((tmp_path / "own", 1), (theirs.checkpoint, None)):
        out = export_universal(opened(place), place.parent / "u")
        model = next(out.glob("*_model_states.pt"))
        assert read_named(model).items() >= client_state.items()
        found = read_named(out / "zero" / name / "fp32.pt")
        assert dims == (found["cat_dim"] if isinstance(found, dict) else None)


def test_what_it_cannot_hold_is_refused(tmp_path: Path, ranks: RankPools) -> None:
    unnamed = unpack("stage0_bf16_world2", tmp_path / "unnamed")
    with pytest.raises(CheckpointError, match="holds no optimizer state with names"):
        export_universal(opened(unnamed.folder), tmp_path / "u")
    ranks(1).run(save_with, str(tmp_path / "taken"), {"module": 1})
    with pytest.raises(CheckpointError, match="has the keys module, which DeepSpeed uses"):
        export_universal(opened(tmp_path / "taken"), tmp_path / "u")
    assert not (tmp_path / "u").exists() and not (tmp_path / "latest_universal").exists()


def save_with(folder: str, client_state: dict[str, Any]) -> None:
    engine = engine_of(0, "fp32")
    train(engine, range(1))
    engine.save_checkpoint(folder, client_state=client_state)
    engine.destroy()


# ---- DeepSpeed itself ----------------------------------------------------------------------------

THEIRS = """
import sys, torch, deepspeed, os
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import toy
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
deepspeed.init_distributed("gloo")
stage = int(sys.argv[2])
model = toy.Toy()
config = {**toy.config_of(stage, "bf16"), "checkpoint": {"load_universal": True}}
del config["scheduler"]
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=toy.groups_of(model), config=config
)
path, client_state = engine.load_checkpoint(sys.argv[1])
assert "step3_universal" in path, path
assert client_state["epoch"] == 4 and engine.global_steps == 3
def values():
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found
before = values()
for step in (3, 4):
    tokens = toy.batch_of(step, engine.global_rank)
    engine.backward(toy.loss_of(engine(tokens), tokens))
    engine.step()
after = values()
if engine.global_rank == 0:
    torch.save((before, after), sys.argv[1] + f"/theirs{stage}.pt")
sys.stdout.flush()
torch.distributed.barrier()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not DEEPSPEED.exists(), reason="DeepSpeed is not there: benchmarks/step.py --install-deepspeed"
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_from_it(stage: int, own: tuple[Path, Any], tmp_path: Path) -> None:
    """With the same bits of state, at each of its stages."""
    folder, exact = own
    export_universal(opened(folder), tmp_path / "step3_universal")
    (tmp_path / "theirs.py").write_text(THEIRS)
    data = str(ROOT / "tests/data/deepspeed")
    command = [str(DEEPSPEED), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(tmp_path / "theirs.py"), str(tmp_path), str(stage), data]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = torch.load(tmp_path / f"theirs{stage}.pt")
    assert before.keys() == exact.keys()
    for name, value in exact.items():
        assert torch.equal(before[name].view_as(value), value), name
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0.001 < moved < 0.1  # two updates, at rates of 0.01 and 0.02
