"""The modules called `deepspeed`, and the import finder that lets `import deepspeed` find them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hadal import __version__
from hadal.compat.surface import ROOT, VERSION, Module, homes, modules, placeholder, unbuilt
from hadal.engine.collector import collector_at_rest
from hadal.errors import UsageError


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
        if name in self._surface.children and full not in homes():
            return alias(full)
        value = _resolved(full, self._surface, name)
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray and others send functions to their workers, and the modules that these name.
        return alias, (self.__name__,)

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


def alias(name: str) -> AliasModule:
    """Return the alias of a module of the surface; one object per module."""
    return _made(modules()[name].name)


@cache
def _made(name: str) -> AliasModule:
    return AliasModule(modules()[name])


def _resolved(full: str, module: Module, name: str) -> Any:
    home = homes().get(full)
    if home is not None:
        room, _, thing = home.partition(":")
        if room in modules():
            return alias(room)
        with collector_at_rest():  # what a module makes stays
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


# ---- the import finder ---------------------------------------------------------------------------


_PROGRAMS = {"deepspeed.launcher.runner": "run", "deepspeed.launcher.launch": "launch"}
"""Modules that are programs, and their names in `hadal.cli.deepspeed`."""
MARK = "_led_to_hadal.py"
"""The file that distinguishes the package that leads to Hadal from DeepSpeed's own."""


def install_as_deepspeed() -> None:
    """Make `import deepspeed`, and imports from it, find Hadal in this process.

    Call it before any import of a library that imports deepspeed or checks whether it is installed
    (transformers, accelerate and lightning do so when they are imported). A second call does
    nothing.

    Raises:
        UsageError: DeepSpeed itself is installed, or already imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    loaded = sys.modules.get(ROOT)
    if loaded is not None and not isinstance(loaded, AliasModule) and not _leads_here(loaded):
        raise UsageError(
            f"install_as_deepspeed: DeepSpeed is already imported, from {loaded.__file__}; call it"
            " before anything that imports deepspeed, in an environment without DeepSpeed"
        )
    found = PathFinder.find_spec(ROOT)
    if found is not None and found.origin is not None and not _is_mark_beside(found.origin):
        raise UsageError(
            f"install_as_deepspeed: DeepSpeed itself is installed ({found.origin}) and would"
            " be hidden silently; uninstall it (pip uninstall deepspeed), or use another"
            " environment"
        )
    sys.meta_path.insert(0, _Finder())


def lead_to_hadal() -> None:
    """Replace a package called `deepspeed` that is being imported by Hadal."""
    install_as_deepspeed()
    module = alias(ROOT)
    module.__spec__ = _spec(ROOT)
    module.__loader__ = module.__spec__.loader
    sys.modules[ROOT] = module


def _leads_here(module: ModuleType) -> bool:
    return module.__file__ is not None and _is_mark_beside(module.__file__)


def _is_mark_beside(origin: str) -> bool:
    return Path(origin).with_name(MARK).exists()


def _spec(name: str) -> ModuleSpec:
    is_package = name not in _PROGRAMS  # for a package, `python -m` would run another module
    spec = ModuleSpec(name, _Loader(), origin=alias(name).__file__, is_package=is_package)
    spec.has_location = True
    return spec


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are resolved on access."""

    def get_code(self, name: str) -> CodeType | None:
        """Return the code that `python -m` runs, if the module is also a program."""
        does = _PROGRAMS.get(name)
        call = f"import sys\nfrom hadal.cli import deepspeed\nsys.exit(deepspeed.{does}())\n"
        return None if does is None else compile(call, alias(name).__file__ or name, "exec")


class _ProgramLoader(Loader):
    """Loads the code that `python -m` runs for a module."""

    def get_code(self, name: str) -> CodeType:
        """Return a call of the program's home."""
        program = name.rpartition(".")[0]
        text = f"from hadal.compat.install import start\nraise SystemExit(start({program!r}))\n"
        return compile(text, __file__, "exec")


class _Finder(DistributionFinder):
    """Finds the modules of the surface, and the distribution they belong to."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != ROOT:
            return None
        program, _, leaf = name.rpartition(".")
        if leaf == "__main__" and program in modules():  # python -m PROGRAM
            return ModuleSpec(name, _ProgramLoader(), origin=__file__)
        return _spec(name) if name in modules() else None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[Distribution]:
        wanted = context.name
        return [_StubDistribution()] if wanted is None or wanted.lower() == ROOT else []

    def invalidate_caches(self) -> None:
        """Do nothing: there are no caches."""


class _StubDistribution(Distribution):
    """The metadata of a distribution called deepspeed, for `importlib.metadata`."""

    _TEXTS = {  # noqa: RUF012 - never written to
        "METADATA": f"Metadata-Version: 2.1\nName: {ROOT}\nVersion: {VERSION}\n"
        f"Summary: Hadal {__version__} under the name of DeepSpeed\n",
        "top_level.txt": f"{ROOT}\n",
    }

    def read_text(self, filename: str) -> str | None:
        return self._TEXTS.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return Path(__file__).parent / path


# ---- programs: `python -m deepspeed....` ---------------------------------------------------------


_HOMES = {
    "deepspeed.checkpoint.ds_to_universal": "hadal.cli.deepspeed:ds_to_universal",
    "deepspeed.utils.zero_to_fp32": "hadal.cli.deepspeed:zero_to_fp32",
    "deepspeed.utils.zero_to_torch": "hadal.cli.deepspeed:zero_to_torch",
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
