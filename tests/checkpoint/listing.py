"""Listing of the files in a folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

from hadal.checkpoint.script import SCRIPTS


def names_in(folder: str | Path) -> list[str]:
    """Return the names in a folder of checkpoints, without the scripts beside them."""
    return sorted(path.name for path in Path(folder).iterdir() if path.name not in SCRIPTS)
