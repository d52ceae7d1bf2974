"""`checkpoint.deepspeed_files`: the files that DeepSpeed's tools read, beside Hadal's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_pipeline import engine_of as engine_in_stages
from engine.toys import assert_equal, engine_of
from ranks import RankPools
from torch import Tensor, nn

from checkpoint.test_both_ways import ENVIRONMENT, run_with_deepspeed
from checkpoint.test_reshard import BF16, KEYS, Odd, trained
from hadal.checkpoint.deepspeed.source import DeepSpeedSource
from hadal.checkpoint.export import state_dict_of
from hadal.checkpoint.inspection import inspected
from hadal.config import load_config
from hadal.errors import ConfigError, NotBuiltYetError
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_files_hold_the_masters_and_moments(
    stage: int, dtype: str, ranks: RankPools, tmp_path: Path
) -> None:
    keys = BF16 if dtype == "bf16" else {}
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
