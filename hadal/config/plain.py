"""Values as plain JSON and in messages, and the values that a key accepts in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BeforeValidator, StringConstraints
from pydantic.fields import FieldInfo

from hadal.config.section import Section
from hadal.config.values import Spelled, lowered, titled


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


_SIGNS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "null",
    dict: "an object",
}


def expected(field: FieldInfo) -> str:
    """Describe the values that a key accepts: "0, 1, 2 or 3", "an integer >= 1"."""
    return _kind(field.annotation, tuple(field.metadata))


def _kind(annotation: Any, limits: tuple[Any, ...] = ()) -> str:
    return either(list(_choices(annotation, limits)))


def _choices(annotation: Any, limits: tuple[Any, ...]) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        yield from _choices(inner, (*more, *limits))
    elif origin in (Union, UnionType):
        for member in _null_last(annotation):
            yield from _choices(member, limits)
    elif origin is Literal:
        yield from (json.dumps(value) for value in get_args(annotation))
    else:
        yield _single(annotation, origin, limits)


def _single(annotation: Any, origin: Any, limits: tuple[Any, ...]) -> str:
    if origin is tuple:
        return _several(get_args(annotation))
    if origin is dict:
        return "an object"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "an object"
    return _WORDS.get(annotation, "anything") + _limits(annotation, limits)


def _null_last(annotation: Any) -> list[Any]:
    """Return a union's members, null last."""
    members = [member for member in get_args(annotation) if member is not type(None)]
    return members + [type(None)] * (len(members) < len(get_args(annotation)))


def _several(arguments: tuple[Any, ...]) -> str:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return f"a list, each {_kind(arguments[0])}"
    return f"a list of {len(arguments)}, each {_kind(arguments[0])}"


def _limits(annotation: Any, limits: tuple[Any, ...]) -> str:
    if annotation not in (int, float, str):
        return ""
    said = [
        f"{sign} {getattr(limit, name)}"
        for kind, name, sign in _SIGNS
        for limit in limits
        if isinstance(limit, kind)
    ]
    if any(isinstance(limit, MinLen) for limit in limits):
        said.append("that is not empty")
    if any(isinstance(limit, StringConstraints) for limit in limits):
        said.append("of 32 to 50 letters and digits")
    return " " + " and ".join(said) if said else ""


def either(choices: list[str]) -> str:
    """Join choices as in a sentence: "a, b or c"."""
    choices = list(dict.fromkeys(choices))
    if len(choices) == 1:
        return choices[0]
    return ", ".join(choices[:-1]) + " or " + choices[-1]


def spellings(field: FieldInfo) -> list[str]:
    """Return other accepted spellings of a key's words: other cases, and synonyms."""
    words = [json.loads(word) for word in _choices(field.annotation, ()) if word[0] == '"']
    others: list[str] = []
    for convert in _conversions(field.annotation, tuple(field.metadata)):
        if convert in (lowered, titled):
            others += [case for word in words for case in (word.lower(), word.upper())]
            others += [word.capitalize() for word in words]
        elif isinstance(convert, Spelled):
            others += convert.names
    return [word for word in dict.fromkeys(others) if word not in words]


def _conversions(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[Any]:
    yield from (one.func for one in metadata if isinstance(one, BeforeValidator))
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from _conversions(inner, tuple(more))
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _conversions(member, ())
