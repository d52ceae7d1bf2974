"""Reading of the user's configuration (a dict, a path, JSON text or its base64) into a dict."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hadal.errors import ConfigError, Fault, written

_TOKENS = re.compile(
    r"""
    (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<comment>\#[^\n]*|//[^\n]*|/\*.*?\*/)
  | (?P<comma>,)
  | (?P<space>\s+)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_EXPECTED = "JSON with comments and trailing commas is expected"
_YAML = 'this looks like YAML, but JSON is expected: {"train_batch_size": 8}'
_YAML_KEY = re.compile(r"---|[\w.-]+:(\s|$)")
_MISTAKES = (
    (re.compile("'"), "JSON has double quotes"),
    (re.compile(r"(True|False|None)\b"), "JSON has true, false and null"),
    (re.compile(r"[A-Za-z_]\w*\s*:"), "JSON has keys in double quotes"),
)
"""Mistakes that look like the text at an error, and the remedy of each."""
_EXCERPT = 60


class DuplicateKeys(ValueError):
    """An object contains a key twice, so its value is ambiguous."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__(f"given twice: {', '.join(paths)}")
        self.paths = paths


def parse(text: str) -> Any:
    """Parse relaxed JSON."""
    value = json.loads(strict(text), object_pairs_hook=_Object)
    duplicates = tuple(_duplicates(value, ""))
    if duplicates:
        raise DuplicateKeys(duplicates)
    return value


class _Object(dict[str, Any]):
    """A JSON object that records which of its keys were given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs)
        self.twice = [name for name, count in counts.items() if count > 1]


def _duplicates(value: Any, path: str) -> Iterator[str]:
    """Find keys given twice; an object's path is known only from the whole document."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _duplicates(inner, f"{path}[{index}]")
    if isinstance(value, _Object):
        prefix = f"{path}." if path else ""
        yield from (prefix + name for name in value.twice)
        for name, inner in value.items():
            yield from _duplicates(inner, prefix + name)


def described(error: json.JSONDecodeError, text: str) -> str:
    """Return an error of `parse`, what it probably means, and its place in the text."""
    blanked, column = error.doc, error.colno - 1
    guesses = (advice for looks, advice in _MISTAKES if looks.match(blanked, error.pos))
    advice = next(guesses, _EXPECTED)
    if not blanked[: error.pos].strip() and _YAML_KEY.match(blanked, error.pos):
        advice = _YAML
    line = re.sub(r"\s", " ", text.split("\n")[error.lineno - 1])
    start = max(0, min(column - _EXCERPT // 2, len(line) - _EXCERPT))
    place = (
        f"\n  {line[start : start + _EXCERPT]}\n  {' ' * (column - start)}^" if line.strip() else ""
    )
    return f"line {error.lineno}, column {error.colno}: {error.msg}; {advice}{place}"


def strict(text: str) -> str:
    """Blank out comments and trailing commas; lines and columns of the rest do not change."""
    parts: list[str] = []
    comma: int | None = None  # the position of a comma that may turn out to be trailing
    for match in _TOKENS.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind == "comment":
            token = re.sub(r"[^\n]", " ", token)
        elif kind == "comma":
            comma = len(parts)
        elif kind != "space":
            if token in ("}", "]") and comma is not None:
                parts[comma] = " "
            comma = None
        parts.append(token)
    return "".join(parts)


Source = Mapping[str, Any] | str | os.PathLike[str]
_THE_DICT = "the configuration"


class Text(NamedTuple):
    """A configuration as JSON text, and its name in messages."""

    name: str
    content: str


def read(source: Source) -> tuple[str, dict[str, Any]]:
    """Return a name for messages, and a dict that the caller no longer shares."""
    if isinstance(source, Mapping):
        return _THE_DICT, _copied(source)
    if not isinstance(source, str | os.PathLike):
        kind = type(source).__name__
        raise ConfigError(
            f"the configuration is of type {kind}; pass a dict, a path, JSON text or its base64"
        )
    text = _text(source)
    value = _parsed(text)
    if not isinstance(value, dict):
        raise ConfigError(f"{text.name} contains a {type(value).__name__}; expected a JSON object")
    return text.name, _copied(value)


def _copied(source: Mapping[str, Any]) -> dict[str, Any]:
    """Copy containers, so that the caller's stay unchanged; share their contents."""

    def copied(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: copied(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [copied(inner) for inner in value]
        return copy.copy(value) if isinstance(value, set) else value

    try:
        result: dict[str, Any] = copied(source)
    except RecursionError:
        raise ConfigError(
            "the configuration is nested too deeply or contains itself; pass plain dicts"
        ) from None
    return result


def _text(source: str | os.PathLike[str]) -> Text:
    if _is_file(source):
        return _file_text(Path(source))
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return Text("the JSON text", source)
    if isinstance(source, str):
        decoded = _decoded(source)
        if decoded is not None:
            return Text("the base64 configuration", decoded)
    shown = str(source) if len(str(source)) <= 80 else str(source)[:77] + "..."
    if shown and len(shown) <= 80 and Path(shown).is_dir():
        raise ConfigError(f'"{shown}" is a directory; pass the JSON file in it')
    raise ConfigError(
        f'"{shown}" is neither an existing file nor base64 of a JSON object; '
        f"check the path (relative to {Path.cwd()}) or pass a dict"
    )


def _file_text(path: Path) -> Text:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not content.strip():
        raise ConfigError(f"{path} is empty; expected a JSON object")
    return Text(path.name, content)


def _is_file(source: str | os.PathLike[str]) -> bool:
    try:
        return Path(source).is_file()
    except (OSError, ValueError):
        return False  # a long base64 text is no possible path


def _decoded(text: str) -> str | None:
    try:
        padded = text.strip() + "=" * (-len(text.strip()) % 4)
        decoded = base64.urlsafe_b64decode(padded).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip()[:1] in ("{", "#", "/") else None


def _parsed(text: Text) -> Any:
    try:
        return parse(text.content)
    except DuplicateKeys as error:
        faults = tuple(Fault(path, "given twice in one object; keep one") for path in error.paths)
        raise ConfigError(written(text.name, faults), faults) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{text.name}, {described(error, text.content)}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(
            f"{text.name} cannot be read: it is nested too deeply or contains too long a number"
            f" ({error})"
        ) from error
