"""Checkpoint folders, complete or absent: committed, replaced, found and removed atomically.

The files of a save are in `<tag>/<mark>/`, and `<tag>/index.json` names the mark. The index is
written last and atomically, which commits the save: until then the tag has its previous checkpoint,
or none. Nothing is renamed, so object stores and disks work alike. A later save removes files that
no index names once their lease is dead (`leases.py`), so several jobs may save into one folder
under different tags.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from hadal.checkpoint.deepspeed.folder import LATEST_UNIVERSAL
from hadal.checkpoint.files import (
    exists,
    is_file,
    items_of,
    new_mark,
    parsing_errors,
    read_small,
    replace_file,
    storage_of,
    system_errors,
)
from hadal.checkpoint.formats.registry import format_of, is_found_by_path
from hadal.checkpoint.index import INDEX, MARK, mark_in, read_index
from hadal.checkpoint.leases import Lease, expect_alone, is_alive, lease_of, mark_of
from hadal.checkpoint.local import sync_folder
from hadal.checkpoint.storage import Location, StorageItem
from hadal.errors import CheckpointError, few

_log = logging.getLogger(__name__)
LATEST = "latest"
# Bytes of a folder's name, and the characters of a tag that a message shows.
_LONGEST_NAME, _SHOWN = 255, 60
CLIENT = "client_state.safetensors"
_DRAFT = re.compile(r"\..+\.(?P<mark>[0-9a-f]{16})\.partial", re.DOTALL)

# The number of attempts to find a missing checkpoint, and the seconds between them: another job may
# be replacing it or `latest`.
_LOOKS, _PAUSE_S = 3, 0.02
# Files without a lease count as abandoned after this long without a write. Until then they may
# belong to an export, or to a checkpoint that is being copied here, whose index comes last.
_QUIET_S = 3600.0


def rank_file(rank: int) -> str:
    """Return the file name of a rank of the world."""
    return f"rank_{rank:05d}.safetensors"


def check_tag(tag: str) -> None:
    """Check that a tag can be the name of a checkpoint's folder.

    Raises:
        CheckpointError: it cannot be.
    """
    plain = isinstance(tag, str) and tag.isprintable() and "/" not in tag and "\\" not in tag
    plain = plain and len(tag.encode()) <= _LONGEST_NAME
    if not plain or not tag or tag.strip() != tag or tag.startswith(".") or tag == LATEST:
        raise CheckpointError(
            f"a checkpoint's tag must be a plain folder name, found {shown(tag)}: at most"
            f" {_LONGEST_NAME} bytes of printable characters without slashes, no dot or space at"
            f" its start, and not {LATEST!r}"
        )


def shown(tag: object) -> str:
    """Return a tag for a message, a long one cut at its first line.

    A stranger's `latest` may be a link to any file, and messages are logged.
    """
    if not isinstance(tag, str) or len(tag) <= _SHOWN:
        return repr(tag)
    return f"{''.join(takewhile(str.isprintable, tag[:_SHOWN]))!r}... ({len(tag)} characters)"


def check_save_dir(save_dir: Location) -> None:
    """Check that a directory can exist at `save_dir`.

    Raises:
        CheckpointError: it, or a directory above it, is a file.
    """
    for path in (save_dir, *save_dir.parents) if isinstance(save_dir, Path) else ():
        with system_errors(path, "written"):
            is_file_there = path.exists() and not path.is_dir()
        if is_file_there:
            below = "" if path == save_dir else f", so that {save_dir} cannot be created"
            raise CheckpointError(
                f"save_dir must be a directory or not exist yet, but {path} is a file{below}; pass"
                " another path to save_checkpoint"
            )


def find(load_dir: Location, tag: str | None) -> Location | None:
    """Return the folder of the checkpoint `tag`, or of the latest one; None if there is none.

    A checkpoint of a format without tags is found by its own path.

    Raises:
        CheckpointError: the checkpoint that `tag` or `latest` names does not exist.
    """
    for _ in range(_LOOKS - 1):
        with suppress(CheckpointError):
            return _found(load_dir, tag)
        time.sleep(_PAUSE_S)
    return _found(load_dir, tag)


def _found(load_dir: Location, tag: str | None) -> Location | None:
    asked = f"checkpoint {shown(tag)}"
    if tag is None:
        if is_found_by_path(load_dir):
            return load_dir
        latest = load_dir / LATEST
        if not _is_there(latest) and not _is_there(load_dir / LATEST_UNIVERSAL):
            return None
        tag = _latest_name(load_dir)
        asked = f"checkpoint {shown(tag)}, which {latest} names,"
    folder = _folder_of_tag(load_dir, tag)
    if folder is None:
        raise CheckpointError(
            f"no complete {asked} in {load_dir} (its {INDEX} is missing); {_others(load_dir)}"
        )
    return folder


def why_none(load_dir: Location) -> str:
    """Return why `find` has found no latest checkpoint, with a remedy if one is there."""
    if isinstance(load_dir, Path) and not load_dir.is_dir():
        return f"{load_dir} is not a directory" if load_dir.exists() else f"no directory {load_dir}"
    if is_complete(load_dir):
        return (
            f"{load_dir} is itself a checkpoint; to load it, call"
            f" load_checkpoint({str(load_dir.parent)!r}, {load_dir.name!r})"
        )
    return f"{load_dir} has no file {LATEST!r}; {_others(load_dir)}"


def _is_there(path: Location) -> bool:
    """Return whether there is a file, or a link that leads nowhere."""
    return os.path.lexists(path) if isinstance(path, Path) else exists(path)


def _others(load_dir: Location) -> str:
    """Return the end of a message: the checkpoints in a directory."""
    if isinstance(load_dir, Path) and not load_dir.is_dir():
        return "there is no such directory"
    tags = [folder.name for folder in all_of(load_dir)]
    return f"complete checkpoints there: {few(tags)}" if tags else "it has no complete checkpoint"


def _latest_name(load_dir: Location) -> str:
    """Return the tag that `latest` names, or `latest_universal` if only its checkpoint exists."""
    universal = load_dir / LATEST_UNIVERSAL
    if not _is_there(universal):
        return _read_latest(load_dir)
    if _is_there(load_dir / LATEST):
        tag = _read_latest(load_dir)
        if _folder_of_tag(load_dir, tag) is not None:
            return tag
    return _read_latest(load_dir, LATEST_UNIVERSAL)


def _read_latest(load_dir: Location, name: str = LATEST) -> str:
    latest = load_dir / name
    try:
        tag = read_small(latest, 4096).decode().strip()
        check_tag(tag)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{latest} is damaged: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{latest} cannot be used: {error}") from error
    return tag


def universal_tag(load_dir: Location) -> str | None:
    """Return the tag that `latest_universal` names; None if there is no such file."""
    is_there = is_file(load_dir / LATEST_UNIVERSAL)
    return _read_latest(load_dir, LATEST_UNIVERSAL) if is_there else None


def _folder_of_tag(load_dir: Location, tag: str) -> Location | None:
    """Return the folder of a tag's checkpoint."""
    folder = load_dir / tag
    with system_errors(folder, "read"):
        try:
            check_tag(tag)
        except CheckpointError as error:
            raise CheckpointError(
                f"no complete checkpoint {shown(tag)} in {load_dir}: {error}"
            ) from None
        return folder if is_complete(folder) else None


def is_complete(folder: Location) -> bool:
    """Return whether a folder is a checkpoint."""
    return format_of(folder) is not None


def all_of(folder: Location, *, with_links: bool = True) -> list[Location]:
    """Return the checkpoints in a folder that are not hidden, by name."""
    items = (item for item in items_of(folder) if with_links or not item.is_link)
    found = (folder / item.name for item in items if not item.name.startswith("."))
    return [path for path in found if is_complete(path)]


def _is_tag(item: StorageItem) -> bool:
    return item.is_folder and not item.is_link and not item.name.startswith(".")


# ---- a save --------------------------------------------------------------------------------------


def begin(save_dir: Location, tag: str, mark: str) -> Lease:
    """Take the lease on a new save, and sweep the leftovers of dead ones.

    Raises:
        CheckpointError: the folder cannot be created, the tag's name is taken by another file, or
            another process is saving under this tag.
    """
    folder = save_dir / tag
    with system_errors(folder, "written"):
        found = storage_of(folder).find(folder)
    if found is not None and (found.is_link or not found.is_folder):
        raise CheckpointError(f"{folder} cannot be written: it exists and is not a directory")
    lease = Lease(folder, mark)
    try:
        with system_errors(save_dir, "written"):
            now, began = lease.written_at(), time.monotonic()
            expect_alone(folder, mark, now)
            sweep(save_dir, now + time.monotonic() - began)
    except CheckpointError:
        end(folder, lease)
        raise
    return lease


def end(folder: Location, lease: Lease) -> None:
    """Release the lease on a save; remove the folder of its tag if it is empty."""
    lease.release()
    if isinstance(folder, Path):
        with suppress(OSError):
            folder.rmdir()


def replaced_by(folder: Location) -> str | None:
    """Return the mark of the checkpoint that a new index replaces; None if it has none.

    The files of a damaged checkpoint stay until they are swept.
    """
    with suppress(CheckpointError):
        return named_by(folder)
    return None


@contextmanager
def replacing(folder: Location, named: str | None) -> Iterator[None]:
    """Hold a lease on the files that the block replaces, so a sweep removes them after a crash.

    `named` is the mark of the checkpoint that the index names now.
    """
    if named is None:
        yield
        return
    lease = Lease(folder, named)
    try:
        yield
    finally:
        lease.release()


def retire(folder: Location, named: str | None, kept: str) -> None:
    """Remove the files of the checkpoint that was replaced; `kept` is the mark of the new one.

    The user's own files stay. Files that cannot be removed are logged.
    """
    storage = storage_of(folder)
    try:
        if named is not None and named != kept:
            storage.remove(folder / named)
    except OSError as error:
        _log.warning("%s: the files of the previous checkpoint are not removed: %s", folder, error)


def discard(folder: Location, mark: str) -> None:
    """Remove the files of a failed save that no index can name, if possible."""
    with suppress(OSError):
        storage_of(folder).remove(folder / mark)


def discard_uncommitted(folder: Location, mark: str) -> None:
    """Remove the files of a save whose index could not be written, if no index can name them.

    Behind a URL they stay until they are swept: the request that failed may still come through.
    """
    with suppress(CheckpointError):
        if isinstance(folder, Path) and named_by(folder) != mark:
            discard(folder, mark)


def set_latest(save_dir: Location, tag: str, mark: str = "") -> None:
    """Make `latest` name a checkpoint, atomically; `mark` is that of the save."""
    content = tag
    if not isinstance(save_dir, Path):
        # Readers strip the blanks after the tag. They make the contents of each save unique, which
        # a replacement on S3 relies on.
        bits = format(int(mark or new_mark(), 16), "064b")
        content = "\n".join([tag, bits.replace("0", " ").replace("1", "\t"), ""])
    replace_file(save_dir / LATEST, content, mark)


def latest_tag(save_dir: Location) -> str | None:
    """Return the tag that `latest` names; None if it cannot be read or is not a tag."""
    try:
        return _read_latest(save_dir)
    except CheckpointError:
        return None


def remove(folder: Location, beside: Location | None = None) -> None:
    """Remove a checkpoint: first its index, so that it is none at once.

    The lease is in `beside`, the folder of another tag. Nothing is written into the folder that is
    removed: a request that timed out and was repeated may arrive later, and would recreate it.

    Raises:
        CheckpointError: another process is saving under this tag.
        OSError: something cannot be removed.
    """
    storage = storage_of(folder)
    named = replaced_by(folder)
    if named is not None:
        expect_alone(folder, named, time.time())
    with replacing(beside or folder, named):
        storage.remove(folder / INDEX)
        if isinstance(folder, Path):
            sync_folder(folder)
        storage.remove(folder)


# ---- leftovers -----------------------------------------------------------------------------------


class _Leases(NamedTuple):
    """The marks that the leases in a folder of tags cover, and the places of the dead ones."""

    alive: set[str]
    dead: dict[str, Location]


def sweep(save_dir: Location, now: float | None = None) -> None:
    """Remove what dead saves have left; `now` is the time by the storage's clock.

    Kept are checkpoints, saves whose lease is alive, and files without a lease (an export's, or
    those of a checkpoint that is being copied) that were written to recently.

    Raises:
        OSError: something cannot be removed.
    """
    now = time.time() if now is None else now
    storage = storage_of(save_dir)
    items = storage.items(save_dir)
    tags = {
        save_dir / item.name: storage.items(save_dir / item.name) for item in filter(_is_tag, items)
    }
    tags = {folder: listed for folder, listed in tags.items() if _is_suspect(listed)}
    leases = _leases_in(tags, now)
    swept = {folder for folder, listed in tags.items() if _sweep_tag(folder, listed, leases, now)}
    for item, found in _drafts(items):
        path = save_dir / item.name
        if found["mark"] in leases.dead or _is_quiet(path, item, now):
            storage.remove(path)
    # Last, as they cover files of other tags as well.
    for lease in leases.dead.values():
        if lease.parent in swept:
            storage.remove(lease)
    for folder in swept:
        if isinstance(folder, Path) and not items_of(folder):
            with suppress(OSError):
                folder.rmdir()


def _leases_in(tags: Mapping[Location, list[StorageItem]], now: float) -> _Leases:
    """Return the leases in these folders, each given with what was listed of it before."""
    leases = _Leases(set(), {})
    for folder, listed in tags.items():
        # A lease is older than the files it covers, so the leases of all listed files are visible
        # now, unless their saves have ended, which the index then shows.
        for mark in filter(None, map(mark_of, {*listed, *storage_of(folder).items(folder)})):
            if is_alive(folder, mark, now):
                leases.alive.add(mark)
            else:
                leases.dead[mark] = lease_of(folder, mark)
    return leases


def _is_suspect(listed: list[StorageItem]) -> bool:
    """Return whether a tag's folder holds anything but one complete checkpoint."""
    saves = sum(item.is_folder and bool(MARK.fullmatch(item.name)) for item in listed)
    has_more = any(mark_of(item) for item in listed) or any(_drafts(listed))
    return has_more or saves > any(item.name == INDEX for item in listed)


def _sweep_tag(folder: Location, listed: list[StorageItem], leases: _Leases, now: float) -> bool:
    """Sweep what was listed of a tag's folder; return false if its index cannot be read."""
    storage = storage_of(folder)
    try:
        named = named_by(folder)
    except CheckpointError as error:
        if is_file(folder / INDEX):  # else its own job has removed it
            _log.warning("%s: leftovers are not removed: %s", folder, error)
        return False
    marks = {item: item.name for item in listed if item.is_folder and MARK.fullmatch(item.name)}
    drafts = {item: found["mark"] for item, found in _drafts(listed)}
    for item, mark in (marks | drafts).items():
        is_needed = item in marks and (mark in leases.alive or mark == named)
        if not is_needed and (mark in leases.dead or _is_quiet(folder / item.name, item, now)):
            storage.remove(folder / item.name)
    return True


def named_by(folder: Location) -> str | None:
    """Return the mark that a tag's index names; None if there is no index, or it names none.

    Raises:
        CheckpointError: the index cannot be read, so that it may name any.
    """
    if not is_file(folder / INDEX):
        return None
    with parsing_errors(f"{folder / INDEX} is damaged"):
        return mark_in(read_index(folder))


def _drafts(items: list[StorageItem]) -> Iterator[tuple[StorageItem, re.Match[str]]]:
    """Yield the items whose names mark them as drafts, with the parts of each name."""
    for item in items:
        if found := _DRAFT.fullmatch(item.name):
            yield item, found


def _is_quiet(path: Location, item: StorageItem, now: float) -> bool:
    """Return whether a file or folder has had no write for `_QUIET_S`."""
    inside = storage_of(path).items(path) if item.is_folder else []
    return now - max([item.modified, *(one.modified for one in inside)]) > _QUIET_S
