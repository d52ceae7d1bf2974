"""JSON as people write it: with comments and trailing commas, but without duplicate keys."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

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
"""What may be found in the place of an error, and the remedy."""
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
