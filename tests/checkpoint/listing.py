"""The files in a folder of checkpoints: their names, and links in their place."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hadal.checkpoint.saving import SCRIPTS


def names_in(folder: str | Path) -> list[str]:
    """Return the names in a folder of checkpoints, without the scripts beside them."""
    return sorted(path.name for path in Path(folder).iterdir() if path.name not in SCRIPTS)


def home_of(tag: Path) -> Path:
    """Return the folder of a checkpoint's files, which its index names."""
    home = tag / json.loads((tag / "index.json").read_text())["save"]
    assert home.is_dir()
    return home


def link_files(folder: Path, blobs: Path) -> None:
    """Replace each file by a link to it in `blobs`, as in a Hugging Face cache."""
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*"))):
        if path.is_file():
            blob = blobs / f"{number:040x}"
            path.rename(blob)
            path.symlink_to(os.path.relpath(blob, path.parent))
