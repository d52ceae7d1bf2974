"""Values of callers as JSON and back: the same types, and no code of a checkpoint."""

from __future__ import annotations

import json
import math
import struct
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum, Flag, IntEnum, auto
from fractions import Fraction
from io import BytesIO
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


class Right(Flag):
    READ = auto()
    WRITE = auto()


@dataclass
class Recipe:
    rate: float = 0.1
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = 1


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    inner: Recipe


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
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(other)
        assert getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0)
        for mine, theirs in zip(one, other, strict=True):
            expect_same(mine, theirs)
    elif isinstance(one, dict):
        expect_same([*one], [*other])
        expect_same([*one.values()], [*other.values()])
    elif isinstance(one, (Namespace, SimpleNamespace)):
        expect_same(vars(one), vars(other))
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", other) or math.isnan(one) & math.isnan(
            other
        )
    elif isinstance(one, datetime):
        assert (one, one.tzinfo, one.fold) == (other, other.tzinfo, other.fold)
    elif isinstance(one, BytesIO):
        assert one.getvalue() == other.getvalue()
    else:
        assert one == other


def bytes_of(value: Any) -> bytes:
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
    st.datetimes(timezones=st.none() | st.timezones()),
    st.datetimes(timezones=st.just(timezone(timedelta(hours=-3, seconds=7)))),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([*Color, *Level, *Right, Right.READ | Right.WRITE]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.uint16]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")]),
    st.sampled_from(["a/b", "/", ".", "x y"]).map(Path),
    st.sampled_from([PurePosixPath("a"), PureWindowsPath("c:/x")]),
    st.sampled_from([torch.Size([2, 3]), range(1, 9, 3)]),
    SCALARS.flatmap(of_numpy.from_dtype).filter(lambda one: bool(one == one)),
)
ARRAYS = of_numpy.arrays(
    of_numpy.integer_dtypes(endianness="=")
    | of_numpy.floating_dtypes(sizes=(16, 32, 64), endianness="=")
    | of_numpy.complex_number_dtypes(endianness="="),
    of_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
LEAVES = st.one_of(
    HASHABLE,
    st.floats(),
    st.sampled_from([b"x" * 4096, b"y" * 4097, b"\0" * 9000]),
    st.binary().map(bytearray),
    st.binary().map(BytesIO),
    SCALARS.flatmap(of_numpy.from_dtype),
    ARRAYS,
    ARRAYS.map(torch.from_numpy),
    st.lists(st.integers()).map(lambda steps: Recipe(0.5, steps)),
    st.text().map(lambda name: Frozen(name, Recipe())),
)


def collections_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    words = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
    return st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.sets(HASHABLE),
        st.frozensets(HASHABLE),
        st.lists(inner).map(lambda items: deque(items, 3)),
        st.dictionaries(HASHABLE, inner),
        st.dictionaries(HASHABLE, inner).map(OrderedDict),
        st.text().map(Counter),
        st.dictionaries(words, inner).map(lambda items: Namespace(**items)),
        st.dictionaries(words, inner).map(lambda items: SimpleNamespace(**items)),
    )


@settings(max_examples=60)
@given(st.recursive(LEAVES, collections_of, max_leaves=8))
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    expect_same(through_json(value), value)


def test_an_attribute_of_a_dataclass_comes_back_without_a_call() -> None:
    recipe = Recipe(0.2, [1])
    recipe.calls = 7
    found = through_json({"recipe": recipe, "frozen": Frozen("a", recipe)})
    assert found["recipe"] == recipe
    assert found["recipe"].calls == 7  # __post_init__ was not called again
    assert found["frozen"].inner.calls == 7


@pytest.fixture
def gone() -> Any:
    """A module whose classes can be saved, and are then no longer there."""
    module = ModuleType("hadal_test_module")
    sys.modules[module.__name__] = module
    code = (
        "from dataclasses import dataclass\nfrom enum import Enum\n"
        "class Kind(Enum):\n    A = 'a'\n    B = ('b', 2)\n"
        "@dataclass\nclass Point:\n    x: int\n    y: int = 2\n"
    )
    exec(code, module.__dict__)
    yield module
    sys.modules.pop(module.__name__, None)


def test_a_class_that_is_not_imported_is_not_imported(gone: ModuleType, caplog: Any) -> None:
    tensors: dict[str, Tensor] = {}
    value = {"kinds": {gone.Kind.A, gone.Kind.B}, "point": gone.Point(1)}
    saved = encoded(value, "client_state", tensors)
    del sys.modules[gone.__name__]
    found = decoded(saved)
    assert found == {"kinds": {"a", ("b", 2)}, "point": Namespace(x=1, y=2)}
    assert gone.__name__ not in sys.modules
    assert "hadal_test_module.Kind" in caplog.text
    assert "Point is loaded as a Namespace" in caplog.text


def test_a_dataclass_whose_fields_have_changed_is_a_namespace(gone: ModuleType) -> None:
    saved = encoded(gone.Point(1), "client_state")
    exec("@dataclass\nclass Point:\n    z: int", gone.__dict__)
    assert decoded(saved) == Namespace(x=1, y=2)


class Loud:
    """A class whose every hook raises."""

    def __init__(self, *_: Any) -> None:
        raise AssertionError

    def __setattr__(self, *_: Any) -> None:
        raise AssertionError


@dataclass
class Setting:
    """A dataclass whose attribute has a setter."""

    x: int = 1

    @property
    def noisy(self) -> int:
        return 2

    @noisy.setter
    def noisy(self, value: int) -> None:
        raise AssertionError


@dataclass
class Dying:
    x: int = 1

    def __del__(self) -> None:
        pass


@pytest.mark.parametrize(
    "forged",
    [
        {"dataclass": [__name__, "Loud", [["x", 1]]]},
        {"dataclass": [__name__, "Dying", [["x", 1]]]},
        {"dataclass": ["os", "system", [["x", 1]]]},
        {"dataclass": ["subprocess", "Popen", [["args", "false"]]]},
        {"dataclass": [__name__, "Recipe.__init__", [["x", 1]]]},
        {"dataclass": [__name__, "through_json.<locals>.X", [["x", 1]]]},
    ],
)
def test_only_dataclasses_are_made_and_no_code_of_theirs_runs(forged: Any) -> None:
    assert type(decoded(forged)) is Namespace


def test_a_setter_of_a_dataclass_is_not_called() -> None:
    forged = {"dataclass": [__name__, "Setting", [["x", 3], ["noisy", 5]]]}
    found = decoded(forged)
    assert type(found) is Setting
    assert found.noisy == 2


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


def test_a_zone_that_this_system_lacks_is_its_offset() -> None:
    saved = {"datetime": ["2026-07-01T12:00:00", 0, ["Mars/Olympus", [0, 7200, 0]]]}
    assert decoded(saved) == datetime(2026, 7, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    climbing = {"datetime": ["2026-07-01T12:00:00", 0, ["../../etc/passwd", [0, 0, 0]]]}
    assert decoded(climbing).tzinfo == timezone(timedelta(0))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": {"b": lambda: 0}}, r"client_state\['a'\]\['b'\] is of type function.*use numbers"),
        (Namespace(fn=print), r"client_state\.fn is of type builtin_function_or_method"),
        (Recipe(object()), r"client_state\.rate is of type object"),  # type: ignore[arg-type]
        ({"s": {object}}, r"client_state\['s'\]\{<class 'object'>\} is of type type"),
        ({Frozen("a", 1): 1}, r"the key Frozen\(.*\) of client_state"),  # type: ignore[arg-type]
        (np.ma.masked_array([1, 2], [True, False]), r"without a mask"),
        (iter([]), "list_iterator"),
        (np.zeros(1, [("a", "i4")])[0], "numpy.void"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named_by_its_path(value: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        encoded(value, "client_state", {})


def test_a_value_written_before_keeps_its_meaning() -> None:
    """Checkpoints of earlier versions have these kinds."""
    saved = {"dict": [["a", {"counter": [["x", 2]]}], [1, {"tuple": [{"float": "-inf"}, True]}]]}
    assert decoded(saved) == {"a": Counter(x=2), 1: (-math.inf, True)}
    assert Fraction(1, 3) == through_json(Fraction(1, 3))
