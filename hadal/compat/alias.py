"""The modules called `deepspeed`: each name is resolved on first access (PEP 562)."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

from hadal.compat.placeholders import placeholder
from hadal.compat.surface import Module, homes, modules


class AliasModule(ModuleType):
    """A module of the surface."""

    def __init__(self, module: Module) -> None:
        super().__init__(module.name, f"The names of `{module.name}`, led to Hadal.")
        self.__file__ = __file__
        self.__path__: list[str] = []
        self._surface = module

    def __getattr__(self, name: str) -> Any:
        """Resolve a name of the surface to its home, or to a placeholder."""
        if name == "__all__":
            return self._public()
        full = f"{self._surface.name}.{name}"
        if name in self._surface.children:
            return alias(full)
        value = _resolved(full, self._surface, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self._names(), *self._surface.children, *vars(self)})

    def _names(self) -> set[str]:
        known = self._surface
        return {*known.kinds, *known.constants, *known.same, *_housed().get(known.name, ())}

    def _public(self) -> list[str]:
        """Return the names that `from MODULE import *` imports."""
        return sorted(name for name in self._names() if not name.startswith("_"))


@cache
def _housed() -> dict[str, list[str]]:
    """Return the names of each module that have a home."""
    found: dict[str, list[str]] = {}
    for full in homes():
        module, _, name = full.rpartition(".")
        found.setdefault(module, []).append(name)
    return found


@cache
def alias(name: str) -> AliasModule:
    """Return the alias of a module of the surface; one object per name."""
    return AliasModule(modules()[name])


def _resolved(full: str, module: Module, name: str) -> Any:
    home = homes().get(full)
    if home is not None:
        room, _, thing = home.partition(":")
        if room in modules():
            return alias(room)
        value: Any = importlib.import_module(room)
        for part in thing.split(".") if thing else ():
            value = getattr(value, part)
        return value
    if name in module.constants:
        return module.constants[name]
    if name in module.same:
        room, _, thing = module.same[name].rpartition(".")
        return getattr(alias(room), thing)
    if name in module.kinds:
        return placeholder(full, module.kinds[name])
    raise AttributeError(f"module {module.name!r} has no attribute {name!r}")
