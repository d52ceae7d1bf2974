"""`hadal bench io`: measurements, output and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hadal.autotuning.disk import Search
from hadal.cli.main import main
from hadal.config import load_config
from hadal.units import shown_binary

QUICK = ["--size", "1MB", "--seconds", "0.1"]


def test_the_best_settings_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
