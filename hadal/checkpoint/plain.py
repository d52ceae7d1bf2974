"""State as JSON and back, without code or loss: that of a schedule, a loader or the caller.

JSON has lists, text keys and finite numbers only. Any other value becomes an object with one key
that names its kind: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"float": "inf"}`.
Tensors and arrays are stored beside the JSON and referred to by name: `{"tensor": name}`,
`{"array": name}`.

Decoding imports no module and calls no code that a checkpoint names. A member of an Enum refers to
its class by name: it is looked up among the modules that the program has imported already. If it is
not there, the member comes back as its value.
"""

from __future__ import annotations

import logging
import math
import sys
from argparse import Namespace
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hadal.checkpoint.shards import DTYPE_OF, DTYPES
from hadal.device import read_on_host
from hadal.errors import CheckpointError

_log = logging.getLogger(__name__)
# numpy's kinds of scalars: numbers, text, bytes and times; not objects or records.
_SCALARS = "biufcSUmM"
_SAVABLE = (
    "numbers, text, bytes, paths, dates, enums, dtypes, devices, and lists, tuples, sets, dicts and"
    " namespaces of them"
)
_Tensors = MutableMapping[str, Tensor] | None
"""Takes tensors and arrays; None: they are refused."""


class _Leaf(NamedTuple):
    """A type of single values, and the two directions of them."""

    of: type | tuple[type, ...]
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]


class _Container(NamedTuple):
    """A type of collections, which come back as `of` a list, or of a dict."""

    of: type
    make: Callable[[Any], Any]
    is_mapping: bool = False


def encoded(value: Any, where: str, tensors: _Tensors = None) -> Any:
    """Encode plain values, and collections of them; `decoded` reverses it.

    Types are kept; subclasses of them come back as the class that they extend. If `tensors` is
    given, tensors and arrays are put into it; otherwise a tensor of one element becomes its number.

    Raises:
        CheckpointError: anything else; the message gives `where` and the position in it.
    """
    try:
        return _encoded(value, where, tensors)
    except RecursionError:
        raise CheckpointError(
            f"{where} is nested too deep for a checkpoint, or contains itself"
        ) from None


def encoded_known(
    values: Mapping[str, Any], where: str, tell: Callable[[CheckpointError], object]
) -> Any:
    """Encode what a checkpoint can hold of a mapping; `tell` gets the error of anything else."""
    kept = {}
    for key, value in values.items():
        try:
            encoded(value, key)
        except CheckpointError as error:
            tell(error)
        else:
            kept[key] = value
    return encoded(kept, where)


def encoded_state(value: Any, where: str) -> Any:
    """Encode as `encoded`, but a 0-dim tensor keeps its dtype; `decoded_state` reverses it."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in DTYPES:
        number = read_on_host(value, "what is to be saved").item()
        return {"scalar": [DTYPES[value.dtype], encoded(number, where)]}
    return encoded(value, where)


def decoded_state(value: Any) -> Any:
    """Return the value given to `encoded_state`; tensors are on the host.

    Raises:
        ValueError, TypeError, KeyError: `encoded_state` did not produce it.
    """
    if isinstance(value, dict) and "scalar" in value:
        name, number = value["scalar"]
        return torch.tensor(decoded(number), dtype=DTYPE_OF[name])
    return decoded(value)


# ---- encoding ------------------------------------------------------------------------------------


def _encoded(value: Any, where: str, tensors: _Tensors) -> Any:
    if isinstance(value, Tensor) and tensors is None and value.numel() == 1:
        value = value.item()
    for kind, leaf in _LEAVES.items():
        if isinstance(value, leaf.of):
            return {kind: leaf.to_json(value)}
    if value is None or isinstance(value, (int, float, str)):
        if not isinstance(value, float) or math.isfinite(value):
            return value
        return {"float": str(float(value))}
    for kind, container in _CONTAINERS.items():
        if isinstance(value, container.of):
            return {kind: _items(value, where, tensors, container)}
    if isinstance(value, list):
        return [_encoded(item, f"{where}[{n}]", tensors) for n, item in enumerate(value)]
    if tensors is not None and isinstance(value, (Tensor, np.ndarray)):
        return _set_aside(value, where, tensors)
    module, name = type(value).__module__, type(value).__qualname__
    raise CheckpointError(
        f"{where} is of type {name if module == 'builtins' else f'{module}.{name}'}, which a"
        f" checkpoint cannot hold; use {_SAVABLE}"
        f"{'' if tensors is None else ', tensors or arrays of numbers'}"
        f"{' (its state_dict(), for example)' if hasattr(value, 'state_dict') else ''}"
    )


def _items(value: Any, where: str, tensors: _Tensors, container: _Container) -> list[Any]:
    """Return a collection's items, or its pairs; keys and sets hold no tensors."""
    if container.is_mapping:
        is_namespace = isinstance(value, Namespace)
        return [
            [
                _encoded(key, f"the key {key!r} of {where}", None),
                _encoded(item, f"{where}.{key}" if is_namespace else f"{where}[{key!r}]", tensors),
            ]
            for key, item in (vars(value) if is_namespace else value).items()
        ]
    if isinstance(value, tuple):
        return [_encoded(item, f"{where}[{n}]", tensors) for n, item in enumerate(value)]
    return [_encoded(item, f"{where}{{{item!r}}}", None) for item in value]


def _set_aside(
    value: Tensor | np.ndarray[Any, Any], where: str, tensors: MutableMapping[str, Tensor]
) -> dict[str, str]:
    kind = "tensor"
    if isinstance(value, np.ndarray):
        kind = "array"
        try:
            if isinstance(value, np.ma.MaskedArray):
                raise TypeError("a mask")
            value = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where} is an array of {value.dtype}, which a checkpoint cannot hold; use an"
                " array of numbers in this machine's byte order, without a mask"
            ) from error
    plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    if not plain or value.dtype not in DTYPES or value.device.type == "meta":
        raise CheckpointError(
            f"{where} is a {type(value).__name__} of {value.dtype}, {value.layout}, on"
            f" {value.device}, which a checkpoint cannot hold; use a dense tensor of numbers"
        )
    return {kind: _put(value.detach().resolve_conj().resolve_neg(), tensors)}


def _put(value: Tensor, tensors: MutableMapping[str, Tensor]) -> str:
    name = f"plain.{len(tensors)}"
    tensors[name] = value
    return name


# ---- decoding ------------------------------------------------------------------------------------


def decoded(value: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return the value given to `encoded`; tensors are copies on the host.

    Raises:
        ValueError, TypeError, KeyError: `encoded` did not produce it.
    """
    if isinstance(value, list):
        return [decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _LEAVES:
        return _LEAVES[kind].from_json(content)
    if kind in _CONTAINERS:
        container = _CONTAINERS[kind]
        if container.is_mapping:
            return container.make({decoded(key): decoded(one, tensors) for key, one in content})
        return container.make(decoded(item, tensors) for item in content)
    if kind == "float":
        return float(content)
    stored: Mapping[str, Tensor] = {} if tensors is None else tensors
    return _STORED[kind](stored[content])


def _member_as_json(value: Enum) -> list[Any]:
    of = type(value)
    return [of.__module__, of.__qualname__, value.name, _encoded(value.value, str(value), None)]


def _member(module: str, name: str, member: str, value: Any) -> Any:
    """Return the member of an Enum of a module that is imported already; nothing is called."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    is_enum = isinstance(found, type) and issubclass(found, Enum)
    if is_enum and found.__module__ == module and member in found.__members__:
        return found.__members__[member]
    value = decoded(value)
    _log.warning("the member %s of %s.%s is loaded as its value %r", member, module, name, value)
    return value


def _text_of(value: bytes) -> str:
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
    return np.frombuffer(text, of).astype(of.newbyteorder("="))[0] if of.itemsize else of.type()


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
    # First: a member may be a number or text as well.
    "enum": _Leaf(Enum, _member_as_json, lambda content: _member(*content)),
    "numpy": _Leaf(
        (np.bool_, np.number, np.character, np.datetime64), _scalar_as_json, _scalar_from
    ),
    "bytes": _Leaf(bytes, _text_of, _bytes_from),
    "bytesio": _Leaf(BytesIO, lambda v: _text_of(v.getvalue()), lambda t: BytesIO(_bytes_from(t))),
    "path": _Leaf(PurePath, str, Path),
    "datetime": _Leaf(datetime, datetime.isoformat, datetime.fromisoformat),
    "time": _Leaf(time, time.isoformat, time.fromisoformat),
    "date": _Leaf(date, date.isoformat, date.fromisoformat),
    "timedelta": _Leaf(
        timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda c: timedelta(*c)
    ),
    "dtype": _Leaf(torch.dtype, lambda v: str(v).removeprefix("torch."), _dtype_from),
    "device": _Leaf(torch.device, str, _device_from),
}
_CONTAINERS = {
    "tuple": _Container(tuple, tuple),
    "set": _Container(set, set),
    "frozenset": _Container(frozenset, frozenset),
    "counter": _Container(Counter, Counter, is_mapping=True),
    "ordered": _Container(OrderedDict, OrderedDict, is_mapping=True),
    "dict": _Container(Mapping, dict, is_mapping=True),
    "namespace": _Container(Namespace, lambda items: Namespace(**items), is_mapping=True),
}
_STORED: Mapping[str, Callable[[Tensor], Any]] = {
    "tensor": Tensor.clone,
    "array": lambda value: value.clone().numpy(),
}
