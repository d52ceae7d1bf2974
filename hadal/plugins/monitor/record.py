"""Scalars for the monitors: checked, and grouped by their number of samples."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hadal.device import HostCopy, is_host_memory, start_reading
from hadal.errors import UsageError

Value = int | float

_EXPECTED = "expected (name, value, samples), for example ('Eval/loss', 1.5, engine.global_samples)"


class ScalarRecord(NamedTuple):
    """Scalars that belong to the same number of samples."""

    samples: int
    """Samples so far on all ranks: the x-axis."""
    values: Mapping[str, Value]
    time: float
    """When they were measured, in seconds since 1970."""
    step: int | None = None
    """The update that they describe; None for a program's own scalars."""


class ScalarDraft(Protocol):
    """Records whose values the device may still be computing."""

    @property
    def is_known(self) -> bool:
        """Return True if `records` does not wait for the device."""

    def records(self) -> Iterable[ScalarRecord]:
        """Return the records with their values. Waits for the device."""


class Scalar(NamedTuple):
    """One scalar as passed by a program."""

    name: str
    value: Value | HostCopy
    samples: int


class GivenScalars(NamedTuple):
    """Scalars that a program wrote at one moment."""

    events: tuple[Scalar, ...]
    time: float

    @property
    def is_known(self) -> bool:
        """Return True if the device has computed all of them."""
        return all(one.value.is_over for one in self.events if isinstance(one.value, HostCopy))

    def records(self) -> Iterator[ScalarRecord]:
        """Return the scalars in order, grouping consecutive ones of the same samples."""
        values: dict[str, Value] = {}
        samples = 0
        for name, value, at in self.events:
            if values and (at != samples or name in values):
                yield ScalarRecord(samples, values, self.time)
                values = {}
            samples = at
            values[name] = _read(value)
        if values:
            yield ScalarRecord(samples, values, self.time)


def _read(value: Value | HostCopy) -> Value:
    found = value.values().item() if isinstance(value, HostCopy) else value
    return int(found) if isinstance(found, bool) else found


def events_of(event_list: Iterable[Any]) -> tuple[Scalar, ...]:
    """Check scalars passed as (name, value, samples). Nothing is read from the device.

    Those whose value is None are left out: a program may not know a value each time.

    Raises:
        UsageError: one is not such a triple, its value is not a number, or its samples are not an
            integer.
    """
    return tuple(filter(None, map(_event, event_list)))


def _event(given: Any) -> Scalar | None:
    try:
        name, value, samples = given
    except (TypeError, ValueError):
        raise UsageError(f"write_events got {given!r}; {_EXPECTED}") from None
    if not isinstance(name, str):
        raise UsageError(f"write_events got the name {name!r}; {_EXPECTED}")
    at = _whole(name, samples)
    return None if value is None else Scalar(name, _value(name, value), at)


def _value(name: str, value: Any) -> Value | HostCopy:
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        if is_host_memory(value.device):
            return _value(name, value.item())
        return start_reading(value.detach().reshape(()), f"the value of {name}")
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        return _value(name, value.item())  # numpy's
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise UsageError(
        f"write_events got {kind} as the value of {name}; expected a number or a tensor of one"
        " element"
    )


def _whole(name: str, samples: Any) -> int:
    if isinstance(samples, float) and samples.is_integer():
        return int(samples)
    try:
        return operator.index(samples)
    except TypeError:
        raise UsageError(
            f"write_events got {samples!r} as the samples of {name}; expected an integer, for"
            " example engine.global_samples"
        ) from None
