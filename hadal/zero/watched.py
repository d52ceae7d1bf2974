"""Parameters whose reads are seen, through a class that torch calls before each operation.

These are freed parameters and those whose new values are still being gathered. A parameter that has
its values keeps its own class, and costs nothing. A watched class is a subclass of the parameter's
own class with the same name.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from hadal.device import is_in_backward
from hadal.zero.attached import Attached

# torch passes a property of a tensor as its getter or setter.
_ASKED = "_version device dtype grad is_leaf layout ndim requires_grad shape"
_SET = "grad requires_grad"
# Operations that neither read nor write a parameter's values.
QUESTIONS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ASKED.split()),
        *(getattr(Tensor, name).__set__ for name in _SET.split()),
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.new_empty,
        Tensor.new_full,
        Tensor.new_ones,
        Tensor.new_tensor,
        Tensor.new_zeros,
        Tensor.numel,
        Tensor.register_hook,
        Tensor.requires_grad_,
        Tensor.size,
    }
)
# Operations that overwrite all values of their first argument.
_FILLS = frozenset({Tensor.copy_, Tensor.fill_, Tensor.normal_, Tensor.uniform_, Tensor.zero_})
_FILLS_OF_INIT = frozenset({"constant_", "kaiming_uniform_", "normal_", "uniform_"})

# Parameters that were read or passed out without their values.
_touched: Attached[bool] = Attached("touched")
# For parameters whose values are being gathered: the callback that waits for them.
_arrivals: Attached[Callable[[], object]] = Attached("arrival")
_listeners: list[ReadListener] = []


class ReadListener:
    """A listener for reads of watched parameters in the thread that started it.

    Reads in backward count too, as a device's backward runs in its own thread.
    """

    def __init__(self, on_read: Callable[[nn.Parameter], None]) -> None:
        self._on_read = on_read
        self._thread = 0

    def start(self) -> None:
        """Listen from now on."""
        self._thread = threading.get_ident()
        if self not in _listeners:
            _listeners.append(self)

    def stop(self) -> None:
        """Stop listening."""
        if self in _listeners:
            _listeners.remove(self)

    def hear(self, parameter: nn.Parameter) -> None:
        """Handle a watched parameter that is about to be read."""
        if threading.get_ident() == self._thread or is_in_backward():
            self._on_read(parameter)


def fills(operation: Any) -> bool:
    """Return True if an operation overwrites all values of its first argument.

    torch's initialisations pass the function that has their name in `nn.init`, where another
    library may have put its own functions, which call torch's.
    """
    name = getattr(operation, "__name__", "")
    is_of_init = name in _FILLS_OF_INIT and operation is getattr(nn.init, name)
    return is_of_init or operation in _FILLS


class _Watched:
    """A mixin for the class of a watched parameter."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Programs create new parameters of the class of existing ones.
        return cls.__bases__[1](*args, **kwargs)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        """Return the values as torch prints them, or a note for a freed parameter."""
        parameter = cast(nn.Parameter, self)
        if parameter in _arrivals:
            _announce(parameter)
            return repr(parameter)
        return (
            f"Parameter(shape={tuple(parameter.shape)}, dtype={parameter.dtype}, its values are"
            " sharded over the ranks; read them inside"
            " `with hadal.zero.GatheredParameters([parameter]):`)"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            # The operation stays outside the graph, which must not trace the memory that it moves.
            torch._dynamo.graph_break()
        kwargs = kwargs or {}
        if func not in QUESTIONS:
            found = [*_watched_among(args), *_watched_among(kwargs.values())]
            for parameter in found:
                _announce(parameter)
            if found and not any(isinstance(parameter, _Watched) for parameter in found):
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _watched_among(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, _Watched):
            yield cast(nn.Parameter, value)
        elif type(value) in (list, tuple):
            yield from _watched_among(value)


def _announce(parameter: nn.Parameter) -> None:
    arrive = _arrivals.get(parameter)
    if arrive is not None:
        arrive()
        return
    for listener in [*_listeners]:
        listener.hear(parameter)
    if isinstance(parameter, _Watched):
        _touched[parameter] = True


@functools.cache
def _watched_kind(kind: type) -> type:
    names = ("__doc__", "__module__", "__qualname__")
    made = type(kind)(kind.__name__, (_Watched, kind), {"__slots__": ()})
    for name in names:
        setattr(made, name, getattr(kind, name))
    return made


def kind_of(parameter: Tensor) -> type:
    """Return the parameter's own class, even while it is watched."""
    kind = type(parameter)
    return kind.__bases__[1] if issubclass(kind, _Watched) else kind


def watched_kind_of(parameter: Tensor) -> type:
    """Return the class of the parameter while its reads are announced."""
    return _watched_kind(kind_of(parameter))


def expect_values(parameter: nn.Parameter, arrive: Callable[[], object]) -> None:
    """Watch a parameter whose values are being gathered, and call `arrive` before each read."""
    _arrivals[parameter] = arrive
    parameter.__class__ = watched_kind_of(parameter)


def have_values(parameter: nn.Parameter) -> None:
    """Undo `expect_values`."""
    _arrivals.pop(parameter)
    parameter.__class__ = kind_of(parameter)


def take_touched(parameter: nn.Parameter) -> bool:
    """Return True if a watched parameter without values was read since the last call.

    A write may have followed.
    """
    was_touched = parameter in _touched
    if was_touched:
        _touched.pop(parameter)
    return was_touched
