"""`checkpoint.deepspeed_files`: the files that DeepSpeed's tools read, beside Hadal's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_pipeline import engine_of as engine_in_stages
from engine.toys import assert_equal, engine_of
from ranks import RankPools, RanksFailed
from torch import Tensor, nn

from checkpoint.test_both_ways import ENVIRONMENT, run_with_deepspeed
from checkpoint.test_reshard import BF16, KEYS, Odd, trained
from hadal.checkpoint import saving
from hadal.checkpoint.deepspeed.source import DeepSpeedSource
from hadal.checkpoint.export import state_dict_of
from hadal.checkpoint.inspection import inspected
from hadal.checkpoint.stored import StoredSource
from hadal.cli.main import main as hadal_main
from hadal.compat.reshaping import DeepSpeedCheckpoint
from hadal.config import load_config
from hadal.errors import CheckpointError, ConfigError, NotBuiltYetError
from hadal.plugins.moe import MoE
from hadal.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

FILES = {"deepspeed_files": True}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups, each of parameters that are not next to each other in the model."""
    own = [p for p in model.parameters() if p.requires_grad]
    return [{"params": own[::2], "weight_decay": 0.1}, {"params": own[1::2], "weight_decay": 0.0}]


def engine_with(stage: int, keys: dict[str, Any], seed: int = 3, **section: Any) -> Any:
    model = Odd(seed)
    wishes = {"model_parameters": groups_of(model)}
    return engine_of(stage, model, wishes, checkpoint={**FILES, **section}, **keys)


def values_of(engine: Any) -> dict[str, Tensor]:
    """All fp32 weights and moments, by the names of `state_dict_of` and of the optimizer's keys."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(parameter)
        found[name] = whole if whole is not None else engine.state_dict()[name].float()
        for key in KEYS if parameter.requires_grad else ():
            found[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
    return {name: value for name, value in found.items() if value is not None}


def save(folder: str, stage: int, keys: dict[str, Any], is_async: bool) -> dict[str, Tensor]:
    """Save the same tag twice, and return the state of the second save."""
    engine = engine_with(stage, keys, async_save=is_async)
    for _ in range(2):
        trained(engine, range(2))
        engine.save_checkpoint(folder, "one", client_state={"epoch": 2})
    values = values_of(engine)
    engine.wait_for_checkpoint()
    other = engine_with(stage, keys, seed=5)
    assert other.load_checkpoint(folder)[1] == {"epoch": 2}
    assert_equal(values_of(other), values)
    engine.destroy(), other.destroy()
    return values


def expected_names(stage: int, prefix: str) -> set[str]:
    ranks = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(2)]
    model = [f"{rank}_model_states.pt" for rank in ranks] if stage == 3 else []
    optimizer = [f"{prefix}{rank}_optim_states.pt" for rank in ranks] if stage else []
    return {*(model or ["mp_rank_00_model_states.pt"]), *optimizer}


def only_deepspeed(tag: Path, folder: Path) -> Path:
    """Return a copy of a checkpoint's folder without Hadal's own files."""
    shutil.copytree(
        tag,
        folder / tag.name,
        ignore=lambda _, names: {name for name in names if not name.endswith(".pt")},
    )
    (folder / "latest").write_text(tag.name)
    return folder / tag.name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_files_hold_the_masters_and_moments(
    stage: int, dtype: str, ranks: RankPools, tmp_path: Path
) -> None:
    keys = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    values = ranks(2).run(save, str(tmp_path), stage, keys, stage == 2)[0]
    names = {path.name for path in (tmp_path / "one").iterdir() if path.is_file()}
    prefix = "bf16_" if dtype == "bf16" else ""
    assert names == {"index.json", *expected_names(stage, prefix)}
    folder = only_deepspeed(tmp_path / "one", tmp_path / "theirs")
    model = Odd()
    known = {parameter: name for name, parameter in model.named_parameters()}
    rows = [[known[one] for one in group["params"]] for group in groups_of(model)]
    source = DeepSpeedSource(folder, rows)
    source.verify()
    assert source.client_state() == {"epoch": 2}
    state = state_dict_of(source, torch.float32)
    assert torch.equal(state["tied.weight"], state["second.weight"])
    for name, value in values.items():
        weight, _, key = name.partition("/")
        entry = source.entries.get((weight, f"state.{key}"))
        if not key:
            assert torch.equal(state[weight], value), name
        elif value.numel():
            assert torch.equal(source.read(weight, f"state.{key}", 0, entry.numel), value.view(-1))
    assert [report.faults for report in inspected(tmp_path)] == [[]]
    if stage in (1, 2):  # as a tool reads it, for one rank
        whole = DeepSpeedCheckpoint(tmp_path / "one", dp_degree=1)
        assert whole.original_world_size == 2
        flats = whole.get_zero_checkpoint_state(0, 0, 0)["optimizer_state_dict"]
        flat = flats["single_partition_of_fp32_groups"][0]
        one, expected = values["scale"], values["first.weight"]
        assert torch.equal(
            flat[: 1 + expected.numel()], torch.cat([one.view(1), expected.view(-1)])
        )


def save_on(folder: str, tags: list[str], section: dict[str, Any]) -> None:
    engine = engine_of(1, Odd(), checkpoint=section)
    for tag in tags:
        trained(engine, range(1))
        engine.save_checkpoint(folder, tag)
    engine.destroy()


def test_a_later_save_and_keep_last_remove_them(ranks: RankPools, tmp_path: Path) -> None:
    """Whatever has become stale: of more ranks, of a save without the key, of an old tag."""
    theirs = tmp_path / "one"
    ranks(2).run(save_on, str(tmp_path), ["one"], FILES)
    ranks(1).run(save_on, str(tmp_path), ["one"], FILES)
    optimizer = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert {path.name for path in theirs.glob("*.pt")} == {"mp_rank_00_model_states.pt", optimizer}
    ranks(1).run(save_on, str(tmp_path), ["one"], {})
    assert not [*theirs.glob("*.pt")]
    (theirs / "mp_rank_00_model_states.pt").touch()  # somebody else's
    ranks(1).run(save_on, str(tmp_path), ["one"], {})
    assert [*theirs.glob("*.pt")]
    ranks(1).run(save_on, str(tmp_path / "kept"), ["a", "b", "c"], {**FILES, "keep_last": 1})
    assert {path.name for path in (tmp_path / "kept").iterdir() if path.is_dir()} == {"c"}


class Killed(BaseException):
    pass


def killed_save(folder: str, calls: int, error: type[BaseException]) -> dict[str, Tensor]:
    """Save a tag again, and end the save at its first or second move of files; return the state."""
    engine, made = engine_with(2, {}), []
    move = saving.move_rank_files

    def ending(*given: Any) -> None:
        made.append(given)
        if len(made) > calls:
            raise error("here")
        move(*given)

    trained(engine, range(2))
    engine.save_checkpoint(folder, "one")
    trained(engine, range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "move_rank_files", ending)
        with pytest.raises((error, RanksFailed, CheckpointError)):
            engine.save_checkpoint(folder, "one")
    values = values_of(engine)
    engine.destroy()
    return values


def test_a_save_that_is_killed_leaves_no_files_of_another_state(
    ranks: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index is the new one, the files are not in place yet."""
    values = ranks(1).run(killed_save, str(tmp_path), 1, Killed)[0]
    assert not [*(tmp_path / "one").glob("*.pt")]
    [report] = inspected(tmp_path)
    assert len(report.faults) == 2 and "checkpoint clean" in report.faults[0]
    state = state_dict_of(StoredSource(tmp_path / "one"), torch.float32)
    assert torch.equal(state["first.weight"], values["first.weight"])
    for flags, told in (([], "add --yes"), (["--yes"], "in place now"), (["--yes"], "")):
        assert hadal_main(["checkpoint", "clean", str(tmp_path), *flags]) == 0
        assert told in (found := capsys.readouterr().out)
    assert "in place" not in found
    assert [report.faults for report in inspected(tmp_path)] == [[]]
    theirs = DeepSpeedSource(only_deepspeed(tmp_path / "one", tmp_path / "theirs"))
    state = state_dict_of(theirs, torch.float32)
    assert torch.equal(state["first.weight"], values["first.weight"])
    (tmp_path / "one" / "mp_rank_00_model_states.pt").write_bytes(b"damaged")
    [report] = inspected(tmp_path)
    assert len(report.faults) == 1 and "damaged" in report.faults[0]


def failing_save(folder: str) -> None:
    engine = engine_with(2, {})
    engine.save_checkpoint(folder, "one")
    before = {path.name: path.read_bytes() for path in Path(folder, "one").glob("*.pt")}
    trained(engine, range(1))

    def full(*given: Any) -> None:
        raise CheckpointError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_index", full)
        with pytest.raises(CheckpointError, match="disk is full"):
            engine.save_checkpoint(folder, "one")
    assert {path.name: path.read_bytes() for path in Path(folder, "one").glob("*.pt")} == before
    engine.destroy()


def test_a_save_that_fails_leaves_the_files_before_it(ranks: RankPools, tmp_path: Path) -> None:
    ranks(1).run(failing_save, str(tmp_path))
    assert [report.faults for report in inspected(tmp_path)] == [[]]


class Sparse(nn.Module):
    """A model with a layer of experts."""

    def __init__(self, spread: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 8)
        self.experts = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=spread, k=1)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x))[0])


def save_experts(folder: str, spread: int) -> dict[str, Tensor]:
    engine = engine_of(2, Sparse(spread), checkpoint=FILES)
    trained(engine, range(2))
    engine.save_checkpoint(folder, "one")
    return {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}


def test_experts_that_every_rank_has_are_in_the_files(ranks: RankPools, tmp_path: Path) -> None:
    values = ranks(2).run(save_experts, str(tmp_path), 1)[0]
    theirs = DeepSpeedSource(only_deepspeed(tmp_path / "one", tmp_path / "theirs"))
    state = state_dict_of(theirs, torch.float32)
    assert any("deepspeed_experts.1" in name for name in values)
    for name, value in values.items():
        assert torch.equal(state[name], value), name
    for error in ranks(2).raises(save_experts, str(tmp_path), 2):
        assert isinstance(error, NotBuiltYetError) and "experts" in str(error), repr(error)


def save_elsewhere(url: str) -> None:
    save_on(url, ["one"], FILES)


def in_stages() -> None:
    engine_in_stages(2, {"checkpoint": FILES})


def test_what_is_not_built_is_refused(ranks: RankPools) -> None:
    for error in ranks(2).raises(in_stages):
        assert isinstance(error, NotBuiltYetError), repr(error)
        assert "checkpoint.deepspeed_files" in str(error) and "export" in str(error)
    for error in ranks(1).raises(save_elsewhere, "memory://run"):
        assert isinstance(error, NotBuiltYetError) and "into a directory" in str(error)
    section = {**FILES, "use_node_local_storage": True}
    with pytest.raises(ConfigError, match="one directory for all ranks"):
        load_config({"train_micro_batch_size_per_gpu": 1, "checkpoint": section})


READ = """
import sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read
torch.save(read(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.skipif(not (ENVIRONMENT / "bin/python").exists(), reason="no DeepSpeed installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_to_fp32_of_deepspeed_recovers_the_masters(
    stage: int, ranks: RankPools, tmp_path: Path
) -> None:
    values = ranks(2).run(save, str(tmp_path), stage, BF16, False)[0]
    run_with_deepspeed(["-c", READ, str(tmp_path), str(tmp_path / "fp32.pt")])
    state = torch.load(tmp_path / "fp32.pt")
    assert state.keys() == Odd().state_dict().keys()
    for name, value in values.items():
        if "/" not in name:
            assert torch.equal(state[name].float(), value), name
