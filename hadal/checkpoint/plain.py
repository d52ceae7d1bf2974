"""State as JSON and back: what a schedule or a loader remembers, without code and without loss.

JSON has lists and text keys only. What else there is stands in an object with one key that says so:
`{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"counter": ...}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from hadal.errors import CheckpointError

_WORDS = (bool, int, float, str, type(None))


def encoded(value: Any, where: str) -> Any:
    """What `decoded` turns back: plain values, lists, tuples and dicts of them.

    A tensor of one element, and a number of numpy, is taken as its number.

    Raises:
        CheckpointError: anything else; `where` is named with the place in it.
    """
    if isinstance(value, _WORDS):
        return value
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, (list, tuple)):
        items = [encoded(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        name = "counter" if isinstance(value, Counter) else "dict"
        return {
            name: [[encoded(k, where), encoded(v, f"{where}[{k!r}]")] for k, v in value.items()]
        }
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which a checkpoint cannot hold; give numbers,"
        " text, lists and dicts"
    )


def decoded(value: Any) -> Any:
    """What `encoded` was given."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tuple":
        return tuple(decoded(item) for item in items)
    pairs = {decoded(key): decoded(item) for key, item in items}
    return Counter(pairs) if kind == "counter" else pairs
