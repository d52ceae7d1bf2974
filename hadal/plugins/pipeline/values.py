"""Values that one stage sends to the next: nested tensors, flattened and restored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.errors import UsageError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


class TensorForm(NamedTuple):
    """Shape, dtype and role of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    takes_gradient: bool
    """True if a gradient of it is sent back."""

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class ValueLayout(NamedTuple):
    """The structure of a value, and the form of each tensor in it, for the receiver."""

    frame: Any
    """Nested tuples: a kind, its type or keys, and the frames inside; tensors have none."""
    tensors: tuple[TensorForm, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "no tensors"

    @property
    def gradients(self) -> tuple[TensorForm, ...]:
        """The tensors whose gradients are sent back."""
        return tuple(form for form in self.tensors if form.takes_gradient)


_TENSOR = ("tensor",)


def taken_apart(value: Any, where: str) -> tuple[list[Tensor], ValueLayout]:
    """Return the tensors in a value, in order, and its layout.

    A value is a tensor, a plain Python value, or a tuple, list, mapping or dataclass of values.
    Tensors that require a gradient get one.

    Raises:
        UsageError: it holds anything else; `where` names the layer.
    """
    tensors: list[Tensor] = []

    def frame_of(one: Any) -> Any:
        if isinstance(one, Tensor):
            tensors.append(one)
            return _TENSOR
        if isinstance(one, _PLAIN):
            return ("plain", one)
        if isinstance(one, list | tuple):
            return ("items", type(one), tuple(map(frame_of, one)))
        if isinstance(one, Mapping):
            return ("mapping", type(one), tuple(one), tuple(map(frame_of, one.values())))
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            values = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
            return ("fields", type(one), tuple(values), tuple(map(frame_of, values.values())))
        raise UsageError(
            f"{where} returned a {type(one).__name__}, which cannot be sent to the next stage;"
            " return a tensor, or a tuple, list, dict or dataclass of tensors and plain values"
        )

    frame = frame_of(value)
    forms = tuple(TensorForm(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return tensors, ValueLayout(frame, forms)


def put_together(frame: Any, tensors: Iterable[Tensor]) -> Any:
    """Return the value with this frame, of new tensors."""
    left = iter(tensors)

    def value_of(one: Any) -> Any:
        kind, *rest = one
        if kind == "tensor":
            return next(left)
        if kind == "plain":
            return rest[0]
        make, *names, inside = rest
        values = [value_of(each) for each in inside]
        return _MAKERS[kind](make, *names, values)

    return value_of(frame)


def _items(make: Any, values: list[Any]) -> Any:
    return make(*values) if hasattr(make, "_fields") else make(values)


def _mapping(make: Any, keys: Sequence[Any], values: list[Any]) -> Any:
    named = dict(zip(keys, values, strict=True))
    if make is dict:
        return named
    # Outputs of transformers are mappings whose fields are their constructor's arguments.
    has_fields = bool(dataclasses.is_dataclass(make))
    return make(**named) if has_fields else make(named)


def _fields(make: Any, names: Sequence[str], values: list[Any]) -> Any:
    made = object.__new__(make)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(
            made, name, value
        )  # also for frozen ones, and fields that are not arguments
    return made


_MAKERS: dict[str, Callable[..., Any]] = {"items": _items, "mapping": _mapping, "fields": _fields}
