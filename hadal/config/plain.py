"""Configuration values as plain JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hadal.config.section import Section


def plain(value: Any) -> Any:
    """Return a value as JSON would store it; objects that JSON cannot store become strings."""
    if isinstance(value, Section):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields} | {
            name: plain(extra) for name, extra in (value.model_extra or {}).items()
        }
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values that are not objects (or are empty ones) with their JSON paths."""
    for name, inner in value.items():
        here = f"{path}.{name}" if path else name
        if isinstance(inner, Mapping) and inner:
            yield from leaves(inner, here)
        else:
            yield here, inner


def shown(value: Any) -> str:
    """Format a value as JSON does, for messages; long values are shortened."""
    text = json.dumps(plain(value), ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def found(value: Any) -> str:
    """Format the value found, with its type if that may be the fault."""
    kinds = {str: "a string", bool: "a boolean", list: "a list", dict: "an object"}
    kind = kinds.get(type(value))
    return f"{shown(value)} ({kind})" if kind else shown(value)
