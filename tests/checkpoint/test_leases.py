"""Leases: other jobs' saves are left alone, dead ones are removed, the same tag is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hadal.checkpoint import folders, leases
from hadal.checkpoint.leases import Lease, holder_of, is_alive, lease_of
from hadal.checkpoint.storage import StorageItem
from hadal.cli.main import main
from hadal.errors import CheckpointError

from .listing import home_of

MARKS = ["0123456789abcde0", "0123456789abcde1"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "REFRESH_S", 0.05)
    monkeypatch.setattr(leases, "DEAD_S", 0.6)
    monkeypatch.setattr(leases, "_LOOK_S", 0.02)


HOLD = """
import sys
from pathlib import Path
from hadal.checkpoint.leases import Lease
Lease(Path(sys.argv[1]), sys.argv[2])
Path(sys.argv[1], sys.argv[2]).mkdir()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process of this machine that saves under the tag "a"."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a"), MARKS[0]]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.slow
def test_a_tag_that_another_process_saves_is_refused(
    other: subprocess.Popen[str], tmp_path: Path
) -> None:
    holder = holder_of(tmp_path / "a", MARKS[0])
    assert holder is not None and holder.pid == other.pid
    with pytest.raises(CheckpointError, match=rf"a is being saved by process {other.pid} on "):
        folders.begin(tmp_path, "a", MARKS[1])
    assert not lease_of(tmp_path / "a", MARKS[1]).exists()
    # Nor does a command remove it.
    assert folders.clean(tmp_path, 0) == []
    assert (tmp_path / "a" / MARKS[0]).is_dir()
    other.kill()
    other.wait()
    folders.end(tmp_path / "a", folders.begin(tmp_path, "a", MARKS[1]))
    assert list(tmp_path.iterdir()) == []


def lease_elsewhere(folder: Path, **changes: Any) -> Path:
    """Write the lease of a process on another machine."""
    folder.mkdir()
    path = lease_of(folder, MARKS[0])
    content = {"host": "there", "machine": "there/1", "pid": 1, "start": "1", **changes}
    path.write_text(json.dumps(content))
    return path


def test_a_silent_lease_of_another_machine_is_dead(quick: None, tmp_path: Path) -> None:
    path = lease_elsewhere(tmp_path / "a")
    assert is_alive(tmp_path / "a", MARKS[0], path.stat().st_mtime + 0.5)
    lease = folders.begin(tmp_path, "a", MARKS[1])  # watches it
    assert not path.exists()
    folders.end(tmp_path / "a", lease)


def test_a_refreshed_lease_of_another_machine_is_alive(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lease_elsewhere(tmp_path / "a")
    sleep = time.sleep

    def refreshed(seconds: float) -> None:
        sleep(seconds)
        path.write_text(path.read_text())

    monkeypatch.setattr(time, "sleep", refreshed)
    with pytest.raises(CheckpointError, match="a is being saved by process 1 on there; save under"):
        folders.begin(tmp_path, "a", MARKS[1])


@pytest.mark.parametrize("text", ["", "[]", '{"pid": "x"}'])
def test_a_lease_that_is_not_whole_is_judged_by_its_age(
    text: str, quick: None, tmp_path: Path
) -> None:
    path = lease_elsewhere(tmp_path / "a")
    path.write_text(text)
    assert is_alive(tmp_path / "a", MARKS[0], path.stat().st_mtime + 0.5)
    os.utime(path, (0, 0))
    assert not is_alive(tmp_path / "a", MARKS[0])


def test_a_dead_lease_and_its_files_are_cleaned_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = leases._this_process()
    dead = {"machine": here.machine, "pid": os.getppid(), "start": "1"}
    path = lease_elsewhere(tmp_path / "a", **dead)
    (tmp_path / "a" / MARKS[0]).mkdir()
    (tmp_path / "a" / MARKS[1]).mkdir()  # has no lease, and is new
    lease_of(tmp_path, MARKS[1]).write_text(path.read_text())  # of a killed command
    gone = [lease_of(tmp_path, MARKS[1]), tmp_path / "a" / MARKS[0], path]
    assert [one.path for one in folders.clean(tmp_path, is_dry=True)] == gone
    assert all(one.exists() for one in gone)
    assert [one.path for one in folders.clean(tmp_path)] == gone
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / MARKS[1]]
    os.utime(tmp_path / "a" / MARKS[1], (time.time() - 1800,) * 2)
    assert main(["checkpoint", "clean", str(tmp_path), "--yes"]) == 0
    assert main(["checkpoint", "clean", str(tmp_path), "--older-than", "0"]) == 0
    assert (tmp_path / "a" / MARKS[1]).exists()
    told = capsys.readouterr().out
    assert told.startswith("0 leftovers removed\n") and "0.5 h old" in told
    assert told.endswith("1 leftover; add --yes to remove\n")
    assert main(["checkpoint", "clean", str(tmp_path), "--older-than", "0", "--yes"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_process_number_that_was_given_again_is_dead(tmp_path: Path) -> None:
    here = leases._this_process()
    lease_elsewhere(tmp_path / "a", machine=here.machine, pid=os.getppid(), start="1")
    assert not is_alive(tmp_path / "a", MARKS[0])


def test_a_lease_is_refreshed_until_it_is_released(quick: None, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lease = Lease(tmp_path / "a", MARKS[0])
    first = lease.written_at()
    deadline = time.monotonic() + 10
    while lease.written_at() == first:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease.expect_held()
    lease.release()
    assert not is_alive(tmp_path / "a", MARKS[0])
    with pytest.raises(CheckpointError, match="another job considered this save abandoned"):
        lease.expect_held()
    time.sleep(0.1)
    assert list((tmp_path / "a").iterdir()) == []


# ---- jobs ----------------------------------------------------------------------------------------

JOB = """
import sys, time, torch, hadal
folder, name, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
torch.set_num_threads(1)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "checkpoint": {"keep_last": 2, "async_save": name == "b"},
}
engine, *_ = hadal.initialize(model=torch.nn.Linear(64, 64), config=config)
sys.stdin.readline()
end, count = time.monotonic() + seconds, 0
while time.monotonic() < end or count < 4:
    count += 1
    engine.save_checkpoint(folder, f"{name}{count}", client_state={"count": count})
    engine.wait_for_checkpoint()
    if count % 3 == 0:
        engine.save_checkpoint(folder, f"{name}{count}")  # replaces it
        engine.wait_for_checkpoint()
    path, state = engine.load_checkpoint(folder, f"{name}{count}")
    assert path is not None
print(count)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_two_jobs_share_a_folder(seconds: int, tmp_path: Path) -> None:
    """Each saves under its own tags, prunes its own, and finds all of its own."""
    pipe = subprocess.PIPE
    jobs = {
        name: subprocess.Popen(
            [sys.executable, "-c", JOB, str(tmp_path), name, str(seconds)],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for name in "ab"
    }
    expected = {"latest"}
    for job in jobs.values():
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()
    ended = {name: job.communicate(timeout=seconds + 100) for name, job in jobs.items()}
    for name, job in jobs.items():
        out, errors = ended[name]
        assert job.returncode == 0, errors
        assert "not removed" not in errors and "damaged" not in errors, errors
        count = int(out.split()[-1])
        assert count >= 4
        expected |= {f"{name}{count - 1}", f"{name}{count}"}
    tags = {path.name for path in tmp_path.iterdir() if path.suffix != ".py"}
    # Whichever `latest` named was spared while it did.
    assert expected <= tags
    assert len(tags - expected) <= 2, tags
    for tag in tags - {"latest"}:
        assert {path.name for path in (tmp_path / tag).iterdir()} == {
            "index.json",
            home_of(tmp_path / tag).name,
        }


def test_a_folder_that_another_job_removes_meanwhile_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    listed = folders.items_of

    def removed_behind(path: Path) -> list[StorageItem]:
        found = listed(path)
        (tmp_path / "theirs").rmdir()
        return found

    monkeypatch.setattr(folders, "items_of", removed_behind)
    assert folders.all_of(tmp_path) == []
    assert not (tmp_path / "theirs").exists()
