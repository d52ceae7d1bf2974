"""The surface as data: the modules of DeepSpeed, their names that programs use, and their homes."""

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


def data(file: str) -> dict[str, Any]:
    """Return a table of this folder."""
    entries: dict[str, Any] = json.loads(Path(__file__).with_name(file).read_text("utf-8"))
    return entries


@cache
def homes() -> dict[str, str]:
    """Return the home of each full name: `module:name` in Hadal or torch, or a module.

    In the file, `name=other` has the name `other` there, and `name=` is the module itself.
    """
    found: dict[str, str] = {}
    for module, rooms in data("homes.json").items():
        for room, names in rooms.items():
            for name, equals, other in (entry.partition("=") for entry in names):
                thing = other if equals else name
                found[f"{module}.{name}"] = f"{room}:{thing}" if thing else room
    return found


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
    entries = data("surface.json")
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
