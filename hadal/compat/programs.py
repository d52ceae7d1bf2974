"""`python -m deepspeed....`: the programs of DeepSpeed that map to one of Hadal's."""

from __future__ import annotations

import importlib

from hadal.compat.placeholders import unbuilt

_HOMES = {
    "deepspeed.checkpoint.ds_to_universal": "hadal.cli.ds_to_universal:main",
    "deepspeed.utils.zero_to_fp32": "hadal.cli.zero_to_fp32:main",
    "deepspeed.utils.zero_to_torch": "hadal.cli.zero_to_fp32:main_torch",
}


def start(name: str) -> int:
    """Run a program; return its exit code.

    Raises:
        NotBuiltYetError: the program is not built.
    """
    home = _HOMES.get(name)
    if home is None:
        raise unbuilt(f"python -m {name}")
    module, _, function = home.partition(":")
    code: int = getattr(importlib.import_module(module), function)()
    return code
