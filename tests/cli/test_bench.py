"""`hadal bench io` and `cluster`: measurements, output and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hadal.offload.speed
from hadal.cli.main import main
from hadal.config import load_config
from hadal.config.offload import Aio
from hadal.engine.clusters import cluster_named, read_cluster
from hadal.offload.speed import MeasuredSettings, Search, Speed
from hadal.units import shown_binary

QUICK = ["--size", "1MB", "--seconds", "0.1"]


def test_the_best_settings_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measurer(*given: Any) -> Callable[[Aio], MeasuredSettings]:
        """Really measure; but only one setting is fast."""
        measure = real(*given)

        def measured(settings: Aio) -> MeasuredSettings:
            is_fast = settings.block_size == 1 << 22
            speed = Speed(1 << 20, 0.001 if is_fast else 0.1)
            return MeasuredSettings(measure(settings).settings, speed, speed)

        return measured

    real = hadal.offload.speed.measurer
    monkeypatch.setattr("hadal.offload.speed.measurer", measurer)
    disk, out = tmp_path / "disk", tmp_path / "aio.json"
    disk.mkdir()
    assert main(["bench", "io", str(disk), *QUICK, "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    table, _, pasted = shown.partition("{\n")
    section = json.loads("{" + pasted)
    assert section == json.loads(out.read_text())
    zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(disk)}}
    assert load_config({"train_batch_size": 1, "zero_optimization": zero, **section}).notes == ()
    cells = [line.split() for line in table.splitlines()]
    rows = [line for line in cells if line and line[0].isdigit()]
    assert len(rows) == Search.count
    assert all(float(row[6]) > 0 and float(row[7]) > 0 for row in rows)
    assert rows[0][:6] == ["1", "MiB", "8", "1", "false", "true"]
    (best,) = (row[:6] for row in rows if row[8:] == ["best"])
    size, *others = section["aio"].values()
    assert best == [*shown_binary(size).split(), *map(json.dumps, others)]
    assert {" ".join(row[8:]) for row in rows} <= {"", "best", "within noise"}
    for word in ("block_", "depth", "parallelism", "submit", "events", "write", "read"):
        assert word in table
    assert list(disk.iterdir()) == []


def test_the_defaults_are_kept_within_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(settings: Aio) -> MeasuredSettings:
        """Measure 4 or 5 GB/s by turns: a setting twice gives both."""
        measured.append(Speed(1, (0.2, 0.25)[len(measured) % 2] / 1e9))
        return MeasuredSettings(settings, measured[-1], measured[-1])

    measured: list[Speed] = []
    monkeypatch.setattr("hadal.offload.speed.measurer", lambda *_: measure)
    assert main(["bench", "io", str(tmp_path), "--json", str(tmp_path / "aio.json")]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("keep the defaults: no other setting is faster beyond the noise, 25%\n")
    assert "{" not in shown and " 4.00  4.00" in shown
    written = json.loads((tmp_path / "aio.json").read_text())["aio"]
    assert written["block_size"] == Aio().block_size


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--size", "1000000TB"], "are needed"),
    ],
)
def test_unmeasurable_data_are_refused(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "io", str(tmp_path), *arguments]) == 1
    shown = capsys.readouterr()
    assert told in shown.err and shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_no_folder_and_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for name, told in (("file", "is not a directory"), ("typo", "does not exist")):
        assert main(["bench", "io", str(tmp_path / name), *QUICK]) == 1
        assert f"{name} {told}; name an existing directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for words, told in (
        (["--seconds", "0"], '--seconds: expected a number > 0, got "0"'),
        (["--size", "64X"], '--size: expected a size such as 500MB or 80GB, got "64X"'),
    ):
        with pytest.raises(SystemExit):
            main(["bench", "io", str(tmp_path), *words])
        assert told in capsys.readouterr().err


def test_a_measured_machine_is_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(words: list[str]) -> int:
        folder = Path(words[words.index("--hand-over") + 1])
        asked.update(json.loads((folder / "asked.json").read_text()))
        (folder / "measured.json").write_text(cluster_named("h100x2").written())
        return 0

    asked: dict[str, Any] = {}
    monkeypatch.setattr("hadal.cli.bench.start", start)
    out = tmp_path / "cluster.json"
    words = ["bench", "cluster", "--ranks", "2", "--name", "mine", "--folder", str(tmp_path)]
    assert main([*words, "--output", str(out)]) == 0
    assert read_cluster(out) == cluster_named("h100x2")
    assert (asked["name"], asked["folder"], asked["ranks"]) == ("mine", str(tmp_path), 2)
    shown = capsys.readouterr().out
    for words in (["matrices in bf16", "593 TFLOP/s"], ["all_gather in fp32", "360.00 GB/s"]):
        assert all(word in shown for word in words)
    assert main(["bench", "cluster", "--folder", str(tmp_path / "none")]) == 1
    assert "name an existing one" in capsys.readouterr().err
