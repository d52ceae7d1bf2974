"""Reading of the user's configuration (a dict, a path, JSON text or its base64) into a dict."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hadal.config.relaxed_json import DuplicateKeys, described, parse
from hadal.config.report import written
from hadal.errors import ConfigError, Fault

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
        raise ConfigError(*_duplicates(text.name, error)) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{text.name}, {described(error, text.content)}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(
            f"{text.name} cannot be read: it is nested too deeply or contains too long a number"
            f" ({error})"
        ) from error


def _duplicates(name: str, error: DuplicateKeys) -> tuple[str, tuple[Fault, ...]]:
    faults = tuple(Fault(path, "given twice in one object; keep one") for path in error.paths)
    return written(name, faults), faults
