"""The kinds of value in a configuration, and their conversion from JSON values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Strict

from hadal.units import nbytes_of

# Sizes and counts end up in 64-bit integers; the largest that is printed as a default is 2^63 - 1.
_TOO_LARGE = 1 << 63
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def whole(value: Any) -> Any:
    """Convert 500000000, 5e8 and "500000000" to the same integer; refuse anything else."""
    number = _number(value)
    if isinstance(number, float) and math.isfinite(number) and number.is_integer():
        return int(number)
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise ValueError("not an integer")
    if abs(int(number)) >= _TOO_LARGE:
        raise ValueError("too large a number")
    return int(number)


def counted(value: Any) -> Any:
    """Convert 10 and "10" to an integer, but refuse 10.0: counts of steps are integer literals."""
    if isinstance(_number(value), float):
        raise ValueError("not an integer")
    return whole(value)


def real(value: Any) -> Any:
    """Convert 0.001 and "1e-3" to the same number; refuse booleans, NaN and infinity."""
    number = _number(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError("not a number")
    try:
        converted = float(number)
    except OverflowError:
        raise ValueError("too large a number") from None
    if not math.isfinite(converted):
        raise ValueError("not a finite number")
    return converted


def whole_or_never(value: Any) -> Any:
    """Convert infinity, which other programs write for "do not print", to null."""
    return None if value is None or value == math.inf else whole(value)


def _number(value: Any) -> Any:
    """Convert a string that is a number of JSON's, such as "8" and "1e-3"; no other form counts."""
    if not isinstance(value, str):
        return value
    value = value.strip()
    if not _JSON_NUMBER.fullmatch(value):
        raise ValueError("not a number")
    return float(value) if set(value) & set(".eE") else int(value)


def spelled_numbers(value: Any) -> Any:
    """Convert strings that spell finite numbers, also in lists; leave anything else unchanged."""
    if isinstance(value, list | tuple):
        return [spelled_numbers(item) for item in value]
    if isinstance(value, str):
        with suppress(ValueError):
            number = _number(value)
            return number if math.isfinite(number) else value
    return value


def in_bytes(value: Any) -> Any:
    """Convert "4GB" and "4GiB" to a number of bytes; leave anything else unchanged."""
    if isinstance(value, str):
        with suppress(ValueError):
            return nbytes_of(value)
    return value


def lowered(value: Any) -> Any:
    """Return words in lower case."""
    return value.lower() if isinstance(value, str) else value


def titled(value: Any) -> Any:
    """Return words with a capital first letter."""
    return value.capitalize() if isinstance(value, str) else value


def boolean_word(value: Any) -> Any:
    """Convert "true" and "false", also with a capital as Python writes them, to booleans."""
    words = {"true": True, "True": True, "false": False, "False": False}
    return words.get(value, value) if isinstance(value, str) else value


def one_or_many(value: Any) -> Any:
    """Convert a single string to a list of one."""
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True, eq=False)
class Spelled:
    """Converts other spellings of a word. Hashed by identity, as types require."""

    names: Mapping[str, str]

    def __call__(self, value: Any) -> Any:
        """Return the canonical word."""
        return self.names.get(value, value) if isinstance(value, str) else value


Boolean: TypeAlias = Annotated[bool, Strict(), BeforeValidator(boolean_word)]
Integer: TypeAlias = Annotated[int, BeforeValidator(whole)]
Nbytes: TypeAlias = Annotated[Integer, BeforeValidator(in_bytes)]
Number: TypeAlias = Annotated[float, BeforeValidator(real)]
Text: TypeAlias = Annotated[str, Strict()]

Integers: TypeAlias = tuple[Integer, ...]
Numbers: TypeAlias = tuple[Number, ...]
Texts: TypeAlias = tuple[Text, ...]
TextOrTexts: TypeAlias = Annotated[list[Text], BeforeValidator(one_or_many)]
NumberOrNumbers: TypeAlias = Number | Numbers

Dtype: TypeAlias = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(lowered)]

_DTYPE_NAMES = {
    "float32": "fp32",
    "torch.float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "torch.float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
}
DtypeName: TypeAlias = Annotated[
    Literal["fp32", "fp16", "bf16"], BeforeValidator(Spelled(_DTYPE_NAMES))
]
"""A dtype as in `Dtype`, or in torch's spelling."""
