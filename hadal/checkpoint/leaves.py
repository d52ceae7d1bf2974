"""Single values that JSON lacks, as an object of one key and back: bytes, paths, dates, dtypes."""

from __future__ import annotations

import pathlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import torch

# numpy's kinds of scalars: numbers, text, bytes and times; not objects or records.
_SCALARS = "biufcSUmM"


class _Leaf(NamedTuple):
    """A type, and the two directions of its values."""

    of: type | None
    """The exact type; None: `leaf_of` recognizes it otherwise."""
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]


def leaf_of(value: Any) -> dict[str, Any] | None:
    """Return an object that `leaf_from` turns into an equal value of the same type.

    None if the value is of no such type.
    """
    kind = _NAMES.get(type(value))
    if isinstance(value, np.generic):
        kind = "numpy" if value.dtype.kind in _SCALARS else None
    elif isinstance(value, pathlib.PurePath):
        kind = "path"
    return None if kind is None else {kind: _LEAVES[kind].to_json(value)}


def leaf_from(kind: str, content: Any) -> Any:
    """Return the value of an object that `leaf_of` has made, given its key and content.

    Raises:
        ValueError, TypeError, KeyError: `leaf_of` did not make it.
    """
    if kind not in _LEAVES:
        raise ValueError(f"unknown kind of value {kind!r}")
    return _LEAVES[kind].from_json(content)


# ---- bytes, and numpy's scalars ------------------------------------------------------------------


def _text_of(value: bytes | bytearray) -> str:
    return b64encode(value).decode()


def _bytes_from(text: str) -> bytes:
    return b64decode(text, validate=True)


def _scalar_as_json(value: np.generic) -> list[str]:
    native = value.dtype.newbyteorder("<")
    return [native.str, _text_of(np.asarray(value).astype(native).tobytes())]


def _scalar_from(content: list[str]) -> Any:
    of, text = np.dtype(content[0]), _bytes_from(content[1])
    if of.kind not in _SCALARS:
        raise ValueError(f"numpy's {of} is not a scalar of a checkpoint")
    if not of.itemsize:
        return of.type()
    native = of.newbyteorder("=")
    return np.frombuffer(text, of).astype(native)[0]


# ---- places and times ----------------------------------------------------------------------------


def _path_from(content: list[str]) -> pathlib.PurePath:
    kind, text = content
    if not kind.startswith("Pure"):
        here = pathlib.Path(text)
        if type(here).__name__ == kind:
            return here
    # A path of the other system cannot be used here, but still be looked at.
    is_windows = kind.endswith("WindowsPath")
    return pathlib.PureWindowsPath(text) if is_windows else pathlib.PurePosixPath(text)


def _path_as_json(value: pathlib.PurePath) -> list[str]:
    is_concrete = isinstance(value, pathlib.Path)
    is_windows = isinstance(value, pathlib.PureWindowsPath)
    return [
        f"{'' if is_concrete else 'Pure'}{'Windows' if is_windows else 'Posix'}Path",
        str(value),
    ]


def _moment_as_json(value: datetime | time) -> list[Any]:
    """Return the clock's text, its fold, and its zone: a name, an offset or None."""
    return [value.replace(tzinfo=None).isoformat(), value.fold, _zone_as_json(value)]


def _zone_as_json(value: datetime | time) -> Any:
    zone, offset = value.tzinfo, value.utcoffset()
    if isinstance(zone, ZoneInfo) and zone.key is not None:
        return [zone.key, _delta_as_json(offset)]
    return None if offset is None else [None, _delta_as_json(offset)]


def _zone_from(content: Any) -> tzinfo | None:
    if content is None:
        return None
    name, offset = content
    if name is not None:
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            pass  # not a zone of this system: its offset then
    return None if offset is None else timezone(_delta_from(offset))


def _moment_from(of: Any, content: list[Any]) -> Any:
    text, fold, zone = content
    return of.fromisoformat(text).replace(fold=fold, tzinfo=_zone_from(zone))


def _delta_as_json(value: timedelta | None) -> Any:
    return None if value is None else [value.days, value.seconds, value.microseconds]


def _delta_from(content: list[int]) -> timedelta:
    return timedelta(*content)


# ---- torch's words, and exact numbers ------------------------------------------------------------


def _dtype_from(name: str) -> torch.dtype | str:
    """Return a dtype, or its name if this torch lacks it."""
    found = getattr(torch, name, name)
    return found if isinstance(found, torch.dtype) else name


def _device_from(name: str) -> torch.device | str:
    """Return a device, or its name if this torch does not know such devices."""
    try:
        return torch.device(name)
    except RuntimeError:
        return name


_LEAVES = {
    "bytes": _Leaf(bytes, _text_of, _bytes_from),
    "bytearray": _Leaf(bytearray, _text_of, lambda text: bytearray(_bytes_from(text))),
    "bytesio": _Leaf(
        BytesIO, lambda value: _text_of(value.getvalue()), lambda text: BytesIO(_bytes_from(text))
    ),
    "numpy": _Leaf(None, _scalar_as_json, _scalar_from),
    "path": _Leaf(None, _path_as_json, _path_from),
    "datetime": _Leaf(datetime, _moment_as_json, partial(_moment_from, datetime)),
    "time": _Leaf(time, _moment_as_json, partial(_moment_from, time)),
    "date": _Leaf(date, date.isoformat, date.fromisoformat),
    "timedelta": _Leaf(timedelta, _delta_as_json, _delta_from),
    "dtype": _Leaf(torch.dtype, lambda value: str(value).removeprefix("torch."), _dtype_from),
    "device": _Leaf(torch.device, str, _device_from),
    "decimal": _Leaf(Decimal, str, Decimal),
    "fraction": _Leaf(Fraction, str, Fraction),
    "uuid": _Leaf(UUID, str, UUID),
    "range": _Leaf(
        range, lambda value: [value.start, value.stop, value.step], lambda content: range(*content)
    ),
}
_NAMES = {leaf.of: kind for kind, leaf in _LEAVES.items() if leaf.of is not None}
