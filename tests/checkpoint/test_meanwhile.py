"""Concurrent use of a folder of checkpoints while a job saves into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ranks import RankPools

from hadal.checkpoint import folders, inspection
from hadal.checkpoint.folders import INDEX
from hadal.errors import CheckpointError

from .listing import home_of, names_in
from .test_contents import engine_of

MARKS = ["0123456789abcde0", "0123456789abcde1"]


def complete(save_dir: Path, tag: str) -> Path:
    """Create just enough of a checkpoint for it to be found."""
    folder = save_dir / tag
    folder.mkdir(parents=True)
    (folder / INDEX).touch()
    return folder


def first_then(act: Callable[[], object], plain: Callable[..., Any], *, after: bool) -> Any:
    """Return `plain` wrapped so that something happens before or after its first call."""
    due = [act]

    def called(*arguments: Any, **more: Any) -> Any:
        if due and not after:
            due.pop()()
        found = plain(*arguments, **more)
        if due:
            due.pop()()
        return found

    return called


# ---- saves ---------------------------------------------------------------------------------------


def half_saved(save_dir: Path, tag: str, mark: str) -> Path:
    """Create a file of a save that was not committed; return the folder of its files."""
    home = save_dir / tag / mark
    home.mkdir(parents=True)
    (home / "rank_00000.safetensors").touch()
    return home


def aged(path: Path, seconds: float) -> None:
    for one in (path, *path.rglob("*")):
        written = one.stat().st_mtime - seconds
        os.utime(one, (written, written))


def test_two_saves_of_a_process_leave_each_other_alone(tmp_path: Path) -> None:
    leases = [folders.begin(tmp_path, tag, mark) for tag, mark in zip("ab", MARKS, strict=True)]
    homes = [half_saved(tmp_path, tag, mark) for tag, mark in zip("ab", MARKS, strict=True)]
    aged(tmp_path, 10_000)
    assert folders.clean(tmp_path) == []
    assert all(home.is_dir() for home in homes)
    for home, lease in zip(homes, leases, strict=True):
        folders.end(home.parent, lease)
    aged(tmp_path, 10_000)
    # Neither is under way any more. A save removes what is left under its own tag only.
    folders.end(homes[0].parent, folders.begin(tmp_path, "a", "f" * 16))
    assert [home.is_dir() for home in homes] == [False, True]
    assert [one.path for one in folders.clean(tmp_path)] == [homes[1]]
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    lease = folders.begin(tmp_path, "a", MARKS[0])
    half_saved(tmp_path, "a", MARKS[0])
    folders.discard(tmp_path / "a", MARKS[0])
    folders.end(tmp_path / "a", lease)
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_lease_is_kept_for_an_hour(tmp_path: Path) -> None:
    """It may be an export's, or a checkpoint that is being copied here."""
    drafts = [tmp_path / f".model.safetensors.{mark}.partial" for mark in MARKS]
    homes = [half_saved(tmp_path, tag, mark) for tag, mark in zip("ab", MARKS, strict=True)]
    for draft, home, age in zip(drafts, homes, (3000, 4200), strict=True):
        draft.touch()
        aged(draft, age)
        aged(home, age)
    folders.clean(tmp_path)
    assert [path.exists() for path in (*drafts, *homes)] == [True, False, True, False]
    assert not (tmp_path / "b").exists()


def test_removal_by_another_process_is_no_error(tmp_path: Path) -> None:
    home = half_saved(tmp_path, "a", MARKS[0])
    aged(tmp_path, 10_000)
    remove = shutil.rmtree

    def removed(path: Path) -> None:
        remove(path)
        raise FileNotFoundError(path)

    with patch.object(shutil, "rmtree", removed):
        folders.clean(tmp_path)
        assert not home.exists()
        folders.remove(complete(tmp_path, "gone"))
    assert list(tmp_path.iterdir()) == []


def export_while_saving(folder: str) -> list[str]:
    engine = engine_of(2, checkpoint={"async_save": True})
    for number in range(12):
        engine.save_checkpoint(folder, f"t{number % 2}")
        engine.save_16bit_model(folder)
        engine.wait_for_checkpoint()
    return names_in(folder)


def test_weights_may_be_written_beside_a_save(ranks: RankPools, tmp_path: Path) -> None:
    names = ["latest", "model.safetensors", "t0", "t1"]
    assert set(names) <= set(ranks(1).run(export_while_saving, str(tmp_path))[0])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# ---- readers -------------------------------------------------------------------------------------


def test_latest_may_move_on(tmp_path: Path) -> None:
    complete(tmp_path, "a")
    folders.set_latest(tmp_path, "a")

    def go_on() -> None:
        complete(tmp_path, "b")
        folders.set_latest(tmp_path, "b")
        folders.remove(tmp_path / "a")

    with patch.object(folders, "_read_latest", first_then(go_on, folders._read_latest, after=True)):
        assert folders.find(tmp_path, None) == tmp_path / "b"
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(CheckpointError, match="no complete checkpoint 'b'"):
        folders.find(tmp_path, None)


def inspect_while_saving(folder: str) -> None:
    engine, path = engine_of(2), Path(folder)
    for tag in ("a", "b"):
        engine.save_checkpoint(folder, tag)

    def prune() -> None:
        engine.save_checkpoint(folder, "c")
        folders.remove(path / "a")
        folders.remove(path / "b")
        engine.save_checkpoint(folder, "b")

    reports = inspected_while(prune, path)
    assert [(one.tag, one.is_latest, one.faults) for one in reports] == [("b", True, [])]
    # What is damaged, and stays, is told as before.
    (home_of(path / "c") / "rank_00000.safetensors").write_bytes(b"")
    reports = inspected_while(lambda: None, path)
    assert {one.tag: bool(one.faults) for one in reports} == {"b": False, "c": True}
    shutil.rmtree(path / "b")
    told = {one.tag: one.faults for one in inspection.inspected(path)}["b"]
    assert len(told) == 1 and "names 'b', but there is no such checkpoint" in told[0]


def inspected_while(act: Callable[[], object], path: Path) -> list[inspection.Report]:
    opened = first_then(act, inspection.open_source, after=True)
    with patch.object(inspection, "open_source", opened):
        return inspection.inspected(path)


def test_inspecting_a_running_job_reports_no_damage(ranks: RankPools, tmp_path: Path) -> None:
    ranks(1).run(inspect_while_saving, str(tmp_path))
