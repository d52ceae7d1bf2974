"""`hadal bench io`: what is measured, printed and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hadal.autotuning.disk import Search
from hadal.cli.main import main
from hadal.config import load_config

QUICK = ["--size", "1MB", "--seconds", "0.1"]


def test_the_best_settings_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, out = tmp_path / "disk", tmp_path / "aio.json"
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
    assert all(len(row) == 7 and float(row[5]) > 0 and float(row[6]) > 0 for row in rows)
    assert [json.loads(cell) for cell in rows[0][:5]] == [1 << 20, 8, 1, False, True]
    best = [json.dumps(value) for value in section["aio"].values()]
    assert best in [row[:5] for row in rows]
    for word in ("block_", "depth", "parallelism", "submit", "events", "write", "read"):
        assert word in table
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--size", "1000000TB"], "are needed"),
        (["--size", "much"], "a size must be"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "io", str(tmp_path), *arguments]) == 1
    shown = capsys.readouterr()
    assert told in shown.err and shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_no_folder_and_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", "io", str(tmp_path / "file"), *QUICK]) == 1
    assert "use a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "io", str(tmp_path), "--seconds", "0"])
    assert "--seconds" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench"])
