"""Write `hadal/compat/surface.json`: the names in installed copies of DeepSpeed.

    python tests/compat/write_surface.py FOLDER [FOLDER ...]

A folder holds the package `deepspeed` of one release; the newest comes first, and older ones add
the names that it lost. The files are parsed, never imported, so the result depends on no machine:
functions, classes, values and constants by module, and which names a module has from another one.
`tests/data/deepspeed_names.txt` adds the names that programs use although no file shows them, and
those with a leading underscore.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

ROOT = "deepspeed"
TESTS = Path(__file__).parents[1]
OUTPUT = TESTS.parent / "hadal" / "compat" / "surface.json"
_SECOND_NAMES = {
    "deepspeed.checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.zero": "deepspeed.runtime.zero",
}
"""Second names of modules, from which programs import."""
_INFERENCE = (
    "deepspeed.inference.v2.",
    "deepspeed.model_implementations.",
    "deepspeed.module_inject.containers.",
    "deepspeed.ops.transformer.inference.",
)
_OF_THE_BUILD = "deepspeed.git_version_info_installed"
"""A module that a build writes: its values are those of one machine."""
_LETTERS = {"f": "function", "c": "class", "a": "value"}
_KINDS = {"function": "functions", "class": "classes", "value": "values"}
_DEEPEST = 20  # imports between a name and its definition; modules may import each other
_OBJECTS = {
    "engine": ["engine", "pipe/engine"],
    "optimizer": [
        *("zero/stage_1_and_2", "zero/stage3"),
        *("bf16_optimizer", "fp16/fused_optimizer", "fp16/unfused_optimizer"),
    ],
}
"""The modules of DeepSpeed's runtime with the class of each object that `initialize` returns."""
Found = dict[str, Any]
"""The kind of each name of a module; for constants `("constant", value)`, for imports `("from",
module, name)`."""


class _Release:
    """The modules of one release, parsed."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, Path] = {}
        for path in sorted((folder / ROOT).rglob("*.py")):
            parts = list(path.relative_to(folder).with_suffix("").parts)
            if all(part.isidentifier() for part in parts) and "csrc" not in parts:
                self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._known: dict[str, Found] = {}

    def names(self, module: str) -> Found:
        """Return the names of a module; those of `import *` included."""
        if module not in self._known:
            self._known[module] = found = {}
            path = self.files[module]
            package = module if path.stem == "__init__" else module.rpartition(".")[0]
            body = ast.parse(path.read_text("utf-8")).body
            for statement in _top_level(body):
                self._read(statement, package, found)
            for name in _depends_on_the_machine(body):
                if found[name] in (("constant", True), ("constant", False), ("constant", None)):
                    found[name] = ("value",)
        return self._known[module]

    def _read(self, statement: ast.stmt, package: str, found: Found) -> None:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found[statement.name] = ("function",)
            case ast.ClassDef():
                found[statement.name] = ("class",)
            case ast.ImportFrom():
                self._read_import(statement, package, found)
            case ast.Import():
                for each in statement.names:
                    if each.asname and each.name in self.files:
                        parent, _, leaf = each.name.rpartition(".")
                        found[each.asname] = ("from", parent, leaf)
            case ast.Assign(targets=targets, value=value):
                pairs = [pair for target in targets for pair in _pairs(target, value)]
                found |= {name: self._value(one, found) for name, one in pairs}
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = self._value(value, found)

    def _read_import(self, statement: ast.ImportFrom, package: str, found: Found) -> None:
        source = statement.module or ""
        if statement.level:
            parent = package.split(".")[: len(package.split(".")) - statement.level + 1]
            source = ".".join([*parent, *([source] if source else [])])
        if source.partition(".")[0] != ROOT:
            return
        for each in statement.names:
            if each.name != "*":
                found[each.asname or each.name] = ("from", source, each.name)
            elif source in self.files:
                for name in self.names(source):
                    if not name.startswith("_"):
                        one = found.get(name, ("nothing",))
                        found[name] = one if one[0] == "from" else ("from", source, name)

    def _value(self, value: ast.expr, found: Found) -> tuple[Any, ...]:
        if isinstance(value, ast.Name) and value.id in found:
            return found[value.id]  # type: ignore[no-any-return]
        plain = {
            name: one[1]
            for name in {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
            if (one := self.origin(found.get(name)))[0] == "constant"
        }
        if any(isinstance(node, ast.Call | ast.Attribute) for node in ast.walk(value)):
            return ("value",)
        try:
            computed = eval(compile(ast.Expression(value), "", "eval"), {"__builtins__": {}}, plain)
            return ("constant", computed) if _is_plain(computed) else ("value",)
        except (NameError, TypeError, KeyError):
            return ("value",)

    def origin(self, one: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """Follow imports to the definition; `("nothing",)` if there is none."""
        for _ in range(_DEEPEST):
            if one is None or one[0] != "from" or f"{one[1]}.{one[2]}" in self.files:
                return one or ("nothing",)
            one = self.names(one[1]).get(one[2]) if one[1] in self.files else None
        return ("nothing",)

    def home(self, module: str, name: str) -> tuple[str, str]:
        """Return the module that defines a name, and its name there."""
        one = self.names(module)[name]
        while one is not None and one[0] == "from":
            module, name = one[1], one[2]
            is_module = f"{module}.{name}" in self.files or module not in self.files
            one = None if is_module else self.names(module).get(name)
        return module, name


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Return each name of an assignment with its value; of `a, b = f()` both with the call."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        for each, one in zip(target.elts, values, strict=True):
            yield from _pairs(each, one)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, str):
        return "\n" not in value
    return value is None or isinstance(value, int | float)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements of a module, and those inside its `if`, `try` and `with`.

    What follows if an import fails comes before what the import brings, which replaces it.
    """
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)
            yield from _top_level(getattr(statement, "orelse", []))
            yield from _top_level(statement.body)


def _depends_on_the_machine(body: list[ast.stmt]) -> set[str]:
    """Return the names that are assigned inside `if` and `try`: is a package installed, ..."""
    inside = [one for one in body if isinstance(one, ast.If | ast.Try)]
    assigned = [one for one in _top_level(inside) if isinstance(one, ast.Assign)]
    targets = [(target, one.value) for one in assigned for target in one.targets]
    return {name for pair in targets for name, _ in _pairs(*pair)}


def surface(folders: list[Path], listed: dict[str, str]) -> dict[str, Any]:
    """Return the table of all names of these releases; the first release wins."""
    table: dict[str, dict[str, Any]] = {}
    for release in map(_Release, folders):
        for module in filter(lambda name: _is_used(name, listed), release.files):
            entry = table.setdefault(module, {})
            for name in release.names(module):
                is_known = name in entry or f"{module}.{name}" in release.files
                is_hidden = name.startswith("_") and f"{module}.{name}" not in listed
                found = None if is_known or is_hidden else _entry(release, module, name)
                if found is not None:
                    entry[name] = found
    _add_listed(table, listed)
    for module, entry in table.items():
        table[module] = {name: _within(table, one) for name, one in entry.items()}
    written = {module: _written(entry, table.keys()) for module, entry in table.items()}
    written |= {second: {"is": first} for second, first in _SECOND_NAMES.items()}
    return dict(sorted(written.items()))


def _within(table: dict[str, Any], one: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a name is; one from a module that the table lacks is as if defined here."""
    is_lost = one[0] == "same" and one[1] not in table
    return one[3:] if is_lost and one[3] != "from" else one


def _is_used(module: str, listed: dict[str, str]) -> bool:
    """Return False for the modules of inference that no program imports from."""
    return not module.startswith(_INFERENCE) or any(name.startswith(module) for name in listed)


def _add_listed(table: dict[str, dict[str, Any]], listed: dict[str, str]) -> None:
    """Add the names that programs use and no file shows, such as those made when it is imported."""
    for full, letter in listed.items():
        module, _, name = full.rpartition(".")
        if letter in _LETTERS and module in table and full not in table:
            table[module].setdefault(name, (_LETTERS[letter],))


def _entry(release: _Release, module: str, name: str) -> tuple[Any, ...] | None:
    one = release.names(module)[name]
    kind = ("value",) if module == _OF_THE_BUILD else release.origin(one)
    if kind[0] == "nothing":
        return None
    home = release.home(module, name)
    return kind if home == (module, name) else ("same", *home, *kind)


def _written(entry: dict[str, tuple[Any, ...]], known: Collection[str]) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for name, one in sorted(entry.items()):
        if one[0] == "constant":
            written.setdefault("constants", {})[name] = one[1]
        elif one[0] == "same" and (one[3] != "from" or f"{one[1]}.{one[2]}" in known):
            there = name if one[2] == name else f"{name}={one[2]}"
            written.setdefault("same", {}).setdefault(one[1], []).append(there)
        elif one[0] in _KINDS:
            written.setdefault(_KINDS[one[0]], []).append(name)
    for key in _KINDS.values():
        if key in written:
            written[key] = " ".join(written[key])
    if "same" in written:
        written["same"] = {room: " ".join(names) for room, names in sorted(written["same"].items())}
    return {key: written[key] for key in (*_KINDS.values(), "constants", "same") if key in written}


def text(folders: list[Path]) -> str:
    """Return the file's text: one module a line."""
    listed = (TESTS / "data" / "deepspeed_names.txt").read_text().splitlines()
    words = [line.split() for line in listed if line and not line.startswith("#")]
    rows = surface(folders, {name: letter for name, letter, _ in words}).items()
    lines = [f"  {json.dumps(module)}: {json.dumps(entry)}" for module, entry in rows]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def attributes(folder: Path) -> dict[str, set[str]]:
    """Return the public attributes that DeepSpeed's engines and optimizers assign to themselves."""
    found: dict[str, set[str]] = {}
    for thing, files in _OBJECTS.items():
        paths = [folder / ROOT / "runtime" / f"{file}.py" for file in files]
        classes = [one for path in paths for one in ast.parse(path.read_text("utf-8")).body]
        found[thing] = {
            node.attr
            for one in classes
            if isinstance(one, ast.ClassDef) and one.name.endswith(("Engine", "Optimizer", "3"))
            for node in ast.walk(one)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if ast.unparse(node) == f"self.{node.attr.lstrip('_')}"
        }
    return found


if __name__ == "__main__":
    OUTPUT.write_text(text([Path(folder) for folder in sys.argv[1:]]), "utf-8")
