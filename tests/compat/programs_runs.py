"""Programs in the manner of DeepSpeed's examples, for the ranks of a pool."""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("programs")


def run(name: str, told: tuple[str, ...], *arguments: str) -> dict[str, Any]:
    """Run a program as `python NAME.py ARGUMENTS` does; return the globals that are `told`."""
    before = sys.argv
    sys.argv = [f"{name}.py", *arguments]
    try:
        found = runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before
    kept = {each: found[each] for each in told}
    found.clear()
    gc.collect()
    return kept
