"""`hadal elastic`: the batch, and the numbers of ranks that can train it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hadal.cli import deepspeed
from hadal.cli.main import main


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(**keys: Any) -> str:
        path = tmp_path / "ds_config.json"
        told = {
            "enabled": True,
            "max_train_batch_size": 10000,
            "micro_batch_sizes": [8, 12, 16, 17],
        }
        path.write_text(json.dumps({"elasticity": {**told, **keys}}))
        return str(path)

    return write


def test_it_shows_the_batch_and_who_can_train_it(
    written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(min_gpus=32, max_gpus=1500, version=0.1)
    assert main(["elastic", config]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("batch  9792 samples\nranks  23 numbers\n       32 34 36 48 51 64")
    assert main(["elastic", config, "--world-size", "64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["train_micro_batch_size_per_gpu"] == 17
    assert told["train_batch_size"] == 17 * 64 * told["gradient_accumulation_steps"] == 9792
    assert main(["elastic", config, "--world-size", "128"]) == 1
    shown = capsys.readouterr().err
    assert "elasticity: 128 ranks cannot train a batch of 9792; use one of " in shown
    assert "102, 136" in shown


def test_ranks_that_share_a_model_are_counted(
    written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 8}
    config = written(**keys, max_gpus=128, num_gpus_per_node=8, model_parallel_size=4)
    assert main(["elastic", config, "--world-size", "64"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "ranks  11 numbers, 4 of them for each copy of the model"
    assert shown[2].split() == [str(4 * n) for n in (2, 4, 6, 8, 10, 12, 16, 20, 24, 30, 32)]
    assert shown[3] == "64 ranks: 20 micro-batches of 6 samples each"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"min_gpus": 4, "max_gpus": 2}, "elasticity.max_gpus"),
        ({"micro_batch_sizes": [0]}, "elasticity.micro_batch_sizes"),
        ({"version": 0.1, "min_gpus": 9000}, "no number of ranks fits"),
    ],
)
def test_a_faulty_section_is_refused(
    written: Any, keys: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["elastic", written(**keys), "--world-size", "1"]) == 1
    assert told in capsys.readouterr().err


def test_a_file_without_the_section_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("{}")
    assert main(["elastic", str(path)]) == 1
    assert "has no `elasticity` section" in capsys.readouterr().err


def test_ds_elastic_is_the_same(
    written: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(min_gpus=32, max_gpus=1500, version=0.1)
    for words in ([], ["-w", "64"], ["-w", "0"]):
        monkeypatch.setattr(sys, "argv", ["ds_elastic", "-c", config, *words])
        assert deepspeed.elastic() == 0
        assert ("64 ranks" in capsys.readouterr().out) == ("64" in words)
