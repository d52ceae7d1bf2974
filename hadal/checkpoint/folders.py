"""One folder per checkpoint, complete or not there: how it comes, is replaced, found and removed.

A save writes into `.<tag>.<mark>.partial` and renames it when all is on disk. Where the tag was
there before, the old folder stands as `.<tag>.<mark>.old` between two renames; where that is all
that a crash has left, it is still found. What must go is renamed to `.<tag>.<mark>.dead` first, so
that nobody takes half a folder for a checkpoint. One job saves into a folder at a time; several
engines of it may, and others may read there, or write files beside the checkpoints, meanwhile.
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
    check_inside,
    naming,
    new_mark,
    read_small,
    replace_file,
    sync_folder,
)
from hadal.errors import CheckpointError

LATEST = "latest"
INDEX = "index.json"
CLIENT = "client_state.safetensors"
_LEFTOVER = re.compile(
    r"\.(?P<tag>.+)\.(?P<mark>[0-9a-f]{16})\.(?P<state>partial|old|dead)", re.DOTALL
)
_OWN = re.compile(r"rank_\d{5}\.safetensors|client_state\.safetensors|index\.json")

# How often a checkpoint that is not there is looked for, and the seconds between: it may be about
# to be replaced, or `latest` about to name another.
_LOOKS, _PAUSE_S = 3, 0.02
# A file that nobody has written to for so long is nobody's draft any more.
_QUIET_S = 3600.0
# The marks of saves of this process that have begun and have not ended.
_under_way: set[str] = set()


def rank_file(rank: int) -> str:
    """The name of a rank's file, by its number in the world."""
    return f"rank_{rank:05d}.safetensors"


def check_tag(tag: str) -> None:
    """See that a tag can be the name of a folder here.

    Raises:
        CheckpointError: it cannot.
    """
    plain = isinstance(tag, str) and tag.isprintable() and "/" not in tag and "\\" not in tag
    if not plain or not tag or tag.strip() != tag or tag.startswith(".") or tag == LATEST:
        raise CheckpointError(
            f"a checkpoint's tag must be a plain folder name, found {tag!r}: printable characters"
            f" without slashes, no dot or space at its start, and not {LATEST!r}"
        )


def find(load_dir: Path, tag: str | None) -> Path | None:
    """The folder of the checkpoint `tag`, or of the latest one; None where there is none.

    Raises:
        CheckpointError: a tag was asked for that is not there, or `latest` names one.
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
        tag = _named(load_dir)
        asked = f"checkpoint {tag!r}, which {latest} names,"
    folder = _standing(load_dir, tag)
    if folder is None:
        raise CheckpointError(
            f"no complete {asked} in {load_dir} ({load_dir / tag / INDEX} is missing)"
        )
    check_inside(folder, load_dir)
    return folder


def _named(load_dir: Path) -> str:
    """The tag that `latest` names; the universal one where DeepSpeed has left only that."""
    universal = load_dir / LATEST_UNIVERSAL
    if not os.path.lexists(universal):
        return _read_latest(load_dir)
    if os.path.lexists(load_dir / LATEST):
        tag = _read_latest(load_dir)
        if _standing(load_dir, tag) is not None:
            return tag
    return _read_latest(load_dir, LATEST_UNIVERSAL)


def _read_latest(load_dir: Path, name: str = LATEST) -> str:
    latest = load_dir / name
    check_inside(latest, load_dir)
    try:
        tag = read_small(latest, 4096).decode().strip()
        check_tag(tag)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{latest} is damaged: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{latest} cannot be used: {error}") from error
    return tag


def _standing(load_dir: Path, tag: str) -> Path | None:
    """Where a tag's checkpoint is: under its name, or beside it if a replacement was cut short."""
    folder = load_dir / tag
    with naming(folder, "read"):
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
    """The folder that the save of this mark writes into."""
    return save_dir / f".{tag}.{mark}.partial"


def begin(save_dir: Path, tag: str, mark: str) -> Path:
    """Clear away what dead saves have left, and make the folder that a save writes into.

    Raises:
        CheckpointError: the folder cannot be made, or something else has the tag's name.
    """
    folder = save_dir / tag
    with naming(save_dir, "written"):
        save_dir.mkdir(parents=True, exist_ok=True)
        sweep(save_dir)
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
        raise CheckpointError(f"{folder} cannot be written: it is there and is no folder")
    draft = draft_of(save_dir, tag, mark)
    with naming(draft, "written"):
        _under_way.add(mark)
        draft.mkdir()
    return draft


def commit(draft: Path, folder: Path) -> None:
    """Give a complete draft its name; a folder of that name is replaced.

    Files in it that are no checkpoint's go over to the new folder.

    Raises:
        CheckpointError: a rename was refused; the old folder has its name again.
    """
    old = draft.with_suffix(".old")
    with naming(folder, "written"):
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
    _end_of(draft)


def set_latest(save_dir: Path, tag: str) -> None:
    """Let `latest` name a checkpoint; it names the old or the new one at every moment."""
    mark = new_mark()
    _under_way.add(mark)
    try:
        replace_file(save_dir / LATEST, tag, mark)
    finally:
        _under_way.discard(mark)


def latest_tag(save_dir: Path) -> str | None:
    """What `latest` names; None where it names nothing that could be."""
    try:
        return _read_latest(save_dir)
    except CheckpointError:
        return None


def remove(folder: Path) -> None:
    """Remove a folder; it is no checkpoint any more from the first moment on."""
    dead = folder
    if not folder.name.endswith(".dead"):
        tag = folder.name
        if found := _LEFTOVER.fullmatch(tag):
            tag = found["tag"]
        dead = folder.with_name(f".{tag}.{new_mark()}.dead")
        os.rename(folder, dead)
    while os.path.lexists(dead):
        with suppress(FileNotFoundError):  # somebody else removes it too
            shutil.rmtree(dead)


def discard(draft: Path) -> None:
    """Remove the draft of a save that failed, as far as that is possible."""
    with suppress(OSError):
        remove(draft)
    _end_of(draft)


def _end_of(draft: Path) -> None:
    _under_way.discard(_mark_of(draft))


def _mark_of(path: Path) -> str:
    """Whose draft it is, by its name; empty where it is nobody's."""
    found = _LEFTOVER.fullmatch(path.name)
    return found["mark"] if found else ""


def sweep(save_dir: Path) -> None:
    """Bring back a checkpoint that was being replaced, and remove what else dead saves have left.

    What other saves of this process write stays, and single files that somebody, who exports
    weights, has written to lately.

    Raises:
        OSError: something cannot be renamed or removed.
    """
    for path, tag, state in list(_leftovers(save_dir)):
        if _mark_of(path) not in _under_way:
            with suppress(FileNotFoundError):  # somebody else was faster
                _sweep_one(path, save_dir / tag, state)


def _sweep_one(path: Path, folder: Path, state: str) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        # Saves alone write `latest`, and none of another process saves here.
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
    """The folders that have an index."""
    return [path for path in save_dir.iterdir() if not _is_hidden(path) and _has_index(path)]


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.is_symlink()


def _has_index(path: Path) -> bool:
    return (path / INDEX).is_file()


def _retire(old: Path, folder: Path) -> None:
    """Remove a folder that another has replaced; the user's own files go over to that one."""
    for path in list(old.iterdir()):
        if not _OWN.fullmatch(path.name) and not os.path.lexists(folder / path.name):
            os.rename(path, folder / path.name)
    remove(old)


def _leftovers(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Path, tag and state of everything that is not, or not any more, under its own name."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if found := _LEFTOVER.fullmatch(path.name):
            yield path, found["tag"], found["state"]
