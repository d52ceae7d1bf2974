"""`hadal explain`: the values and their origins, and the refusals of `initialize`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hadal
from hadal.cli.main import main
from hadal.errors import HadalError

USUAL = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "my_key": 1,
}


def explained(
    capsys: pytest.CaptureFixture[str], folder: Path, config: dict[str, Any], *words: str
) -> tuple[int, list[str], str]:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    code = main(["explain", str(path), *words])
    shown = capsys.readouterr()
    return code, shown.out.splitlines(), shown.err


def test_values_stand_in_their_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, error = explained(capsys, tmp_path, USUAL, "--world-size", "4")
    assert (code, error) == (0, "")
    lines, notes = lines[:-2], lines[-2:]
    assert [line.split(": ")[1] for line in notes] == ["my_key", "fp16.enabled"]
    assert lines == [
        "ds_config.json on 4 ranks",
        "",
        "train_batch_size                16           you",
        "train_micro_batch_size_per_gpu  4            inferred",
        "gradient_accumulation_steps     1            inferred",
        "optimizer",
        '  type                          "AdamW"      you',
        "  params",
        "    lr                          0.001        you",
        "    betas                       [0.9, 0.95]  you",
        "fp16.enabled                    false        auto",
        "zero_optimization",
        "  stage                         3            you",
        '  offload_param.device          "cpu"        you',
        "",
    ]


def test_defaults_are_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> dict[str, dict[str, Any]]:
        code, lines, _ = explained(capsys, tmp_path, USUAL, "--json", *words)
        assert code == 0
        told: dict[str, dict[str, Any]] = json.loads("\n".join(lines))["values"]
        return told

    usual, defaults, everything = shown(), shown("--defaults"), shown("--all")
    assert {value["origin"] for value in usual.values()} == {"you", "auto", "inferred"}
    assert usual.keys() < defaults.keys() < everything.keys()
    assert defaults["gradient_clipping"] == {"value": 1.0, "origin": "default"}
    assert defaults["zero_optimization.offload_param.buffer_count"]["origin"] == "default"
    for path in ("csv_monitor.job_name", "tensor_parallel.autotp_size", "fp16.loss_scale"):
        assert path in everything and path not in defaults
    _, lines, _ = explained(capsys, tmp_path, USUAL, "--all")
    assert max(map(len, lines)) > 100  # a long list, which is not cut
    assert max(len(line) for line in lines if len(line.split()) == 3) < 120


def test_values_are_folded_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(USUAL))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["explain", str(path), "--defaults"]) == 0
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (at,) = (number for number, line in enumerate(lines) if line.startswith("    classes"))
    assert lines[at].endswith("default") and lines[at + 1].startswith(" " * 20)


def test_all_refusals_are_reported_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "train_batch_size": 3,
        "optimizer": {"type": "AdmaW", "params": {"learning_rate": 1e-3}},
        "scheduler": {"type": "WarmupLr", "params": {}},
        "zero_optimization": {"stage": 7, "offload_parm": {}},
        "nebula": {"enabled": True},
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": [3]},
    }
    code, lines, error = explained(capsys, tmp_path, config, "--world-size", "2")
    assert code == 1
    refused = [line.split() for line in lines if line.endswith("refused")]
    assert sorted((name, value) for name, *value, _ in refused) == [
        ("lower_precision_safe_modules", ["[3]"]),
        ("nebula.enabled", ["true"]),
        ("offload_parm", ["{}"]),
        ("params.learning_rate", ["0.001"]),
        ("scheduler.type", ['"WarmupLr"']),
        ("stage", ["7"]),
        ("train_batch_size", ["3"]),
        ("type", ['"AdmaW"']),
    ]
    head, *faults = error.splitlines()
    assert head == "error: 8 faults in ds_config.json"
    assert len(faults) == 8
    code, lines, error = explained(capsys, tmp_path, config, "--world-size", "2", "--json")
    told = json.loads("\n".join(lines))
    assert (code, error, len(told["faults"])) == (1, "", 8)
    assert told["values"]["optimizer.type"] == {"value": "AdmaW", "origin": "refused"}
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, lines, _ = explained(capsys, tmp_path, config)
    assert any("\x1b[1;31mrefused" in line for line in lines)


ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
STEPS = {"total_num_steps": "auto"}
# With the exit code, for one rank.
JUDGED: list[tuple[dict[str, Any], int]] = [
    ({"optimizer": ADAM}, 0),
    ({"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}, 0),
    ({"optimizer": {"type": "SGD", "params": {"lr": -1}}}, 1),
    ({"optimizer": {"type": "SGD", "params": {"lrr": 1}}}, 1),
    ({"optimizer": {"type": "LBFGS", "params": {}}}, 1),
    ({"optimizer": {"type": "Nope", "params": {}}}, 1),
    ({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}, 0),
    ({"optimizer": ADAM, "scheduler": {"type": "StepLR", "params": {}}}, 1),
    ({"scheduler": {"type": "Nope", "params": {}}}, 1),
    ({"optimizer": ADAM, "scheduler": {"type": "WarmupCosineLR", "params": STEPS}}, 1),
    ({"optimizer": ADAM, "scheduler": {"type": "WarmupDecayLR", "params": STEPS}}, 1),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, 0),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, 1),
    ({"nebula": {"enabled": True}}, 1),
    ({"steps_per_print": "many"}, 1),
]


@pytest.mark.parametrize(("config", "code"), JUDGED)
def test_it_refuses_the_same_as_initialize(
    config: dict[str, Any], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"train_batch_size": 1, **config}
    found, lines, error = explained(capsys, tmp_path, config)
    assert found == code, error
    assert any(line.endswith("refused") for line in lines) == (code == 1)
    try:
        engine, *_ = hadal.initialize(model=nn.Linear(2, 2), config=config)
    except HadalError:
        assert code == 1
    else:
        engine.destroy()
        assert code == 0


def test_values_that_nobody_wrote_are_not_shown_as_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    for section in ({"type": "AdamW"}, {"type": "AdmaW"}, optimizer):
        config = {"train_batch_size": 8, "optimizer": section}
        _, lines, _ = explained(capsys, tmp_path, config)
        assert not any("{}" in line for line in lines)
    _, lines, _ = explained(capsys, tmp_path, {"train_batch_size": 8}, "--all", "--json")
    told = json.loads("\n".join(lines))["values"]
    assert told["zero_optimization.overlap_comm"] == {"value": True, "origin": "default"}


def test_files_of_lightning_and_of_the_trainer_are_recognized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = explained(capsys, tmp_path, {"zero_optimization": {"stage": 2}})
    assert code == 1
    assert "hint: Lightning sets the batch sizes itself" in error
    config = {"train_batch_size": "auto", "scheduler": {"type": "WarmupDecayLR", "params": {}}}
    config["scheduler"]["params"]["total_num_steps"] = "auto"  # type: ignore[index]
    code, lines, error = explained(capsys, tmp_path, config)
    assert code == 1 and "hint: the Trainer of transformers and Accelerate replace" in error
    assert "does not fit WarmupDecayLR: missing a required argument" in error
    assert lines[-1].endswith("replaced by any program, and there is no default")


def test_an_invalid_configuration_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    for text, told in (("", "is empty"), ("[]", "a list"), ('{"a": 1, "a": 2}', "a  ")):
        path.write_text(text)
        assert main(["explain", str(path)]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: ") and told in shown.err


@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_it_wants_ranks(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        explained(capsys, tmp_path, USUAL, "--world-size", size)
    assert caught.value.code == 2
    assert f'--world-size: expected an integer >= 1, got "{size}"' in capsys.readouterr().err


def test_stages_that_only_some_models_have_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"train_micro_batch_size_per_gpu": 1}
    code, lines, _ = explained(capsys, tmp_path, {**small, "pipeline": {"stages": 2}})
    assert code == 0
    assert lines[-1].startswith("note: pipeline.stages: 2 is for a hadal.pipeline.PipelineModule")
    with_auto = {**small, "pipeline": {"stages": 2, "auto": True}}
    assert not any("note:" in x for x in explained(capsys, tmp_path, with_auto)[1])
    explained(capsys, tmp_path, {**small, "pipeline": {"stages": 2}})
    _, lines, _ = explained(capsys, tmp_path, {**small, "pipeline": {"stages": 2}}, "--json")
    assert json.loads("\n".join(lines))["notes"][0].startswith("pipeline.stages")
