"""New folders that appear complete, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hadal.checkpoint.files import (
    copy_folder,
    exists,
    is_file,
    is_folder,
    items_of,
    new_mark,
    storage_of,
    system_errors,
)
from hadal.checkpoint.storage import Location, RemotePath, sync_folder
from hadal.errors import CheckpointError


@contextmanager
def drafted_folder(target: Location, last: str) -> Iterator[Path]:
    """Yield an empty directory, whose contents become `target` when the block ends.

    `last` is the file that identifies the format. A folder that contains it is an earlier export,
    and is replaced; any other folder that is not empty is refused. If the block fails, `target` is
    unchanged.

    On this machine the directory is next to `target`, and is renamed once its files are on disk.
    For a URL it is a temporary directory (`TMPDIR`): first `last` of an earlier export is removed
    with the files that only it has, then the files are uploaded, `last` as the last one.

    Raises:
        CheckpointError: `target` holds something else, or cannot be written.
    """
    if isinstance(target, RemotePath):
        _refuse_others(target, last)
        with tempfile.TemporaryDirectory(prefix="hadal-") as folder:
            yield Path(folder)
            with system_errors(target, "written"):
                storage_of(target).remove(target / last)
                _remove_others(target, Path(folder))
            copy_folder(Path(folder), target, last)
        return
    target = Path(os.path.abspath(target))
    _refuse_others(target, last)
    draft = _draft_of(target)
    with system_errors(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
    try:
        yield draft
        with system_errors(target, "written"):
            for place, _, names in os.walk(draft):
                for name in names:
                    with open(os.path.join(place, name), "rb") as file:
                        os.fsync(file.fileno())
                sync_folder(Path(place))
            _refuse_others(target, last)
            _put(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _draft_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.{new_mark()}.partial")


def _remove_others(target: RemotePath, draft: Path) -> None:
    """Remove the files of an earlier export that the draft does not replace.

    A store may carry out a removal late: that of a file which is then written would remove it.
    """
    for item in items_of(target):
        own = draft / item.name
        if item.is_folder and own.is_dir():
            _remove_others(target / item.name, own)
        elif item.is_folder or not own.is_file():
            storage_of(target).remove(target / item.name)


def _refuse_others(target: Location, last: str) -> None:
    is_other = exists(target) and not is_folder(target)
    if is_other or (items_of(target) and not is_file(target / last)):
        raise CheckpointError(
            f"{target} is not empty, and not an earlier export in this format; pass a new directory"
        )


def _put(draft: Path, target: Path) -> None:
    """Rename the draft to the target, after renaming an earlier export out of the way."""
    old = _draft_of(target)
    if target.is_dir():
        os.replace(target, old)
    try:
        os.replace(draft, target)
    except OSError:
        with suppress(OSError):
            os.replace(old, target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
