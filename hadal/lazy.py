"""The public names of packages: listed where they are imported, some on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def public_names(package: Mapping[str, object]) -> list[str]:
    """Return a package's `__all__`: all that its `__init__` has imported, but for modules.

    Args:
        package: its `globals()`.
    """
    own = {public_names.__name__, *(n for n, v in package.items() if isinstance(v, ModuleType))}
    return sorted(name for name in package if not name.startswith("_") and name not in own)


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, which imports a name's module, `__dir__` and `__all__`.

    Args:
        package: the package's `__name__`.
        homes: the public names that each module defines, separated by blanks.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    public = sorted({*home_of, *getattr(sys.modules[package], "__all__", ())})

    def imported(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return imported, lambda: public, public
