"""Values of callers as JSON and back: the same types, and no code of a checkpoint."""

from __future__ import annotations

import json
import math
import struct
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum, IntEnum
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as of_numpy
from torch import Tensor

from hadal.checkpoint.plain import decoded, encoded
from hadal.errors import CheckpointError


class Color(Enum):
    RED = "red"
    DEEP = ("blue", 3)


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Recipe:
    rate: float = 0.1


def through_json(value: Any) -> Any:
    """Return the value as a later program reads it."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encoded(value, "client_state", tensors), allow_nan=False)
    stored = {name: tensor.clone() for name, tensor in tensors.items()}
    return decoded(json.loads(text), stored)


def expect_same(one: Any, other: Any) -> None:
    """Compare values with their types, bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        expect_same(bytes_of(one.numpy()), bytes_of(other.numpy()))
    elif isinstance(one, (np.ndarray, np.generic)):
        assert one.dtype == other.dtype.newbyteorder("=")
        assert one.shape == other.shape
        expect_same(bytes_of(one), bytes_of(other))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            expect_same(mine, theirs)
    elif isinstance(one, dict):
        expect_same([*one], [*other])
        expect_same([*one.values()], [*other.values()])
    elif isinstance(one, Namespace):
        expect_same(vars(one), vars(other))
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", other) or math.isnan(one) & math.isnan(
            other
        )
    elif isinstance(one, datetime):
        assert (one, one.tzinfo) == (other, other.tzinfo)
    elif isinstance(one, BytesIO):
        assert one.getvalue() == other.getvalue()
    else:
        assert one == other


def bytes_of(value: Any) -> Any:
    return value.astype(value.dtype.newbyteorder("=")).tobytes()


SCALARS = (
    of_numpy.boolean_dtypes()
    | of_numpy.integer_dtypes()
    | of_numpy.floating_dtypes(sizes=(16, 32, 64))
    | of_numpy.complex_number_dtypes()
    | of_numpy.datetime64_dtypes()
    | of_numpy.timedelta64_dtypes()
    | of_numpy.unicode_string_dtypes(max_len=4)
)
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(),
    st.floats(allow_nan=False),
    st.binary(),
    st.dates(),
    st.times(timezones=st.none()),
    st.datetimes(timezones=st.none()),
    st.datetimes(timezones=st.just(timezone(timedelta(hours=-3, seconds=7)))),
    st.timedeltas(),
    st.sampled_from([*Color, *Level]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.uint16]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")]),
    st.sampled_from(["a/b", "/", ".", "x y"]).map(Path),
    SCALARS.flatmap(of_numpy.from_dtype).filter(lambda one: bool(one == one)),
)
ARRAYS = of_numpy.arrays(
    of_numpy.integer_dtypes(endianness="=")
    | of_numpy.floating_dtypes(sizes=(16, 32, 64), endianness="="),
    of_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
LEAVES = st.one_of(
    HASHABLE,
    st.floats(),
    st.sampled_from([b"x" * 4096, b"y" * 4097, b"\0" * 9000]),
    st.binary().map(BytesIO),
    SCALARS.flatmap(of_numpy.from_dtype),
    ARRAYS,
    ARRAYS.map(torch.from_numpy),
)


def collections_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    words = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
    return st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.sets(HASHABLE),
        st.frozensets(HASHABLE),
        st.dictionaries(HASHABLE, inner),
        st.dictionaries(HASHABLE, inner).map(OrderedDict),
        st.text().map(Counter),
        st.dictionaries(words, inner).map(lambda items: Namespace(**items)),
    )


@settings(max_examples=60)
@given(st.recursive(LEAVES, collections_of, max_leaves=8))
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    expect_same(through_json(value), value)


@pytest.fixture
def gone() -> Any:
    """A module whose classes can be saved, and are then no longer there."""
    module = ModuleType("hadal_test_module")
    sys.modules[module.__name__] = module
    code = "from enum import Enum\nclass Kind(Enum):\n    A = 'a'\n    B = ('b', 2)\n"
    exec(code, module.__dict__)
    yield module
    sys.modules.pop(module.__name__, None)


def test_a_class_that_is_not_imported_is_not_imported(gone: ModuleType, caplog: Any) -> None:
    tensors: dict[str, Tensor] = {}
    value = {"kinds": {gone.Kind.A, gone.Kind.B}}
    saved = encoded(value, "client_state", tensors)
    del sys.modules[gone.__name__]
    found = decoded(saved)
    assert found == {"kinds": {"a", ("b", 2)}}
    assert gone.__name__ not in sys.modules
    assert "hadal_test_module.Kind" in caplog.text


class Loud:
    """A class whose call raises."""

    def __init__(self, *_: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    "forged",
    [
        {"enum": [__name__, "Loud", "A", 4]},
        {"enum": ["os", "system", "A", 4]},
        {"enum": [__name__, "Color", "GREEN", 4]},
    ],
)
def test_only_members_of_enums_are_looked_up(forged: Any) -> None:
    assert decoded(forged) == 4


@pytest.mark.parametrize(
    "forged",
    [
        {"numpy": ["|O", ""]},
        {"numpy": ["<i4", "AA=="]},
        {"numpy": ["(2,)<i4", "AAAAAAAAAAA="]},
        {"numpy": [[["f", "<i4"]], "AAAAAA=="]},
        {"dtype": 3},
        {"device": []},
        {"bytes": "€"},
        {"import": "os"},
        {"dataclass": ["os", "system", [["x", 1]]]},
        {"float": "x"},
        {},
        {"set": [[1, 2]]},
        {"tuple": 3},
    ],
)
def test_what_was_not_encoded_is_refused(forged: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        decoded(forged)


def test_a_name_that_this_torch_lacks_comes_back_as_text() -> None:
    assert decoded({"dtype": "float2"}) == "float2"
    assert decoded({"dtype": "load"}) == "load"
    assert decoded({"device": "abacus:1"}) == "abacus:1"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": {"b": lambda: 0}}, r"client_state\['a'\]\['b'\] is of type function.*use numbers"),
        (Namespace(fn=print), r"client_state\.fn is of type builtin_function_or_method"),
        ([(0, {"q": deque()})], r"client_state\[0\]\[1\]\['q'\] is of type collections.deque"),
        (Recipe(), r"client_state is of type .*Recipe"),
        ({"s": {object}}, r"client_state\['s'\]\{<class 'object'>\} is of type type"),
        ({object: 1}, r"the key <class 'object'> of client_state is of type type"),
        (np.ma.masked_array([1, 2], [True, False]), r"without a mask"),
        (iter([]), "list_iterator"),
        (np.zeros(1, [("a", "i4")])[0], "numpy.void"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named_by_its_path(value: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        encoded(value, "client_state", {})
