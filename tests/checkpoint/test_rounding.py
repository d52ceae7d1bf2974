"""Weights equal to their rounded masters are not stored, and load bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine.toys import assert_equal, engine_of, model_of, train
from hypothesis import given, strategies as st
from ranks import RankPools, on_ranks
from safetensors import safe_open
from torch import Tensor

from checkpoint.test_damage import reparted
from hadal import comm
from hadal.checkpoint import collecting
from hadal.checkpoint.collecting import is_rounding
from hadal.checkpoint.export import state_dict_of
from hadal.checkpoint.inspection import inspected
from hadal.checkpoint.opening import opened
from hadal.errors import CheckpointError

SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}


@given(st.data(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_every_changed_bit_is_seen(data: st.DataObject, dtype: torch.dtype) -> None:
    values = st.floats(-(2.0**100), 2.0**100, width=32)
    master = torch.tensor(data.draw(st.lists(values, min_size=1, max_size=9)))
    start = data.draw(st.integers(0, len(master) - 1))
    weights = master.to(dtype)
    assert is_rounding(weights[start:], master[start:])
    bits, place = weights.view(torch.int16), data.draw(st.integers(start, len(master) - 1))
    bits[place] ^= 1 << data.draw(st.integers(0, 14))
    assert not is_rounding(weights[start:], master[start:])


def test_values_that_may_round_differently_are_stored() -> None:
    zeros = torch.zeros(1 << 18)
    assert is_rounding(zeros.bfloat16(), zeros)
    assert not is_rounding(-zeros.bfloat16(), zeros)
    zeros[-1] = torch.nan
    assert not is_rounding(zeros.bfloat16(), zeros)


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}


def weight_tensors(folder: Path) -> int:
    count = 0
    for path in folder.glob("*/rank_*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(name.endswith(".weight") for name in file.keys())  # noqa: SIM118
    return count


def at_rank_0(weights: Tensor, master: Tensor, *, has_bits: bool) -> bool:
    return comm.get_rank() == 0 and is_rounding(weights, master, has_bits=has_bits)


def save_and_read(stage: int, kind: str, folder: str) -> None:
    engine = engine_of(stage, **SETTINGS[kind])
    train(engine, range(2))
    engine.save_checkpoint(folder, "same")
    # As nothing here leaves it: on one rank a weight that is not its master's rounding. Where
    # weights are whole, the master is given what they are before a save.
    with patch.object(collecting, "is_rounding", is_rounding if stage == 3 else at_rank_0):
        if comm.get_rank() == 1:
            engine._parts.runtime.buckets[0].shard[:1] += 1
        engine.save_checkpoint(folder, "differs")
    comm.barrier()
    for tag in ("same", "differs"):
        source = opened(Path(folder), tag)
        stored = state_dict_of(source, None)
        entries = [entry for (_, kind), entry in source.entries.items() if kind == "weight"]
        assert all(entry.is_rounded for entry in entries) == (tag == "same")
        source.close()
        engine.load_checkpoint(folder, tag)
        assert_equal(weights_of(engine), stored)
        other = engine_of(3 - stage, model_of(9), **SETTINGS[kind])
        other.load_checkpoint(folder, tag, load_module_only=True)
        assert_equal(weights_of(other), stored)
        other.destroy()
    engine.destroy()


@pytest.mark.fast_cells("1-fp16")
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_weights_come_back_from_their_masters(
    stage: int, kind: str, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(2).run(save_and_read, stage, kind, str(tmp_path))
    same, differs = (state_dict_of(opened(tmp_path, tag), None) for tag in ("same", "differs"))
    assert any(not torch.equal(same[name], differs[name]) for name in same) == (stage > 0)
    assert weight_tensors(tmp_path / "same") == 0 < weight_tensors(tmp_path / "differs")
    (report,) = inspected(tmp_path, "same")
    assert not report.faults
    assert [one.nbytes for one in report.holdings if one.kind == "weight"] == [0]


def save_after_edits(stage: int, folder: str) -> None:
    """A save looks for edits first: weights without any are not compared with masters again."""
    engine = engine_of(stage, **SETTINGS["bf16"])
    train(engine, range(2))
    looked, same_bits = [], collecting._same_bits

    def looking(one: Tensor, other: Tensor) -> bool:
        looked.append(one.numel())
        return same_bits(one, other)

    with patch.object(collecting, "_same_bits", looking):
        engine.save_checkpoint(folder, "plain")
        assert bool(looked) == (stage == 3), looked
        if stage < 3:
            # A zero's sign is no other value, so the master keeps its own; the weight is stored.
            for sign in (1.0, -1.0):
                engine.module[0].weight.data.zero_().mul_(sign)
                engine.save_checkpoint(folder, "signs")
            assert looked
            before = engine.module_state_dict()["0.weight"].signbit()
            engine.module[0].weight.data.fill_(1.0)
            engine.load_checkpoint(folder, "signs")
            assert before.all() and engine.module_state_dict()["0.weight"].signbit().all()
            engine.module[0].weight.data.fill_(torch.nan)
            engine.save_checkpoint(folder, "nan")
    engine.load_checkpoint(folder, "plain")
    train(engine, range(1))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_compared_once(stage: int, ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(save_after_edits, stage, str(tmp_path))
    if stage < 3:
        assert weight_tensors(tmp_path / "plain") == 0 < weight_tensors(tmp_path / "signs")
        assert weight_tensors(tmp_path / "nan") > 0


@on_ranks(2)
def test_an_index_that_is_wrong_is_refused(tmp_path: Path) -> None:
    engine = engine_of(2, **SETTINGS["bf16"])
    train(engine, range(2))
    before = weights_of(engine)
    # The rows of the first bucket: weights, which are not stored, and their masters.
    for place, value, named in (
        ((4,), "F16", "index.json"),
        ((4,), "X", "index.json"),
        ((0,), "state.x", "index.json"),
        ((3, 0, 1), 8, "index.json"),
    ):
        engine.save_checkpoint(tmp_path, "x")
        if comm.get_rank() == 0:
            reparted(Path(tmp_path, "x"), "stretches", 0, *place, value)
        comm.barrier()
        with pytest.raises(CheckpointError, match=named):
            engine.load_checkpoint(tmp_path, "x")
        assert_equal(weights_of(engine), before)
    engine.destroy()
