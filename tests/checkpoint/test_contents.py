"""Checkpoint contents beside weights, retention, and replacement of a checkpoint."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.toys import assert_equal, engine_of, train
from ranks import RankPools, on_ranks
from torch import nn

from checkpoint.listing import home_of, names_in
from hadal import comm
from hadal.checkpoint.folders import prune
from hadal.checkpoint.index import read_index
from hadal.checkpoint.rules import Keep
from hadal.errors import CheckpointError


class Dropping(nn.Module):
    """A model with dropout, and noise from the generators of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        noise = random.gauss(0.0, 0.1) + np.random.standard_normal() * 0.1
        return self.layers(inputs + noise)


def seed(number: int) -> None:
    number += 100 * comm.get_rank()
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_training_with_dropout_goes_on_bit_for_bit(stage: int, tmp_path: Path) -> None:
    engine = engine_of(stage, Dropping())
    seed(1)
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    losses = train(engine, range(3, 6))
    other = engine_of(stage, Dropping())
    seed(2)
    other.load_checkpoint(tmp_path)
    assert torch.equal(torch.stack(train(other, range(3, 6))), torch.stack(losses))
    assert_equal(other.state_dict(), engine.state_dict())
    drawn = torch.rand(1).item()
    other.load_checkpoint(tmp_path)
    assert torch.rand(1).item() != drawn
    comm.barrier()


@pytest.mark.gpu
@on_ranks(1, "gpus")
def test_the_accelerators_generator_is_restored(tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    engine = engine_of(1, nn.Linear(2, 2))
    torch.rand(5, device=device)
    engine.save_checkpoint(tmp_path)
    drawn = torch.rand(5, device=device)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(torch.rand(5, device=device), drawn)


CLIENT = {
    "best": math.inf,
    "steps": (1, 2.5, True, None),
    4: {"nested": [{"x": "y"}]},
    "counts": Counter("hadal"),
    "ema": [torch.arange(6.0).reshape(2, 3).t(), torch.tensor(3), torch.zeros(0, 2)],
    "bf16": torch.ones(2, dtype=torch.bfloat16),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "number": np.float64(0.1),
}


@on_ranks(2)
def test_client_state_comes_back_as_it_was(tmp_path: Path) -> None:
    engine = engine_of(3)
    engine.save_checkpoint(tmp_path, client_state=CLIENT)
    _, found = engine.load_checkpoint(tmp_path)
    assert found.keys() == CLIENT.keys()
    for key in ("best", "steps", 4, "counts", "number"):
        assert found[key] == CLIENT[key]
    assert isinstance(found["steps"], tuple)
    for one, other in zip(found["ema"], CLIENT["ema"], strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    assert torch.equal(found["bf16"], CLIENT["bf16"])
    assert found["array"].dtype == np.int16
    assert (found["array"] == CLIENT["array"]).all()


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


UNSAVABLE: dict[str, tuple[Any, str]] = {
    "object": (
        [{"x": object()}],
        r"client_state\['k'\]\[0\]\['x'\] is of type object.*use numbers",
    ),
    "model": (nn.Linear(1, 1), r"client_state\['k'\] is of type torch.*Linear.*state_dict\(\)"),
    "words": (np.array(["a"]), r"client_state\['k'\] is an array of <U1"),
    "sparse": (torch.eye(2).to_sparse(), r"client_state\['k'\] is a Tensor .*sparse.*dense"),
    "meta": (torch.ones(2, device="meta"), r"client_state\['k'\] is a Tensor .*meta"),
    "key": ({(object(),): 1}, r"the key .* of client_state\['k'\]"),
}


@on_ranks(2)
def test_unsavable_values_are_named_by_their_path(tmp_path: Path) -> None:
    engine = engine_of(1)
    engine.save_checkpoint(tmp_path)
    for value, told in [*UNSAVABLE.values(), (endless(), "client_state is nested too deep")]:
        with pytest.raises(CheckpointError, match=told):
            engine.save_checkpoint(tmp_path, "other", client_state={"k": value})
    assert names_in(tmp_path) == ["global_step0", "latest"]


# ---- which checkpoints stay ----------------------------------------------------------------------


def save_many(folder: str, section: dict[str, Any]) -> list[str]:
    engine = engine_of(1, checkpoint=section)
    engine.save_checkpoint(folder, "best", save_latest=False)
    for number in range(5):
        engine.save_checkpoint(folder, f"s{number}")
    comm.barrier()
    return names_in(folder)


@pytest.mark.fast_cells("section2-kept2")
@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({}, ["s0", "s1", "s2", "s3", "s4"]),
        ({"keep_last": 2}, ["s3", "s4"]),
        ({"keep_hours": 1e-9}, ["s4"]),
        ({"keep_hours": 1}, ["s0", "s1", "s2", "s3", "s4"]),
        ({"keep_last": 3, "keep_hours": 1e-9}, ["s2", "s3", "s4"]),
    ],
)
def test_old_checkpoints_are_removed(section, kept, ranks: RankPools, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "index.json").write_text("{}")
    for found in ranks(2).run(save_many, str(tmp_path), section):
        assert found == sorted(["best", "broken", "latest", "notes", *kept])


@on_ranks(1)
def test_the_latest_checkpoint_is_never_removed(tmp_path: Path) -> None:
    """The checkpoint that `latest` names is kept at any age; incomplete folders are left alone."""
    engine = engine_of(1)
    for tag in ("a", "b", "c"):
        engine.save_checkpoint(tmp_path, tag)
    Path(tmp_path, "latest").write_text("a")
    (home_of(Path(tmp_path, "b")) / "rank_00000.safetensors").unlink()
    jobs = read_index(Path(tmp_path, "c"))["jobs"]
    time.sleep(0.01)
    prune(tmp_path, "c", Keep(last=1), ["another"])
    assert names_in(tmp_path) == ["a", "b", "c", "latest"]
    prune(tmp_path, "c", Keep(last=1), jobs)
    assert names_in(tmp_path) == ["a", "b", "c", "latest"]
    prune(tmp_path, "a", Keep(hours=1e-9), jobs)
    assert names_in(tmp_path) == ["a", "b", "latest"]


# ---- one takes another's place -------------------------------------------------------------------


@on_ranks(2)
def test_a_checkpoint_replaces_another(tmp_path: Path) -> None:
    engine = engine_of(2)
    engine.save_checkpoint(tmp_path, "same")
    home = Path(tmp_path, "same")
    comm.barrier()
    if comm.get_rank() == 0:
        (home / "tokenizer.txt").write_text("the user's own")
    comm.barrier()
    train(engine, range(1))
    engine.save_checkpoint(tmp_path, "same")
    saved = engine.state_dict()
    assert names_in(tmp_path) == ["latest", "same"]
    assert (home / "tokenizer.txt").read_text() == "the user's own"
    other = engine_of(2)
    other.load_checkpoint(tmp_path)
    assert_equal(other.state_dict(), saved)
    for tag in ("", ".", "..", ".hidden", "a/b", "a\\b", "latest", "a\nb", " a", "a\0b", 256 * "a"):
        if tag:
            with pytest.raises(CheckpointError, match="plain folder name"):
                engine.save_checkpoint(tmp_path, tag)
            with pytest.raises(CheckpointError, match="no complete checkpoint"):
                engine.load_checkpoint(tmp_path, tag)
    comm.barrier()
    assert names_in(tmp_path) == ["latest", "same"]
