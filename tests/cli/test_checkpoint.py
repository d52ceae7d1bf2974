"""`hadal checkpoint`: inspecting and exporting, in fresh processes and inside this one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.deepspeed_cases import toy, unpack
from checkpoint.test_between import part_engine, train_part
from engine.toys import assert_equal
from ranks import RankPools
from safetensors.torch import load_file

import hadal
from hadal import comm
from hadal.cli.main import main
from hadal.errors import CheckpointError
from hadal.utils import get_fp32_state_dict_from_zero_checkpoint

ROOT = Path(__file__).parents[2]
FILES = ("index.json", "rank_00000.safetensors", "rank_00001.safetensors")


def save_two(folder: str) -> None:
    model = toy.Toy()
    engine, *_ = hadal.initialize(
        model=model, model_parameters=toy.groups_of(model), config=toy.config_of(2, "bf16")
    )
    for step in range(2):
        tokens = toy.batch_of(step, comm.get_rank())
        engine.backward(toy.loss_of(engine(tokens), tokens))
        engine.step()
        engine.save_checkpoint(folder)
    engine.destroy()


@pytest.fixture(scope="module")
def made(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    ranks(2).run(save_two, str(folder))
    return folder


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "saved"))


def inspected(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    code = main(["checkpoint", "inspect", str(folder), "--json", *options])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def test_contents_are_reported(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, reports = inspected(saved, capsys)
    assert code == 0
    assert [report["tag"] for report in reports] == ["global_step1", "global_step2"]
    assert [report["is_latest"] for report in reports] == [False, True]
    last = reports[-1]
    expected = {"writer": "Hadal", "stage": 2, "world_size": 2, "global_steps": 2, "faults": []}
    assert {key: last[key] for key in expected} == expected
    assert last["parameters"] == sum(p.numel() for p in toy.Toy().parameters())
    holdings = {(one["kind"], one["dtype"]): one for one in last["holdings"]}
    # The frozen one alone is stored: the others are the rounding of their masters.
    assert holdings["weight", "bfloat16"]["nbytes"] == 2 * toy.Toy().fixed.weight.numel()
    assert holdings["state.exp_avg", "float32"]["tensors"] == 8
    assert last["checked"] and last["saved_at"] > 1e9
    assert last["file_nbytes"] == sum(
        path.stat().st_size for path in (saved / "global_step2").glob("*/rank_*")
    )
    code, (only,) = inspected(saved, capsys, "--tag", "global_step1", "--quick")
    assert (code, only["tag"], only["checked"]) == (0, "global_step1", False)
    code, (only,) = inspected(saved / "global_step2", capsys)
    assert only["is_latest"]


def test_people_see_a_table(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(saved)]) == 0
    shown = capsys.readouterr().out
    for word in ("global_step2", "latest", "whole", "state.exp_avg", "bfloat16", "399"):
        assert word in shown, word


@pytest.mark.parametrize("name", FILES)
def test_damage_is_named(name: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved / "global_step2"
    path = folder / name if name == "index.json" else next(folder.glob(f"*/{name}"))
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)
    code, reports = inspected(saved, capsys)
    assert code == 1
    healthy, damaged = sorted(reports, key=lambda report: report["tag"])
    assert healthy["faults"] == []
    assert len(damaged["faults"]) == 1 and name in damaged["faults"][0]
    assert main(["checkpoint", "inspect", str(saved)]) == 1
    shown = capsys.readouterr().out
    assert "damaged" in shown and str(path) in shown
    path.unlink()
    if name != "index.json":  # without it there is no checkpoint, and `latest` names none
        assert "cannot be read" in inspected(saved, capsys)[1][-1]["faults"][0]
    assert main(["checkpoint", "inspect", str(saved)]) == 1


def test_every_byte_is_verified(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(saved)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown] == ["global_step1", "global_step2"]
    assert all(line.endswith(": whole") and ": 2 files, " in line for line in shown)
    (path,) = (saved / "global_step2").rglob("rank_00001.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["checkpoint", "verify", str(saved), "global_step1"]) == 0
    assert "global_step2" not in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(saved), "global_step2"]) == 1
    shown = capsys.readouterr().out
    assert f"damaged: {path} is damaged" in shown
    assert main(["checkpoint", "verify", str(saved)]) == 1
    assert main(["checkpoint", "verify", str(saved), "nothing"]) == 1
    assert "complete checkpoints there: global_step1, global_step2" in capsys.readouterr().err


def test_a_lost_latest_is_a_fault(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "latest").write_text("global_step9")
    code, reports = inspected(saved, capsys)
    assert code == 1
    assert [r["faults"] for r in reports if r["is_latest"]] == [
        [f"{saved / 'latest'} names 'global_step9', but there is no such checkpoint"]
    ]


def save_parts(folder: str) -> None:
    engine = part_engine(3, stage3_gather_16bit_weights_on_model_save=True)
    train_part(engine, range(1))
    engine.save_checkpoint(folder)
    assert engine.save_16bit_model(folder) is True
    state = engine._zero3_consolidated_16bit_state_dict()
    whole = engine.state_dict()
    part, is_first = engine.topology.model_parallel.rank, engine.topology.sharding.rank == 0
    assert (state is not None) == is_first
    if state is not None:
        assert_equal(dict(state), whole)
        torch.save(whole, Path(folder, f"part{part}.pt"))
    engine.destroy()


@pytest.mark.fast_cells("2")
@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_a_model_leave_one_by_one(
    world: int, ranks: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(world).run(save_parts, str(tmp_path))
    code, (report,) = inspected(tmp_path, capsys)
    assert (code, report["parts"]) == (0, 2)
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    assert "elements of weights in 2 parts" in capsys.readouterr().out
    target = tmp_path / "out"
    assert main(["checkpoint", "export", str(tmp_path), str(target)]) == 1
    assert "nothing says which part of the whole model down.weight" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(tmp_path), str(target), "--part", "2"]) == 1
    assert "in 2 model-parallel parts, but part 2 is requested" in capsys.readouterr().err
    for part in range(2):
        whole = torch.load(tmp_path / f"part{part}.pt")
        told = ["checkpoint", "export", str(tmp_path), str(target), "--part", str(part)]
        assert main(told) == 0
        for folder in (target, tmp_path / f"mp_rank_0{part}"):
            found = load_file(folder / "model.safetensors")
            assert_equal({name: found[name] for name in whole}, whole)
            assert len(found) == len(whole)
        assert_equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path, part=part), whole)
    with pytest.raises(CheckpointError, match="read the parts one by one"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize("case", ["stage3_bf16_world2", "universal1_fp16_world2"])
def test_deepspeeds_are_reported_too(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpacked = unpack(case, tmp_path)
    code, (report,) = inspected(tmp_path, capsys)
    assert code == 0
    assert report["writer"].startswith("DeepSpeed 0.19.8")
    assert report["writer"].endswith("universal") == case.startswith("universal")
    assert (report["is_latest"], report["world_size"], report["global_steps"]) == (True, 2, 3)
    assert report["parameters"] == 399
    for path in sorted(unpacked.checkpoint.rglob("*_states.pt"))[:1]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
        code, (report,) = inspected(tmp_path, capsys)
        assert code == 1 and path.name in report["faults"][0]


def test_an_empty_directory_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 1
    assert "is not a checkpoint" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(tmp_path / "no"), str(tmp_path / "out")]) == 1
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "options", "dtype"),
    [
        ("export", [], torch.bfloat16),
        ("export", ["--dtype", "fp16"], torch.float16),
        ("to-fp32", [], torch.float32),
    ],
)
def test_weights_are_exported(
    command: str,
    options: list[str],
    dtype: torch.dtype,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    size = ["--max-shard-size", "500B"] if options else []
    assert main(["checkpoint", command, str(saved), str(out), *options, *size]) == 0
    told = capsys.readouterr().out
    paths = sorted(out.glob("*.safetensors"))
    assert [line.split("  ")[0] for line in told.splitlines()] == [str(p) for p in paths]
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        tensors |= load_file(path)
    exact = hadal.utils.get_fp32_state_dict_from_zero_checkpoint(saved)
    for name, value in tensors.items():
        if name != "shift":
            assert value.dtype == dtype
            assert torch.equal(value, exact[name].to(dtype)), name


def test_the_command_starts_without_torch() -> None:
    code = "import sys, hadal.cli.main as m\nm.main(['checkpoint', '--help'])"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "to-fp32" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "hadal.cli.checkpoint" in imported
    assert not {"torch", "numpy", "rich", "safetensors"} & imported
