"""State as JSON and back, without code or loss: that of a schedule, a loader or the caller.

JSON has lists, text keys and finite numbers only. Any other value becomes an object with one key
that names its kind: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"counter": ...}`,
`{"float": "inf"}`. Tensors and arrays are stored beside the JSON and referred to by name:
`{"tensor": name}`, `{"array": name}`.

Tests: tests/checkpoint/test_contents.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hadal.checkpoint.shards import DTYPE_OF, DTYPES
from hadal.errors import CheckpointError

_WORDS = (bool, int, float, str, type(None))


def encoded(value: Any, where: str, tensors: MutableMapping[str, Tensor] | None = None) -> Any:
    """Encode plain values, and lists, tuples and dicts of them; `decoded` reverses it.

    A numpy scalar becomes a number. If `tensors` is given, tensors and arrays are put into it;
    otherwise a tensor of one element becomes its number.

    Raises:
        CheckpointError: anything else; the message gives `where` and the position in it.
    """
    try:
        return _encoded(value, where, tensors)
    except RecursionError:
        raise CheckpointError(
            f"{where} is nested too deep for a checkpoint, or contains itself"
        ) from None


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


def _encoded(value: Any, where: str, tensors: MutableMapping[str, Tensor] | None) -> Any:
    if isinstance(value, np.generic) or (
        tensors is None and isinstance(value, Tensor) and value.numel() == 1
    ):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if isinstance(value, _WORDS):
        return value
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, f"{where}[{number}]", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        name = "counter" if isinstance(value, Counter) else "dict"
        return {
            name: [
                [
                    _encoded(k, f"the key {k!r} of {where}", None),
                    _encoded(v, f"{where}[{k!r}]", tensors),
                ]
                for k, v in value.items()
            ]
        }
    if tensors is not None and isinstance(value, (Tensor, np.ndarray)):
        return _set_aside(value, where, tensors)
    raise CheckpointError(
        f"{where} is of type {_type_of(value)}, which a checkpoint cannot hold; use numbers,"
        f" text, lists and dicts{'' if tensors is None else ', tensors or arrays of numbers'}"
        f"{' (its state_dict(), for example)' if hasattr(value, 'state_dict') else ''}"
    )


def _set_aside(
    value: Tensor | np.ndarray[Any, Any], where: str, tensors: MutableMapping[str, Tensor]
) -> dict[str, str]:
    kind = "tensor"
    if isinstance(value, np.ndarray):
        kind = "array"
        try:
            value = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where} is an array of {value.dtype}, which a checkpoint cannot hold; use an"
                " array of numbers in this machine's byte order"
            ) from error
    plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    if not plain or value.dtype not in DTYPES or value.device.type == "meta":
        raise CheckpointError(
            f"{where} is a {type(value).__name__} of {value.dtype}, {value.layout}, on"
            f" {value.device}, which a checkpoint cannot hold; use a dense tensor of numbers"
        )
    name = f"plain.{len(tensors)}"
    tensors[name] = value.detach().resolve_conj().resolve_neg()
    return {kind: name}


def _type_of(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


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
    if kind == "tuple":
        return tuple(decoded(item, tensors) for item in items)
    if kind == "float":
        return float(items)
    if kind in ("tensor", "array"):
        copy = (tensors or {})[items].clone()
        return copy if kind == "tensor" else copy.numpy()
    if kind not in ("dict", "counter"):
        raise ValueError(f"unknown kind of value {kind!r}")
    pairs = {decoded(key): decoded(item, tensors) for key, item in items}
    return Counter(pairs) if kind == "counter" else pairs
