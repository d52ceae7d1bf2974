"""JSON files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, told: Mapping[str, Any]) -> None:
    """Write an object; make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read an object; None where there is no file, or none with one in it."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None
