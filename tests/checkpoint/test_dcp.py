"""Folders of `torch.distributed.checkpoint`: exported, and read by stock torch."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine.logs import logged
from ranks import RankPools
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hadal
from checkpoint.deepspeed_cases import toy, unpack
from hadal import comm
from hadal.checkpoint.formats import dcp as written
from hadal.checkpoint.formats.dcp import export_dcp, nbytes_of_dcp
from hadal.checkpoint.formats.dcp_source import DcpSource
from hadal.checkpoint.opening import opened
from hadal.cli.main import main
from hadal.errors import CheckpointError
from hadal.utils import get_fp32_state_dict_from_zero_checkpoint

# One process loads: torch warns about that.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def train(engine: Any, steps: range) -> None:
    for step in steps:
        tokens = toy.batch_of(step, comm.get_rank())
        engine.backward(toy.loss_of(engine(tokens), tokens))
        engine.step()


def engine_of(stage: int, dtype: str, clipping: float = 0.0) -> Any:
    model = toy.Toy()
    config = {**toy.config_of(stage, dtype), "gradient_clipping": clipping}
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


@pytest.mark.fast_cells("8388608")
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


# ---- back in -------------------------------------------------------------------------------------


def go_on(saved: str, exported: str, stage: int, dtype: str) -> tuple[list[bool], Any, list[str]]:
    """Load a checkpoint and its export; return whether both go on alike, and what was told."""
    lines: list[str] = []
    found = []
    for folder in (saved, exported):
        engine = engine_of(stage, dtype)
        with logged() as heard:
            path, client_state = engine.load_checkpoint(folder)
        assert Path(path).is_relative_to(folder)
        lines = heard
        before = state_of(engine)
        train(engine, range(3, 5))
        found.append((before, state_of(engine), engine.global_steps, engine.state_dict()))
        engine.destroy()
    (before, after, steps, whole), (*_,) = found
    other_before, other_after, other_steps, other_whole = found[1]
    same = [
        all(torch.equal(value, b[name]) for name, value in a.items()) and a.keys() == b.keys()
        for a, b in ((before, other_before), (after, other_after), (whole, other_whole))
    ]
    assert steps == other_steps == 5
    return same, client_state, lines


@pytest.mark.fast_cells("0-2")
@pytest.mark.parametrize(("stage", "world"), [(2, 1), (3, 4), (0, 2)])
def test_training_goes_on_from_an_export(
    stage: int, world: int, own: tuple[Path, Any], ranks: RankPools, tmp_path: Path
) -> None:
    """With the bits that the checkpoint itself gives, at another stage and number of ranks."""
    folder, _ = own
    export_dcp(opened(folder), tmp_path / "out")
    done = ranks(world).run(go_on, str(folder), str(tmp_path / "out"), stage, "bf16")
    for same, client_state, _ in done:
        assert same == [True, True, True]
        assert client_state["epoch"] == 4 and torch.equal(client_state["table"], torch.arange(3))
    assert any("neither random generators" in line for line in done[0][2])
    assert not any(lines for *_, lines in done[1:])


def test_weights_are_read_from_a_folder(own: tuple[Path, Any], tmp_path: Path) -> None:
    folder, exact = own
    export_dcp(opened(folder), tmp_path / "out")
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out")
    assert state.keys() == toy.Toy().state_dict().keys()
    assert torch.equal(state["words.weight"], exact["words.weight"])
    assert state["head.weight"] is state["words.weight"]


def save_sharded(folder: str) -> None:
    """Save with stock torch from two ranks, in rows and in columns."""
    mesh = init_device_mesh("cpu", (comm.get_world_size(),))
    torch.manual_seed(5)
    model = toy.Toy()
    optimizer = torch.optim.AdamW(toy.groups_of(model), lr=0.01)
    tokens = toy.batch_of(0, 0)
    toy.loss_of(model(tokens), tokens).backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["model"] = {
        name: distribute_tensor(value, mesh, [Shard(number % value.dim())])
        for number, (name, value) in enumerate(state["model"].items())
    }
    dcp.save(state, checkpoint_id=folder)
    if comm.get_rank() == 0:
        torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}.pt")


def load_sharded(folder: str) -> list[str]:
    engine = engine_of(2, "fp32")
    with logged() as heard:
        engine.load_checkpoint(folder)
    weights, optimizer = torch.load(f"{folder}.pt")
    for name, value in engine.state_dict().items():
        assert torch.equal(value, weights[name]), name
    exact = state_of(engine)
    trained = [name for name, p in toy.Toy().named_parameters() if p.requires_grad]
    order = [n for n in trained if weights[n].dim() > 1] + [
        n for n in trained if weights[n].dim() < 2
    ]
    for number, name in enumerate(order):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(exact[f"{name}.{key}"], optimizer["state"][number][key]), name
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 0.02]
    engine.destroy()
    return heard


def test_a_folder_of_stock_torch_loads(ranks: RankPools, tmp_path: Path) -> None:
    """Saved in shards of rows and columns by two ranks, with optimizer state by number."""
    ranks(2).run(save_sharded, str(tmp_path / "theirs"))
    for world in (1, 2):
        heard = ranks(world).run(load_sharded, str(tmp_path / "theirs"))[0]
        assert len([line for line in heard if "neither random generators" in line]) == 1
        assert any("counted from here on" in line for line in heard)


def test_the_model_may_lie_deeper_or_alone(tmp_path: Path) -> None:
    weights = toy.Toy().state_dict()
    for number, state in enumerate(({"app": {"model": weights}}, weights, {"model": weights})):
        folder = tmp_path / str(number)
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        source = DcpSource(folder)
        found = source.entries.keys()
        # Stock torch stores a tied weight once for each name.
        assert found == {(name, "weight") for name in weights}
        assert ("shift", "buffer") in source.entries and ("gain", "buffer") in source.entries
        assert ("nothing", "buffer") not in source.entries
        whole = source.read_own("inner.weight", "weight", 0)
        assert torch.equal(whole, weights["inner.weight"])


def test_state_by_name_in_one_word_is_understood(tmp_path: Path) -> None:
    model = toy.Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    source = DcpSource(tmp_path / "theirs")
    assert source.entries["inner.weight", "state.exp_avg"].shape == (11, 7)
    assert "step" in source.state["inner.weight"]


def test_a_strange_index_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "run"),)

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir; none of its code was run"):
        opened(tmp_path / "theirs")
    assert not (tmp_path / "run").exists()
    (tmp_path / "theirs" / ".metadata").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        opened(tmp_path / "theirs")


def test_an_index_of_tuples_in_tuples_is_refused_at_once(tmp_path: Path) -> None:
    """A hundred bytes, whose key of a dict would take hours to hash."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x02})" + b"2\x86" * 48 + b"K\x01s.")
    with pytest.raises(CheckpointError, match="it nests tuples of over 65536 values"):
        opened(tmp_path)


def test_no_file_outside_the_folder_is_opened(tmp_path: Path) -> None:
    """Not even to learn its length: an error would tell whether it is there."""
    home = tmp_path / "theirs"
    dcp.save({"model": toy.Toy().state_dict()}, checkpoint_id=home, no_dist=True)
    (home / "__0_0.distcp").rename(tmp_path / "o.distcpx")
    index = home / ".metadata"
    plain = index.read_bytes()
    for name in (b"../o.distcpx", b"../none.disx"):  # as long as the name that they replace
        index.write_bytes(plain.replace(b"__0_0.distcp", name))
        with pytest.raises(CheckpointError, match="leads out of the checkpoint's folder"):
            DcpSource(home)


def test_damage_is_found(
    own: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = own
    out = tmp_path / "out"
    export_dcp(opened(folder), out)
    assert main(["checkpoint", "inspect", str(out), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["writer"], report["faults"]) == ("torch.distributed.checkpoint", [])
    assert (report["parameters"], report["global_steps"], report["world_size"]) == (399, 3, 2)
    path = out / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    item = DcpSource(out)._values["inner.weight", "weight"].chunks[0].item
    data[item.offset + item.length // 2] ^= 1
    path.write_bytes(data)
    assert main(["checkpoint", "inspect", str(out)]) == 1
    assert f"damaged: {path} is damaged at byte {item.offset}" in capsys.readouterr().out
    source = DcpSource(out)
    path.write_bytes(data[: len(data) // 8])
    with pytest.raises(CheckpointError, match="is damaged at byte"):
        DcpSource(out)
    with pytest.raises(CheckpointError, match="missing, or shorter"):
        for name, kind in source.entries:
            source.expect(name, kind, 0, 1)
