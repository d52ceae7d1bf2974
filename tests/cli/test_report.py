"""`hadal report`: what is here, and why something is not."""

from __future__ import annotations

import json

import pytest
import torch

from hadal import __version__
from hadal.cli import report
from hadal.cli.main import main


def test_it_tells_versions_the_machine_and_what_is_available(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["hadal"].startswith(__version__)
    assert told["versions"]["torch"].startswith(torch.__version__)
    assert told["machine"]["accelerators"] == str(torch.accelerator.device_count())
    assert "gloo" in told["machine"]["process groups"]
    assert set(told["available"].values()) <= {"yes"} | {
        text for text in told["available"].values() if text.startswith("no: ")
    }
    assert main(["report"]) == 0
    shown = capsys.readouterr().out
    for section in told.values():
        for name, text in section.items():
            assert any(line.split() == [*name.split(), *text.split()] for line in shown.split("\n"))


def test_what_is_missing_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.shutil, "which", lambda name: None)
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    told = report.lacking()
    assert told["hadal run by slurm"] == "no: no program `srun` is found"
    assert "pip install matplotlib" in told["hadal plot-schedule"]
    assert report.deepspeed().startswith("nothing; `hadal run --as-deepspeed`")


def test_deepspeed_itself_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    class Spec:
        origin = f"{tmp_path}/deepspeed/__init__.py"

    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: Spec)
    monkeypatch.setattr(report, "_version", lambda name: "0.18.0")
    assert report.deepspeed() == f"DeepSpeed itself, 0.18.0, {Spec.origin}"
