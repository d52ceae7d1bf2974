"""Folders of `torch.distributed.checkpoint`: exported, and read by stock torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import RankPools
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import hadal
from checkpoint.deepspeed_cases import toy, unpack
from hadal import comm
from hadal.checkpoint.formats import dcp as written
from hadal.checkpoint.formats.dcp import export_dcp, nbytes_of_dcp
from hadal.checkpoint.opening import opened
from hadal.cli.main import main
from hadal.errors import CheckpointError

# One process loads: torch warns about that.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def train(engine: Any, steps: range) -> None:
    for step in steps:
        tokens = toy.batch_of(step, comm.get_rank())
        engine.backward(toy.loss_of(engine(tokens), tokens))
        engine.step()


def engine_of(stage: int, dtype: str) -> Any:
    model = toy.Toy()
    config = {**toy.config_of(stage, dtype), "gradient_clipping": 0.0}
    del config["scheduler"]
    groups = toy.groups_of(model)
    return hadal.initialize(model=model, model_parameters=groups, config=config)[0]


def state_of(engine: Any) -> dict[str, Tensor]:
    """Return masters and moments, by name and key."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = hadal.utils.safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                full = hadal.utils.safe_get_full_optimizer_state(parameter, key)
                found[f"{name}.{key}"] = full
    return {name: value.clone() for name, value in found.items()}


def save(folder: str, stage: int, dtype: str) -> dict[str, Tensor]:
    engine = engine_of(stage, dtype)
    train(engine, range(3))
    engine.save_checkpoint(folder, client_state={"epoch": 4, "table": torch.arange(3)})
    exact = state_of(engine)
    engine.destroy()
    return exact


@pytest.fixture(scope="module")
def own(
    ranks: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Tensor]]:
    """Return a checkpoint, stage 3 on two ranks in bf16, and its exact state."""
    folder = tmp_path_factory.mktemp("own")
    exact, _ = ranks(2).run(save, str(folder), 3, "bf16")
    return folder, exact


@pytest.mark.parametrize("limit", [100, 8 << 20])
def test_stock_torch_reads_model_and_optimizer(
    limit: int, own: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "_CHUNK_NBYTES", limit)
    folder, exact = own
    files = export_dcp(opened(folder), tmp_path / "out", max_file_nbytes=8000)
    assert len(files) > 2 and all(path.exists() for path in files)
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    torch.manual_seed(99)
    model = toy.Toy()
    model.fixed.weight.data.zero_()
    # Its groups, and its options: those of the checkpoint differ.
    optimizer = torch.optim.AdamW(toy.groups_of(model), lr=1.0)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, exact[name]), name
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[parameter][key], exact[f"{name}.{key}"])
            assert optimizer.state[parameter]["step"] == 3
    assert torch.equal(model.fixed.weight, toy.Toy().fixed.weight.bfloat16().float())
    assert model.head.weight is model.words.weight
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_training_goes_on_in_plain_torch(ranks: RankPools, tmp_path: Path) -> None:
    """Two more updates in plain torch give the bits that Hadal's give, in fp32 on one process."""
    (after,) = ranks(1).run(save_and_go_on, str(tmp_path))
    export_dcp(opened(tmp_path), tmp_path / "out")
    model = toy.Toy()
    optimizer = torch.optim.AdamW(toy.groups_of(model))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step in (3, 4):
        optimizer.zero_grad()
        tokens = toy.batch_of(step, 0)
        toy.loss_of(model(tokens), tokens).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter, after[name], rtol=1e-6, atol=1e-7)


def save_and_go_on(folder: str) -> dict[str, Tensor]:
    engine = engine_of(2, "fp32")
    train(engine, range(3))
    engine.save_checkpoint(folder)
    train(engine, range(3, 5))
    exact = state_of(engine)
    engine.destroy()
    return exact


def test_a_dtype_may_be_chosen_and_the_optimizer_left_out(
    own: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, exact = own
    source = opened(folder)
    seen: list[int] = []
    out = tmp_path / "out"
    export_dcp(source, out, dtype=torch.bfloat16, with_optimizer=False, progress=seen.append)
    assert sum(seen) == nbytes_of_dcp(source, torch.bfloat16, with_optimizer=False)
    dcp_to_torch_save(out, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert state.keys() == {"model", "hadal"}
    assert state["model"].keys() == toy.Toy().state_dict().keys()
    words = state["model"]["words.weight"]
    assert torch.equal(words, exact["words.weight"].bfloat16()) and words.dtype == torch.bfloat16
    told = json.loads(state["hadal"]["training"]["json"])
    assert told["world_size"] == 2 and told["optimizer"] is None


def test_deepspeeds_leave_the_same_way(tmp_path: Path) -> None:
    saved = unpack("stage2_bf16_world2", tmp_path / "saved")
    export_dcp(opened(saved.folder), tmp_path / "out")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    for name, value in saved.tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "fp32":
            assert torch.equal(state["model"][rest], value)
        elif kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state["optimizer"]["state"][rest][kind], value)


def test_an_export_is_complete_or_absent(
    own: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = own
    out = tmp_path / "out"
    export_dcp(opened(folder), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    source = opened(folder)
    reads = iter(range(4))

    def read(name: str, kind: str, start: int, stop: int) -> Tensor:
        if next(reads, None) is None:
            raise CheckpointError("a bad sector")
        return type(source).read(source, name, kind, start, stop)

    monkeypatch.setattr(source, "read", read)
    with pytest.raises(CheckpointError, match="a bad sector"):
        export_dcp(source, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    export_dcp(opened(folder), out, with_optimizer=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(CheckpointError, match="mine is not empty, and not an earlier export"):
        export_dcp(opened(folder), tmp_path / "mine")


def test_the_command_writes_it(
    own: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, exact = own
    out = tmp_path / "out"
    words = ["checkpoint", "export", str(folder), str(out), "--format", "dcp"]
    assert main([*words, "--max-shard-size", "5kB"]) == 0
    told = capsys.readouterr().out
    assert [line.split("  ")[0] for line in told.splitlines()] == [
        str(path) for path in sorted(out.iterdir())
    ]
    state = {"model": {"inner.weight": torch.empty(11, 7)}}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert torch.equal(state["model"]["inner.weight"], exact["inner.weight"])
    assert main([*words, "--no-optimizer", "--dtype", "fp16"]) == 0
    with pytest.raises(CheckpointException, match="optimizer"):
        dcp.load(
            {"optimizer": {"state": {"gain": torch.empty(1)}}}, checkpoint_id=out, no_dist=True
        )
