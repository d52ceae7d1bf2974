"""Checks of a parameter's class: which kinds of parameters a flat buffer can hold."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from inspect import getattr_static

import torch
from torch import Tensor, nn

from hadal.zero.watched import kind_of

# What a class may define without changing what torch does with the values.
_HARMLESS = frozenset(
    {"__deepcopy__", "__getstate__", "__init__", "__new__", "__reduce__", "__reduce_ex__"}
    | {"__repr__", "__setstate__", "__str__"}
    | {"__abstractmethods__", "__dict__", "__weakref__"}
)


def is_foreign(parameter: Tensor) -> bool:
    """Return True if a flat buffer cannot hold a parameter: integer, float8, quantized or wrapped.

    It can hold a subclass from the program, unless that replaces a method or property of tensors.
    """
    # torch neither adds numbers of 8 bits nor promotes them.
    is_plain = parameter.is_floating_point() and parameter.dtype.itemsize > 1
    is_plain = is_plain and parameter.layout == torch.strided
    return not is_plain or _replaces_methods(kind_of(parameter))


def refusal_of(parameter: Tensor, *, trains: bool) -> str | None:
    """Return why a parameter cannot be trained or held, and the remedy; None if it can."""
    found = f"is a {type(parameter).__name__} of {parameter.dtype}"
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None:
        return (
            f"{found} over {mesh}; expected a tensor of this rank only. Give each rank its part"
            " as a plain nn.Parameter and pass the groups to initialize as mpu=, or build the model"
            " without parallelize_module"
        )
    if trains and is_foreign(parameter):
        return (
            f"{found} ({parameter.layout}) and cannot be trained; expected a dense nn.Parameter of"
            " 16 to 64-bit floats, or a subclass that replaces no method of tensors. Freeze it"
            " (requires_grad_(False)), or convert it to a plain nn.Parameter before"
            " hadal.initialize"
        )
    return None


def tensors_inside(parameter: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in a parameter; a wrapper may have several."""
    flatten = getattr(parameter, "__tensor_flatten__", None)
    if flatten is None:
        yield parameter.data
        return
    for name in flatten()[0]:
        yield from tensors_inside(getattr(parameter, name))


@functools.cache
def _replaces_methods(kind: type) -> bool:
    """Return True if a class replaces a method or property of torch's tensors.

    Other attributes do not count: Python itself adds some to a class, such as `__slotnames__` when
    an instance is pickled and `__annotations__` when they are looked up.
    """
    own = kind.__mro__[: kind.__mro__.index(Tensor)]
    names = {name for each in own if each is not nn.Parameter for name in vars(each)}
    return any(_acts(getattr_static(Tensor, name, None)) for name in names - _HARMLESS)


def _acts(attribute: object) -> bool:
    return callable(attribute) or hasattr(type(attribute), "__get__")


def alone(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Make a parameter of the same class that holds `values`, as `copy.deepcopy` does."""
    kind = kind_of(parameter)
    return (kind if issubclass(kind, nn.Parameter) else nn.Parameter)(
        values, parameter.requires_grad
    )
