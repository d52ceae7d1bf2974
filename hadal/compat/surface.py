"""The surface as data: the names of DeepSpeed that programs use, their homes, and placeholders.

`surface.json` has the names (`tests/compat/write_surface.py` makes it from copies of DeepSpeed),
`homes.json` the home of each that is built, and `instead.json` the replacements of the others, by
the beginning of their names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

from hadal.errors import NotBuiltYetError

_log = logging.getLogger(__name__)
ROOT = "deepspeed"
VERSION = "0.19.8"
"""The release of DeepSpeed that these names belong to; programs check it."""
MAJOR, MINOR, PATCH = map(int, VERSION.split("."))


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


class Module:
    """The names that programs use from one module of the surface; read when they are asked for."""

    def __init__(self, name: str, entry: Mapping[str, Any], children: list[str]) -> None:
        self.name = name
        self.constants: dict[str, Any] = entry.get("constants", {})
        """Names of plain values that are the same in every release."""
        self.children = children
        """Its submodules."""
        self._entry = entry

    @cached_property
    def kinds(self) -> dict[str, NameKind]:
        """Its own names."""
        found: dict[str, NameKind] = {}
        for kind, group in zip(NameKind, ("functions", "classes", "values"), strict=True):
            found |= dict.fromkeys(self._entry.get(group, "").split(), kind)
        return found

    @cached_property
    def same(self) -> dict[str, str]:
        """Names from other modules of the surface, with their full names there."""
        found = {}
        for room, names in self._entry.get("same", {}).items():
            for leaf, _, other in (each.partition("=") for each in names.split()):
                found[leaf] = f"{room}.{other or leaf}"
        return found


@cache
def modules() -> dict[str, Module]:
    """Return every module of the surface by its full name, and by a second one if it has one."""
    entries = data("surface.json")
    children: dict[str, list[str]] = {name: [] for name in entries}
    for name in entries:
        parent, _, leaf = name.rpartition(".")
        if parent:
            children[parent].append(leaf)
    found = {name: Module(name, entry, children[name]) for name, entry in entries.items()}
    seconds = {name: entry["is"] for name, entry in entries.items() if "is" in entry}
    return found | {second: found[first] for second, first in seconds.items()}


# ---- placeholders for names that are not built yet: importable, but they raise when used ---------


def unbuilt(name: str, instead: str | None = None) -> NotBuiltYetError:
    """Return the error for a name that has no home yet; it names a replacement if there is one."""
    if instead is None:
        found = (remedy for start, remedy in data("instead.json").items() if name.startswith(start))
        instead = next(found, "Do without it")
    return NotBuiltYetError(
        f"{name} is not built yet: the name can be imported, but has no implementation."
        f" {instead}, or run this program with DeepSpeed itself"
    )


def placeholder(name: str, kind: NameKind) -> Any:
    """Return a placeholder for `name`, which raises when it is called or used."""
    if kind is NameKind.FUNCTION:
        return _function(name)
    if kind is NameKind.CLASS:
        leaf = name.rpartition(".")[2]
        return _UnbuiltType(leaf, (_Unbuilt,), {"__module__": name.rpartition(".")[0]})
    return _Value(name)


def _function(name: str) -> Callable[..., NoReturn]:
    def not_built(*args: Any, **kwargs: Any) -> NoReturn:
        raise unbuilt(name)

    not_built.__name__ = name.rpartition(".")[2]
    not_built.__qualname__ = not_built.__name__
    not_built.__doc__ = f"{name}: not built yet; raises when it is called."
    return not_built


class _UnbuiltType(type):
    """Lets a class be imported, subclassed and tested by `isinstance`; anything else raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unbuilt(f"{cls.__module__}.{cls.__name__}.{name}")

    def __setattr__(cls, name: str, value: Any) -> None:
        """Warn of a program's own method: nothing here calls it."""
        text = "%s.%s was replaced, but has no effect: nothing here calls it"
        _log.warning(text, cls.__qualname__, name)
        super().__setattr__(name, value)


class _Unbuilt(metaclass=_UnbuiltType):
    """An instance of a class that is not built; there are none."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Unbuilt:
        named = next(c for c in cls.__mro__ if _Unbuilt in c.__bases__)
        raise unbuilt(f"{named.__module__}.{named.__name__}")


class _Value:
    """A value that is not known here; using it raises."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def _refuse(self, *args: Any) -> NoReturn:
        raise unbuilt(object.__getattribute__(self, "_name"))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # copying, inspecting and printing modules looks these up
        self._refuse()

    def __bool__(self) -> bool:
        self._refuse()

    def __eq__(self, other: object) -> bool:
        self._refuse()

    def __hash__(self) -> int:
        self._refuse()

    def __str__(self) -> str:
        self._refuse()

    __call__ = __contains__ = __getitem__ = __iter__ = __len__ = __setattr__ = _refuse
