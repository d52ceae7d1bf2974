"""Checkpoint folders, complete or absent: committed, replaced, found and removed atomically.

The files of a save are in `<tag>/<mark>/`, and `<tag>/index.json` names the mark. The index is
written last and atomically, which commits the save: until then the tag has its previous checkpoint,
or none. Nothing is renamed, so object stores and disks work alike. A save holds a lease on its tag
(`leases.py`), and removes what an earlier one that was killed has left under that tag. Several jobs
may save into one folder under different tags; `clean` removes the leftovers of all of them.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Collection
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from hadal.checkpoint.deepspeed.folder import (
    LATEST_UNIVERSAL,
    has_rank_files,
    move_rank_files,
    names_of_ranks,
)
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
from hadal.checkpoint.leases import Lease, expect_alone, is_alive, mark_of
from hadal.checkpoint.rules import Keep
from hadal.checkpoint.storage import Location, StorageItem, sync_folder
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
QUIET_S = 3600.0
"""Files without a lease count as abandoned after this long without a write."""


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
    """Take the lease on a new save, and remove the leftovers of dead ones under its tag.

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
            now += time.monotonic() - began
            storage = storage_of(folder)
            # A request that failed may still commit the files of a save without a lease.
            quiet_s = -math.inf if isinstance(folder, Path) else QUIET_S
            for path, _ in _leftovers(folder, storage.items(folder), now, quiet_s):
                storage.remove(path)
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
    """Return the mark of the checkpoint that a new index replaces; None if it has none."""
    with suppress(CheckpointError):
        return named_by(folder)
    return None


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

    Behind a URL they stay for an hour at least: the request that failed may still come through.
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


def remove(folder: Location) -> None:
    """Remove a checkpoint: first its index, so that it is none at once.

    Nothing is written into the folder that is removed: a request that timed out and was repeated
    may arrive later, and would recreate it.

    Raises:
        CheckpointError: another process is saving under this tag.
        OSError: something cannot be removed.
    """
    storage = storage_of(folder)
    named = replaced_by(folder)
    if named is not None:
        expect_alone(folder, named, time.time())
    # Without the index they would be a checkpoint of DeepSpeed, of which some files are gone.
    for name in names_of_ranks(folder) if isinstance(folder, Path) else ():
        storage.remove(folder / name)
    storage.remove(folder / INDEX)
    if isinstance(folder, Path):
        sync_folder(folder)
    storage.remove(folder)


# ---- leftovers -----------------------------------------------------------------------------------


class Leftover(NamedTuple):
    """A leftover of a killed save or removal: files that no index names, a lease, or a draft."""

    path: Location
    age_s: float
    """Seconds since the last write, by the storage's clock."""


def clean(save_dir: Location, quiet_s: float = QUIET_S, *, is_dry: bool = False) -> list[Leftover]:
    """Remove what killed saves and removals of any job have left, or only list it if `is_dry`.

    Kept are checkpoints, saves whose lease is alive, and files without a lease that were written to
    in the last `quiet_s` seconds: they may be an export's, or those of a checkpoint that is being
    copied here, whose index comes last.

    Raises:
        CheckpointError: something cannot be read, written or removed.
    """
    with system_errors(save_dir, "cleaned"):
        # The lease is written for its time: only the storage's clock tells the age of others'.
        lease = Lease(save_dir, new_mark())
        try:
            items, now = storage_of(save_dir).items(save_dir), lease.written_at()
            found = _leftovers(save_dir, [one for one in items if not one.is_folder], now, quiet_s)
            for folder in (save_dir / item.name for item in items if _is_tag(item)):
                found += _leftovers(folder, storage_of(folder).items(folder), now, quiet_s)
        finally:
            lease.release()
        if not is_dry:
            for one in found:
                storage_of(one.path).remove(one.path)
            for folder in {one.path.parent for one in found} - {save_dir}:
                if isinstance(folder, Path):
                    with suppress(OSError):
                        folder.rmdir()  # if it is empty
    return found


def put_beside(save_dir: Location, *, is_dry: bool = False) -> list[Path]:
    """Put files of DeepSpeed's beside the indices of saves that were killed while they did so.

    Return the folders of these saves; only that if `is_dry`.

    Raises:
        CheckpointError: something cannot be read or moved.
    """
    found = []
    for folder in all_of(save_dir, with_links=False):
        named = replaced_by(folder) if has_rank_files(folder) else None
        if named is None or not isinstance(folder, Path) or is_alive(folder, named):
            continue
        if names_of_ranks(folder / named):
            found.append(folder)
            if not is_dry:
                move_rank_files(folder / named, folder)
    return found


def _leftovers(
    folder: Location, listed: list[StorageItem], now: float, quiet_s: float
) -> list[Leftover]:
    """Return the leftovers among what was listed of a folder, each lease after its files.

    None if the index cannot be read.
    """
    # A lease is older than the files it covers, so the leases of all listed files are visible
    # now, unless their saves have ended, which the index then shows.
    leases = set(filter(None, map(mark_of, {*listed, *storage_of(folder).items(folder)})))
    alive = {mark for mark in leases if is_alive(folder, mark, now)}
    try:
        named = named_by(folder)
    except CheckpointError as error:
        if is_file(folder / INDEX):  # else its own job has removed it
            _log.warning("%s: leftovers are not removed: %s", folder, error)
        return []
    found = []
    for item in listed:
        draft = _DRAFT.fullmatch(item.name)
        is_save = item.is_folder and MARK.fullmatch(item.name)
        mark = item.name if is_save else draft["mark"] if draft else mark_of(item)
        if mark is None or mark in alive or item.name == named:
            continue
        inside = items_of(folder / item.name) if item.is_folder else []
        age_s = now - max(one.modified for one in (item, *inside))
        if mark in leases or age_s >= quiet_s:
            found.append(Leftover(folder / item.name, age_s))
    return found


def named_by(folder: Location) -> str | None:
    """Return the mark that a tag's index names; None if there is no index.

    Raises:
        CheckpointError: the index cannot be read, so that it may name any.
    """
    if not is_file(folder / INDEX):
        return None
    with parsing_errors(f"{folder / INDEX} is damaged"):
        return mark_in(read_index(folder))


# ---- retention -----------------------------------------------------------------------------------

_HOUR = 3600.0
JOBS = "jobs"
"""The index's key of the jobs of a run: each resumed from a checkpoint of the one before it."""


def prune(save_dir: Location, saved: str, keep: Keep, jobs: Collection[str]) -> None:
    """Remove old checkpoints that `keep` does not cover; one rank calls it after a save.

    Only complete checkpoints of `jobs` (this job, and those that it resumed from) that were once
    `latest` are removed: one saved with `save_latest=False` belongs to the caller. The one just
    saved (`saved`) and the one that `latest` names are never removed. A checkpoint that cannot be
    removed is logged and kept.
    """
    if keep.last is None and keep.hours is None:
        return
    try:
        ages = sorted(_ages(save_dir, jobs))
    except (CheckpointError, OSError) as error:
        _log.warning("%s: old checkpoints are not removed: %s", save_dir, error)
        return
    spared = {saved, latest_tag(save_dir)}
    for number, (age, name) in enumerate(ages):
        is_new = keep.last is not None and number < keep.last
        is_young = keep.hours is not None and age < keep.hours * _HOUR
        if is_new or is_young or name in spared:
            continue
        try:
            remove(save_dir / name)
        except (CheckpointError, OSError) as error:
            _log.warning("%s is not removed: %s", save_dir / name, error)


def _ages(save_dir: Location, jobs: Collection[str]) -> list[tuple[float, str]]:
    """Return (age in seconds, name) of each complete checkpoint that was saved as the latest."""
    now, ages = time.time(), []
    for folder in all_of(save_dir, with_links=False):
        try:
            content = read_index(folder)
            sizes = {item.name: item.nbytes for item in items_of(folder / mark_in(content))}
            is_whole = all(sizes.get(name) == seal[0] for name, seal in content["files"].items())
            is_own = content[JOBS][-1] in jobs
            if is_whole and is_own and content["was_latest"] is True:
                ages.append((now - float(content["saved_at"]), folder.name))
        except (CheckpointError, OSError, LookupError, TypeError, ValueError, AttributeError):
            continue  # not a complete checkpoint of ours: left alone
    return ages
