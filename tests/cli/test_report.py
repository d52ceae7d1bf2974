"""`hadal report`: available features, and the reasons for missing ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.cuda.nccl

from hadal import __version__
from hadal.cli import report
from hadal.cli.main import main
from hadal.device import inventory


def test_it_reports_versions_the_machine_and_features(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["hadal"].startswith(__version__)
    assert told["versions"]["torch"].startswith(torch.__version__)
    assert told["machine"]["accelerators"] == str(torch.accelerator.device_count() or "none")
    assert "gloo" in told["machine"]["process groups"]
    assert set(told["available"].values()) <= {"yes"} | {
        text for text in told["available"].values() if text.startswith("no: ")
    }
    assert main(["report"]) == 0
    shown = capsys.readouterr().out
    for section in told.values():
        for name, text in section.items():
            assert any(line.split() == [*name.split(), *text.split()] for line in shown.split("\n"))


def test_missing_items_are_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.shutil, "which", lambda name: None)
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    told = report.lacking()
    assert told["hadal run by slurm"] == "no: `srun` is not installed"
    assert "pip install matplotlib" in told["hadal plot-schedule"]
    assert report.deepspeed().startswith("not importable (use `hadal run --as-deepspeed`")


def test_deepspeed_itself_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    class Spec:
        origin = f"{tmp_path}/deepspeed/__init__.py"

    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: Spec)
    monkeypatch.setattr(report, "_version", lambda name: "0.18.0")
    assert report.deepspeed() == f"DeepSpeed itself, 0.18.0, {Spec.origin}"


def test_it_can_be_pasted_into_an_issue(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report"]) == 0
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["report", "--markdown"]) == 0
    assert capsys.readouterr().out == f"```text\n{plain}```\n"
    assert main(["report"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[32m✓" in shown  # torch has a C++ compiler, or an optimizer its kernels
    assert "yes" not in shown


def test_the_accelerators_libraries_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n"
    )
    monkeypatch.setattr(inventory, "_NVIDIA", driver)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    told = {"cuDNN": "91002", "NCCL": "2.27.3", "driver": "570.86.15"}
    assert inventory.libraries() == told
    assert told.items() <= report.versions().items()
