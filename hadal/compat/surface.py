"""The surface as data: the modules of DeepSpeed, and the names that programs use from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Any

ROOT = "deepspeed"
VERSION = "0.19.8"
"""The release of DeepSpeed that these names belong to; programs check it."""


class NameKind(Enum):
    """The kind of object behind a name."""

    FUNCTION = auto()
    CLASS = auto()
    VALUE = auto()


@dataclass(frozen=True, slots=True)
class Module:
    """The names that programs use from one module of the surface."""

    name: str
    kinds: dict[str, NameKind]
    constants: dict[str, Any]
    """Names of plain values that are the same in every release."""
    same: dict[str, str]
    """Second names of objects on the surface."""
    children: tuple[str, ...]
    """Its submodules."""


@cache
def modules() -> dict[str, Module]:
    """Return every module of the surface by its full name."""
    entries = json.loads(Path(__file__).with_name("surface.json").read_text("utf-8"))
    children: dict[str, list[str]] = {name: [] for name in entries}
    for name in entries:
        parent, _, leaf = name.rpartition(".")
        if parent:
            children[parent].append(leaf)
    return {name: _module(name, entry, children[name]) for name, entry in entries.items()}


def _module(name: str, entry: dict[str, Any], children: list[str]) -> Module:
    groups = (
        ("functions", NameKind.FUNCTION),
        ("classes", NameKind.CLASS),
        ("values", NameKind.VALUE),
    )
    return Module(
        name,
        {each: kind for group, kind in groups for each in entry.get(group, "").split()},
        entry.get("constants", {}),
        entry.get("same", {}),
        tuple(children),
    )
