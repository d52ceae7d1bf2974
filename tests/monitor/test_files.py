"""Files that grow by lines: CSV and JSON lines, on full disks and after kills too."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hadal.config.monitors import CsvMonitor, JsonlMonitor
from hadal.plugins.monitor.files import CsvWriter, JsonlWriter, LineFile, file_name, read_lines
from hadal.plugins.monitor.record import ScalarRecord


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- lines -------------------------------------------------------------------------------------


def test_a_header_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for number in range(3):
        file = LineFile(path, "head\n")
        file.write(f"{number}\n")
        file.close()
    assert path.read_text() == "head\n0\n1\n2\n"
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600


def test_a_half_line_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("head\n1,2\n3,0.")
    file = LineFile(path, "head\n")
    file.write("4,5\n")
    file.close()
    assert path.read_text() == "head\n1,2\n3,0.\n4,5\n"


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = LineFile(path, "head\n")
    with at_most(20):
        file.write("0123456789\n")
        for _ in range(2):
            with pytest.raises(OSError):
                file.write("0123456789\n")
    assert path.read_text() == "head\n0123456789\n"
    file.write("again\n")
    file.close()
    assert path.read_text() == "head\n0123456789\nagain\n"


# ---- CSV ---------------------------------------------------------------------------------------


def csv_writer(folder: Path) -> CsvWriter:
    return CsvWriter(CsvMonitor(enabled=True, output_path=str(folder), job_name="job"), {})


@pytest.mark.claims("csv_monitor.output_path", "csv_monitor.job_name")
def test_csv_files_are_these_byte_for_byte(tmp_path: Path) -> None:
    writer = csv_writer(tmp_path)
    writer.write(ScalarRecord(6, {"Train/Samples/lr": 0.0, "a/b c/d": 1.5}, 0.0))
    writer.write(
        ScalarRecord(12, {"Train/Samples/lr": 0.001, "n": 1, "../../evil": 1, "/x": 1}, 0.0)
    )
    writer.close()
    again = csv_writer(tmp_path)
    again.write(ScalarRecord(18, {"Train/Samples/lr": float("inf")}, 0.0))
    again.close()
    folder = tmp_path / "job"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "Train_Samples_lr.csv": b"step,lr\r\n6,0.0\r\n12,0.001\r\n18,inf\r\n",
        "a_b_c_d.csv": b"step,d\r\n6,1.5\r\n",
        "n.csv": b"step,n\r\n12,1\r\n",
        ".._.._evil.csv": b"step,evil\r\n12,1\r\n",
        "_x.csv": b"step,x\r\n12,1\r\n",
    }
    assert [path.parent for path in writer.paths] == [folder] * 5
    assert [path.name for path in again.paths] == ["Train_Samples_lr.csv"]
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != folder] == []


@given(st.text())
def test_a_csv_file_is_in_its_directory(name: str) -> None:
    found = file_name(name)
    assert "/" not in found and "\0" not in found and found.endswith(".csv")
    assert len(found.encode()) < 255 and found not in (".", "..")


def test_few_csv_files_are_open_at_once(tmp_path: Path) -> None:
    writer, before = csv_writer(tmp_path), open_descriptors()
    for samples in (1, 2):
        writer.write(
            ScalarRecord(samples, {f"name {number}": number for number in range(200)}, 0.0)
        )
    assert open_descriptors() <= before + 64
    writer.close()
    assert open_descriptors() == before
    files = list((tmp_path / "job").iterdir())
    assert len(files) == len(writer.paths) == 200
    assert (tmp_path / "job/name_7.csv").read_bytes() == b"step,name 7\r\n1,7\r\n2,7\r\n"


# ---- JSON lines --------------------------------------------------------------------------------


def jsonl_writer(folder: Path, run: dict[str, Any]) -> JsonlWriter:
    section = JsonlMonitor(enabled=True, output_path=str(folder), job_name="job")
    return JsonlWriter(section, run)


def test_json_lines_are_read_back(tmp_path: Path) -> None:
    writer = jsonl_writer(tmp_path, {"format": 1, "world_size": 2})
    writer.write(
        ScalarRecord(8, {"loss": 0.5, "norm": float("inf"), "odd": float("nan")}, 1.25, step=2)
    )
    writer.write(ScalarRecord(9, {"mine": -float("inf")}, 2.5))
    writer.close()
    path = tmp_path / "job/events.jsonl"
    with path.open("ab") as file:
        file.write(b'{"kind":"update","step":3,"sam')  # as a kill of the machine may leave it
    jsonl_writer(tmp_path, {"format": 1, "world_size": 4}).close()
    head, update, mine, end, second, last = read_lines(path)
    assert head == {"kind": "run", "format": 1, "world_size": 2}
    assert update == {
        "kind": "update",
        "step": 2,
        "samples": 8,
        "time": 1.25,
        "loss": 0.5,
        "norm": "Infinity",
        "odd": "NaN",
    }
    assert mine == {
        "kind": "events",
        "samples": 9,
        "time": 2.5,
        "mine": "-Infinity",
    }
    assert end["kind"] == last["kind"] == "end"
    assert second["world_size"] == 4
    # Every whole line is JSON as other languages read it.
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert len([json.loads(line, parse_constant=pytest.fail) for line in whole]) == 6
