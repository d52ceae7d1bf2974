"""Checkpoint folders, complete or absent: created, replaced, found and removed atomically.

A save writes into `.<tag>.<mark>.partial` and renames it once all is on disk. If the tag existed
before, its old folder is named `.<tag>.<mark>.old` between two renames; if a crash leaves only
that, it is still found. A folder to remove is first renamed to `.<tag>.<mark>.dead`, so that
nobody takes half a folder for a checkpoint. One job at a time may save into a folder, with
several engines; other programs may read it, or write files beside the checkpoints, meanwhile.

Tests: tests/checkpoint/test_meanwhile.py, tests/checkpoint/test_crash.py
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hadal.checkpoint.deepspeed.folder import LATEST_UNIVERSAL, is_deepspeed
from hadal.checkpoint.files import (
    new_mark,
    read_small,
    replace_file,
    sync_folder,
    system_errors,
)
from hadal.errors import CheckpointError, few

LATEST = "latest"
INDEX = "index.json"
CLIENT = "client_state.safetensors"
_LEFTOVER = re.compile(
    r"\.(?P<tag>.+)\.(?P<mark>[0-9a-f]{16})\.(?P<state>partial|old|dead)", re.DOTALL
)
_OWN = re.compile(r"rank_\d{5}\.safetensors|client_state\.safetensors|index\.json")

# The number of attempts to find a missing checkpoint, and the seconds between them: it may be about
# to be replaced, or `latest` about to name another.
_LOOKS, _PAUSE_S = 3, 0.02
# A draft file that nobody has written to for this long is abandoned.
_QUIET_S = 3600.0
# The marks of this process's unfinished saves.
_under_way: set[str] = set()


def rank_file(rank: int) -> str:
    """Return the file name of a rank of the world."""
    return f"rank_{rank:05d}.safetensors"


def check_tag(tag: str) -> None:
    """Check that a tag can be the name of a checkpoint's folder.

    Raises:
        CheckpointError: it cannot be.
    """
    plain = isinstance(tag, str) and tag.isprintable() and "/" not in tag and "\\" not in tag
    if not plain or not tag or tag.strip() != tag or tag.startswith(".") or tag == LATEST:
        raise CheckpointError(
            f"a checkpoint's tag must be a plain folder name, found {tag!r}: printable characters"
            f" without slashes, no dot or space at its start, and not {LATEST!r}"
        )


def find(load_dir: Path, tag: str | None) -> Path | None:
    """Return the folder of the checkpoint `tag`, or of the latest one; None if there is none.

    Raises:
        CheckpointError: the checkpoint that `tag` or `latest` names does not exist.
    """
    for _ in range(_LOOKS - 1):
        with suppress(CheckpointError):
            return _found(load_dir, tag)
        time.sleep(_PAUSE_S)
    return _found(load_dir, tag)


def _found(load_dir: Path, tag: str | None) -> Path | None:
    asked = f"checkpoint {tag!r}"
    if tag is None:
        latest = load_dir / LATEST
        if not os.path.lexists(latest) and not os.path.lexists(load_dir / LATEST_UNIVERSAL):
            return None
        tag = _latest_name(load_dir)
        asked = f"checkpoint {tag!r}, which {latest} names,"
    folder = _folder_of_tag(load_dir, tag)
    if folder is None:
        raise CheckpointError(
            f"no complete {asked} in {load_dir} ({load_dir / tag / INDEX} is missing);"
            f" {_others(load_dir)}"
        )
    return folder


def _others(load_dir: Path) -> str:
    """Return the part of a message that lists the checkpoints of a directory."""
    with system_errors(load_dir, "read"):
        paths = [path for path in load_dir.iterdir() if not path.name.startswith(".")]
        tags = sorted(path.name for path in paths if _has_index(path) or is_deepspeed(path))
    return f"complete checkpoints there: {few(tags)}" if tags else "it has no complete checkpoint"


def _latest_name(load_dir: Path) -> str:
    """Return the tag that `latest` names, or `latest_universal` if only its checkpoint exists."""
    universal = load_dir / LATEST_UNIVERSAL
    if not os.path.lexists(universal):
        return _read_latest(load_dir)
    if os.path.lexists(load_dir / LATEST):
        tag = _read_latest(load_dir)
        if _folder_of_tag(load_dir, tag) is not None:
            return tag
    return _read_latest(load_dir, LATEST_UNIVERSAL)


def _read_latest(load_dir: Path, name: str = LATEST) -> str:
    latest = load_dir / name
    try:
        tag = read_small(latest, 4096).decode().strip()
        check_tag(tag)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{latest} is damaged: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{latest} cannot be used: {error}") from error
    return tag


def _folder_of_tag(load_dir: Path, tag: str) -> Path | None:
    """Return a tag's folder, or the `.old` one beside it that an interrupted replacement left."""
    folder = load_dir / tag
    with system_errors(folder, "read"):
        try:
            check_tag(tag)
        except CheckpointError as error:
            raise CheckpointError(
                f"no complete checkpoint {tag!r} in {load_dir}: {error}"
            ) from None
        if (folder / INDEX).is_file() or is_deepspeed(folder):
            return folder
        if os.path.lexists(folder):
            return None
        for path, found, state in _leftovers(load_dir):
            if found == tag and state == "old" and (path / INDEX).is_file():
                return path
    return None


def draft_of(save_dir: Path, tag: str, mark: str) -> Path:
    """Return the draft folder that the save of this mark writes into."""
    return save_dir / f".{tag}.{mark}.partial"


def begin(save_dir: Path, tag: str, mark: str) -> Path:
    """Sweep the leftovers of dead saves, and create the draft folder of a new save.

    Raises:
        CheckpointError: the folder cannot be created, or the tag's name is taken by another file.
    """
    folder = save_dir / tag
    with system_errors(save_dir, "written"):
        save_dir.mkdir(parents=True, exist_ok=True)
        sweep(save_dir)
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
        raise CheckpointError(f"{folder} cannot be written: it exists and is not a directory")
    draft = draft_of(save_dir, tag, mark)
    with system_errors(draft, "written"):
        _under_way.add(mark)
        draft.mkdir()
    return draft


def commit(draft: Path, folder: Path) -> None:
    """Rename a complete draft to its final name, replacing a folder of that name.

    Files of the old folder that belong to no checkpoint move to the new one.

    Raises:
        CheckpointError: a rename failed; the old folder keeps its name.
    """
    old = draft.with_suffix(".old")
    with system_errors(folder, "written"):
        sync_folder(draft)
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(draft, folder)
        except OSError:
            if old.exists():
                os.rename(old, folder)
            raise
        sync_folder(folder.parent)
        if old.exists():
            _retire(old, folder)
    _forget(draft)


def set_latest(save_dir: Path, tag: str) -> None:
    """Make `latest` name a checkpoint, atomically."""
    mark = new_mark()
    _under_way.add(mark)
    try:
        replace_file(save_dir / LATEST, tag, mark)
    finally:
        _under_way.discard(mark)


def latest_tag(save_dir: Path) -> str | None:
    """Return the tag that `latest` names; None if it cannot be read or is not a tag."""
    try:
        return _read_latest(save_dir)
    except CheckpointError:
        return None


def remove(folder: Path) -> None:
    """Remove a folder; a rename first makes it no checkpoint at once."""
    dead = folder
    if not folder.name.endswith(".dead"):
        tag = folder.name
        if found := _LEFTOVER.fullmatch(tag):
            tag = found["tag"]
        dead = folder.with_name(f".{tag}.{new_mark()}.dead")
        os.rename(folder, dead)
    while os.path.lexists(dead):
        with suppress(FileNotFoundError):  # another process removes it too
            shutil.rmtree(dead)


def discard(draft: Path) -> None:
    """Remove the draft of a failed save, as far as possible."""
    with suppress(OSError):
        remove(draft)
    _forget(draft)


def _forget(draft: Path) -> None:
    _under_way.discard(_mark_of(draft))


def _mark_of(path: Path) -> str:
    """Return the mark in a draft's name; empty if there is none."""
    found = _LEFTOVER.fullmatch(path.name)
    return found["mark"] if found else ""


def sweep(save_dir: Path) -> None:
    """Restore a checkpoint whose replacement was interrupted; remove other leftovers of dead saves.

    Drafts of other saves of this process are kept, and so are single files (an export's) that were
    written to recently.

    Raises:
        OSError: something cannot be renamed or removed.
    """
    for path, tag, state in list(_leftovers(save_dir)):
        if _mark_of(path) not in _under_way:
            with suppress(FileNotFoundError):  # another process was faster
                _sweep_one(path, save_dir / tag, state)


def _sweep_one(path: Path, folder: Path, state: str) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        # Only saves write `latest`, and no other process saves here.
        if folder.name == LATEST or time.time() - status.st_mtime > _QUIET_S:
            path.unlink()
    elif state == "old" and not os.path.lexists(folder):
        os.rename(path, folder)
        sync_folder(folder.parent)
    elif state == "old":
        _retire(path, folder)
    else:
        remove(path)


def checkpoints(save_dir: Path) -> list[Path]:
    """Return the folders that have an index."""
    return [path for path in save_dir.iterdir() if not _is_hidden(path) and _has_index(path)]


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.is_symlink()


def _has_index(path: Path) -> bool:
    return (path / INDEX).is_file()


def _retire(old: Path, folder: Path) -> None:
    """Remove a folder that another has replaced; the user's own files move to that one."""
    for path in list(old.iterdir()):
        if not _OWN.fullmatch(path.name) and not os.path.lexists(folder / path.name):
            os.rename(path, folder / path.name)
    remove(old)


def _leftovers(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (path, tag, state) of every draft, replaced folder and folder under removal."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if found := _LEFTOVER.fullmatch(path.name):
            yield path, found["tag"], found["state"]
