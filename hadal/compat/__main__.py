"""`python -m hadal.compat script.py ...`: run a program written for DeepSpeed unchanged."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from hadal.compat.install import install_as_deepspeed


def main(arguments: list[str]) -> None:
    """Run a script, or with `-m` a module, with its arguments, as Python itself would."""
    install_as_deepspeed()
    is_module = arguments[:1] == ["-m"]
    program = arguments[int(is_module) :]
    if not program:
        raise SystemExit("usage: python -m hadal.compat [-m] PROGRAM [ARGUMENT ...]")
    sys.argv = program
    if is_module:
        sys.path[0] = ""
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
