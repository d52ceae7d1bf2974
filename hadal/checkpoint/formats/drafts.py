"""New folders that appear complete, or not at all.

Tests: tests/checkpoint/test_dcp.py
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hadal.checkpoint.files import new_mark, system_errors
from hadal.checkpoint.local import sync_folder
from hadal.errors import CheckpointError


@contextmanager
def drafted_folder(target: Path, is_earlier: Callable[[Path], bool]) -> Iterator[Path]:
    """Give a hidden folder beside `target`; it becomes `target` when the block ends.

    A folder for which `is_earlier` returns true is replaced: it is an earlier export of this kind.
    Every file is on disk before the folder appears. If the block fails, nothing has changed.

    Raises:
        CheckpointError: `target` holds something else, or cannot be written.
    """
    target = Path(os.path.abspath(target))
    _refuse_others(target, is_earlier)
    draft = target.with_name(f".{target.name}.{new_mark()}.partial")
    with system_errors(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
    try:
        yield draft
        with system_errors(target, "written"):
            _sync_tree(draft)
            _refuse_others(target, is_earlier)
            _put(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _refuse_others(target: Path, is_earlier: Callable[[Path], bool]) -> None:
    with system_errors(target, "read"):
        if not os.path.lexists(target):
            return
        if not target.is_dir() or (any(target.iterdir()) and not is_earlier(target)):
            raise CheckpointError(
                f"{target} is not empty, and not an earlier export in this format; pass a new"
                " directory"
            )


def _put(draft: Path, target: Path) -> None:
    """Rename the draft to the target; an earlier export is aside between two renames."""
    old = draft.with_suffix(".old")
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


def _sync_tree(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(place, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(place))
