"""State as JSON and back, without code or loss: that of a schedule, a loader or the caller.

JSON has lists, text keys and finite numbers only. Any other value becomes an object with one key
that names its kind: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"path": [...]}`,
`{"float": "inf"}`. Tensors, arrays and long bytes are stored beside the JSON and referred to by
name: `{"tensor": name}`, `{"array": name}`.

Decoding imports no module and calls no code that a checkpoint names. A member of an Enum and a
dataclass refer to their class by name: it is looked up among the modules that the program has
imported already, and a dataclass gets its attributes without a call of its `__init__`. If the class
is not there, a member comes back as its value and a dataclass as a `Namespace`.
"""

from __future__ import annotations

import logging
import math
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum, Flag
from inspect import getattr_static
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from hadal.checkpoint.leaves import leaf_from, leaf_of
from hadal.checkpoint.shards import DTYPE_OF, DTYPES
from hadal.errors import CheckpointError

_log = logging.getLogger(__name__)

_WORDS = (bool, int, float, str, type(None))
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "counter": Counter,
    "ordered": OrderedDict,
    "dict": dict,
}
_NAMESPACES: dict[str, Callable[..., Any]] = {"namespace": Namespace, "simple": SimpleNamespace}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
}
# Longer bytes are stored outside the JSON, where they would take a third more space.
_LONG_NBYTES = 1 << 12
_SAVABLE = (
    "numbers, text, bytes, paths, dates, enums, dtypes, devices, and lists, tuples, sets, dicts,"
    " namespaces and dataclasses of them"
)


class _Place(NamedTuple):
    """The position of a value: its description for messages, and what may be stored there."""

    where: str
    tensors: MutableMapping[str, Tensor] | None = None
    """Takes tensors and arrays; None: they are refused."""
    is_hashed: bool = False
    """True inside keys and sets."""

    def at(self, step: str, *, is_hashed: bool = False) -> _Place:
        """Return the place of a value inside this one."""
        hashed = self.is_hashed or is_hashed
        return _Place(self.where + step, None if hashed else self.tensors, hashed)

    def key(self, key: Any) -> _Place:
        """Return the place of a key of the mapping here."""
        return _Place(f"the key {key!r} of {self.where}", None, True)


def encoded(value: Any, where: str, tensors: MutableMapping[str, Tensor] | None = None) -> Any:
    """Encode plain values, and collections of them; `decoded` reverses it.

    Types are kept exactly: numbers (numpy's too), text, bytes, paths, dates and times, dtypes,
    devices, members of Enums, and lists, tuples, sets, dicts, namespaces and dataclasses. Other
    subclasses of them come back as the class that they extend. If `tensors` is given, tensors and
    arrays are put into it; otherwise a tensor of one element becomes its number.

    Raises:
        CheckpointError: anything else; the message gives `where` and the position in it.
    """
    try:
        return _encoded(value, _Place(where, tensors))
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
        return {"scalar": [DTYPES[value.dtype], encoded(value.item(), where)]}
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


def _encoded(value: Any, place: _Place) -> Any:
    if isinstance(value, Enum):  # first: a member may be a number or text as well
        return {"enum": [*_class_of(value), value.name, _encoded(value.value, place.at(".value"))]}
    if place.tensors is not None and isinstance(value, bytes) and len(value) > _LONG_NBYTES:
        return {"long": _put(torch.frombuffer(bytearray(value), dtype=torch.uint8), place.tensors)}
    if (leaf := leaf_of(value)) is not None:
        return leaf
    if place.tensors is None and isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (*_WORDS, complex)):
        return _encoded_word(value)
    # Anything else in a key or a set could not be put there again: the value of an Enum, say.
    if isinstance(value, (tuple, frozenset)) or not place.is_hashed:
        found = _encoded_collection(value, place)
        if found is not None:
            return found
    if place.tensors is not None and isinstance(value, (Tensor, np.ndarray)):
        return _set_aside(value, place.where, place.tensors)
    raise CheckpointError(
        f"{place.where} is of type {_type_of(value)}, which a checkpoint cannot hold; use"
        f" {_SAVABLE}{'' if place.tensors is None else ', tensors or arrays of numbers'}"
        f"{' (its state_dict(), for example)' if hasattr(value, 'state_dict') else ''}"
    )


def _encoded_word(value: Any) -> Any:
    if isinstance(value, complex):
        return {"complex": [_encoded_word(value.real), _encoded_word(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    return value


def _encoded_collection(value: Any, place: _Place) -> Any:
    """Return a collection of values as JSON; None if `value` is not one."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _encoded_items(value, place)
    if isinstance(value, Mapping):
        kinds = (kind for kind, of in _MAPPINGS.items() if isinstance(value, of))
        return {next(kinds, "dict"): _pairs(value, place, lambda key: f"[{key!r}]")}
    if isinstance(value, (Namespace, SimpleNamespace)):
        kind = "namespace" if isinstance(value, Namespace) else "simple"
        return {kind: _pairs(vars(value), place, lambda key: f".{key}")}
    if is_dataclass(value) and not isinstance(value, type):
        attributes = _pairs(_attributes(value), place, lambda key: f".{key}")
        return {"dataclass": [*_class_of(value), attributes]}
    return None


def _encoded_items(value: Collection[Any], place: _Place) -> Any:
    if isinstance(value, (set, frozenset)):
        kind = "set" if isinstance(value, set) else "frozenset"
        return {kind: [_encoded(item, place.at(f"{{{item!r}}}", is_hashed=True)) for item in value]}
    items = [_encoded(item, place.at(f"[{number}]")) for number, item in enumerate(value)]
    if isinstance(value, deque):
        return {"deque": [value.maxlen, items]}
    if isinstance(value, list):
        return items
    return {"size" if isinstance(value, torch.Size) else "tuple": items}


def _pairs(values: Mapping[Any, Any], place: _Place, step: Callable[[Any], str]) -> list[Any]:
    return [
        [_encoded(key, place.key(key)), _encoded(item, place.at(step(key)))]
        for key, item in values.items()
    ]


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass: its fields, and others that were set."""
    of_fields = {
        one.name: getattr(value, one.name) for one in fields(value) if hasattr(value, one.name)
    }
    more = getattr(value, "__dict__", {})
    return {**of_fields, **{key: one for key, one in more.items() if not key.startswith("__")}}


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
    is_wide = value.dtype == torch.complex128  # safetensors has no name for it
    if not plain or not (is_wide or value.dtype in DTYPES) or value.device.type == "meta":
        raise CheckpointError(
            f"{where} is a {type(value).__name__} of {value.dtype}, {value.layout}, on"
            f" {value.device}, which a checkpoint cannot hold; use a dense tensor of numbers"
        )
    value = value.detach().resolve_conj().resolve_neg()
    if is_wide:
        return {f"complex {kind}": _put(torch.view_as_real(value), tensors)}
    return {kind: _put(value, tensors)}


def _put(value: Tensor, tensors: MutableMapping[str, Tensor]) -> str:
    name = f"plain.{len(tensors)}"
    tensors[name] = value
    return name


def _class_of(value: Any) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _type_of(value: Any) -> str:
    module, name = _class_of(value)
    return name if module == "builtins" else f"{module}.{name}"


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
    ((kind, items),) = value.items()
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](_decoded_pairs(items, tensors))
    if kind in _NAMESPACES:
        return _NAMESPACES[kind](**_decoded_pairs(items, tensors))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decoded(item, tensors) for item in items)
    if kind in _OTHERS:
        return _OTHERS[kind](items, {} if tensors is None else tensors)
    return leaf_from(kind, items)


def _decoded_pairs(pairs: Any, tensors: Mapping[str, Tensor] | None) -> dict[Any, Any]:
    return {decoded(key): decoded(item, tensors) for key, item in pairs}


def _deque(items: Any, tensors: Mapping[str, Tensor]) -> deque[Any]:
    maxlen, values = items
    return deque(decoded(values, tensors), maxlen)


def _tensor(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    return tensors[name].clone()


def _complex(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.view_as_complex(tensors[name].clone())


def _member(items: Any, tensors: Mapping[str, Tensor]) -> Any:
    module, name, member, value = items
    value = decoded(value, tensors)
    of = _known_class(module, name)
    if of is not None and issubclass(of, Enum):
        if member in of.__members__:
            return of.__members__[member]
        if issubclass(of, Flag) and type(value) is int:
            return of(value)  # several flags
    _log.warning("the member %s of %s.%s is loaded as its value %r", member, module, name, value)
    return value


def _dataclass(items: Any, tensors: Mapping[str, Tensor]) -> Any:
    module, name, pairs = items
    attributes = _decoded_pairs(pairs, tensors)
    of = _known_class(module, name)
    if of is not None and is_dataclass(of) and getattr_static(of, "__del__", None) is None:
        known = {one.name for one in fields(of)}
        # A class without a place for other attributes has changed since.
        if known <= attributes.keys() and (known >= attributes.keys() or _has_dict(of)):
            with suppress(TypeError):  # it extends a class that is not made so
                return _made(of, attributes)
    _log.warning(
        "a dataclass %s.%s is loaded as a Namespace: the program has no such class, or its"
        " fields have changed; import its module before load_checkpoint",
        *(module, name),
    )
    return Namespace(**attributes)


def _made(of: type, attributes: Mapping[str, Any]) -> Any:
    """Return an object with these attributes; no code of its class runs, as a setter would."""
    made: Any = object.__new__(of)
    for key, attribute in attributes.items():
        place = getattr_static(of, key, None)
        if isinstance(place, MemberDescriptorType):  # of __slots__
            place.__set__(made, attribute)
        else:
            object.__getattribute__(made, "__dict__")[key] = attribute
    return made


def _has_dict(of: type) -> bool:
    return any("__dict__" in vars(base) for base in of.__mro__)


def _known_class(module: str, name: str) -> type | None:
    """Return a class of a module that is imported already; nothing is imported or called."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    is_itself = isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name)
    return cast("type", found) if is_itself else None


_OTHERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "array": lambda name, tensors: _tensor(name, tensors).numpy(),
    "complex": lambda parts, _: complex(*map(decoded, parts)),
    "complex array": lambda name, tensors: _complex(name, tensors).numpy(),
    "complex tensor": _complex,
    "dataclass": _dataclass,
    "deque": _deque,
    "enum": _member,
    "float": lambda text, _: float(text),
    "long": lambda name, tensors: tensors[name].numpy().tobytes(),
    "tensor": _tensor,
}
