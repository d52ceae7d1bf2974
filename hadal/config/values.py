"""The kinds of value that a configuration holds, and how a JSON value becomes one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Strict

# Sizes and counts end up in 64-bit integers; the largest that is printed as a default is 2^63 - 1.
_TOO_LARGE = 1 << 63


def whole(value: Any) -> Any:
    """Take 500000000, 5e8 and "500000000" as the same integer; leave anything else alone."""
    number = _number(value)
    if isinstance(number, float) and math.isfinite(number) and number.is_integer():
        return int(number)
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise ValueError("not an integer")
    if abs(int(number)) >= _TOO_LARGE:
        raise ValueError("too large a number")
    return int(number)


def counted(value: Any) -> Any:
    """Take 10 and "10" as an integer, and 10.0 as none: what counts steps is written as a count."""
    if isinstance(_number(value), float):
        raise ValueError("not an integer")
    return whole(value)


def real(value: Any) -> Any:
    """Take 0.001 and "1e-3" as the same number; refuse booleans, NaN and infinity."""
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
    """Take infinity as "never", which is null; other programs write it for "do not print"."""
    return None if value is None or value == math.inf else whole(value)


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        return float(value)


def spelled_numbers(value: Any) -> Any:
    """Read texts that spell finite numbers, also in lists; leave anything else alone."""
    if isinstance(value, list | tuple):
        return [spelled_numbers(item) for item in value]
    if isinstance(value, str):
        with suppress(ValueError):
            number = _number(value)
            return number if math.isfinite(number) else value
    return value


def lowered(value: Any) -> Any:
    """Compare words without regard to case."""
    return value.lower() if isinstance(value, str) else value


def titled(value: Any) -> Any:
    """Compare words without regard to case, and write them with a capital."""
    return value.capitalize() if isinstance(value, str) else value


def boolean_word(value: Any) -> Any:
    """Take Python's words "True" and "False" for the booleans."""
    return {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value


def one_or_many(value: Any) -> Any:
    """Take a single string as a list of one."""
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True, eq=False)
class Spelled:
    """Takes other spellings of a word for the word itself. Hashed by identity, as types must be."""

    names: Mapping[str, str]

    def __call__(self, value: Any) -> Any:
        """Return the word."""
        return self.names.get(value, value) if isinstance(value, str) else value


Boolean: TypeAlias = Annotated[bool, Strict()]
Integer: TypeAlias = Annotated[int, BeforeValidator(whole)]
Number: TypeAlias = Annotated[float, BeforeValidator(real)]
Text: TypeAlias = Annotated[str, Strict()]

Integers: TypeAlias = tuple[Integer, ...]
Numbers: TypeAlias = tuple[Number, ...]
Texts: TypeAlias = tuple[Text, ...]
TextOrTexts: TypeAlias = Annotated[tuple[Text, ...], BeforeValidator(one_or_many)]
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
"""A dtype as `Dtype` has it, or as torch writes it."""
