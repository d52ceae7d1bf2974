"""`hadal init`: questions, flags in their place, and a file that is never overwritten unasked."""

from __future__ import annotations

import io
import json
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from hadal.cli import init
from hadal.cli.main import main
from hadal.config import load_config


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "_found", lambda: (8, 80 * 10**9))


def answered(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def written() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(Path("ds_config.json").read_text())
    return told


def test_five_questions_have_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(monkeypatch, "", "", "", "", "")
    assert main(["init"]) == 0
    shown = capsys.readouterr().out
    for number, usual in enumerate(("7B", "1 x 8 x 80GB", "bf16", "256 / 4", "cpu"), start=1):
        assert f"{number}/5 " in shown and f" [{usual}]: " in shown
    assert "hadal explain ds_config.json --world-size 8" in shown
    assert "hadal run --num_gpus 8 train.py" in shown
    config = load_config("ds_config.json", world_size=8)
    assert (config.zero_optimization.stage, config.bf16.enabled) == (1, True)
    by_questions = written()
    assert main(["init", "--yes", "--force"]) == 0
    assert written() == by_questions


def test_answers_are_asked_for_again_until_they_can_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        "gpt-oss",
        "Qwen/Qwen2.5-7B",
        "eight",
        "2x4x40",
        "2 x 4 x 40GB",
        "bf61",
        "fp16",
        "100",
        "96/3",
    ]
    answered(monkeypatch, *answers, "/nvme")
    assert main(["init"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        'error: expected a number such as 1300000000 or 7B, got "gpt-oss"',
        'error: expected nodes x devices x memory, such as 2 x 8 x 80GB, got "eight"',
        'error: expected the memory of a device with its unit, such as 80GB, got "40"',
        'error: expected bf16, fp16, fp32, got "bf61"; did you mean bf16?',
        "error: 100 samples cannot be shared evenly by 8 ranks, 4 at a time; take 96 or 128",
    ]
    told = written()
    assert told["fp16"] == {"enabled": True}
    assert (told["train_batch_size"], told["train_micro_batch_size_per_gpu"]) == (96, 3)


def test_flags_answer_in_place_of_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(monkeypatch, "")
    words = ["--model", "Llama-3.1-70B", "--nodes", "2", "--precision", "bf16", "--batch", "64"]
    assert main(["init", *words]) == 0
    shown = capsys.readouterr().out
    assert [number for number in range(1, 6) if f"{number}/5 " in shown] == [5]
    assert "hadal run --hostfile hosts --num_gpus 8 train.py" in shown
    assert written()["train_micro_batch_size_per_gpu"] == 4


def test_nothing_is_overwritten_or_left_half_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(monkeypatch, "7B")
    assert main(["init"]) == 1
    assert "no more answers on standard input; --yes uses defaults" in capsys.readouterr().err
    assert main(["init", "--yes", "--batch", "100"]) == 1
    assert "--batch: 100 samples cannot be shared evenly" in capsys.readouterr().err
    assert not Path("ds_config.json").exists()
    Path("ds_config.json").write_text("mine")
    assert main(["init", "--yes"]) == 1
    assert "ds_config.json exists; --force overwrites it" in capsys.readouterr().err
    assert Path("ds_config.json").read_text() == "mine"
    assert main(["init", "--yes", "--output", "no/such.json"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_plans_that_do_not_fit_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--yes", "--model", "1T", "--offload", "nothing"]) == 0
    assert "warning: model states do not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "numel"),
    [
        ("7B", 7 * 10**9),
        ("1300000000", 1_300_000_000),
        ("Qwen/Qwen2.5-7B", 7 * 10**9),
        ("meta-llama/Llama-3.1-8B-Instruct", 8 * 10**9),
        ("opt-350m", 350 * 10**6),
        ("pythia-1.4b-deduped", 1_400_000_000),
    ],
)
def test_sizes_are_found_in_names(text: str, numel: int) -> None:
    assert init._model(text) == numel


@pytest.mark.parametrize("text", ["gpt2", "Mixtral-8x7B-v0.1", "8bit"])
def test_names_without_a_size_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        init._model(text)
