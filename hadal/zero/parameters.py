"""Single parameters: values attached to them, watched classes, and which kinds a buffer can hold.

Reads of freed parameters, and of those whose new values are still being gathered, are seen through
a watched class, which torch calls before each operation: a subclass of the parameter's own class
with the same name. A parameter that has its values keeps its own class, and costs nothing.

An operation on a freed parameter raises if it needs the values, or writes them: a sum would be
NaN, and a write would be lost. So does an operation on a tensor that shares its memory, such as
`parameter.data`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import getattr_static
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from hadal.device import is_in_backward
from hadal.errors import ShardedAccessError

_V = TypeVar("_V")
_MARK = "_hadal_"


class Attached(Generic[_V]):
    """Values by parameter.

    A table with weak keys would hold its values, and a bucket holds its parameters, so unused
    ones would never be freed. Here they refer only to each other.
    """

    def __init__(self, name: str) -> None:
        self._name = _MARK + name

    def __setitem__(self, parameter: nn.Parameter, value: _V) -> None:
        # Programs copy all attributes of one parameter to another; the id shows which is whose.
        vars(parameter)[self._name] = (id(parameter), value)

    def __getitem__(self, parameter: nn.Parameter) -> _V:
        found = self.get(parameter)
        if found is None:
            raise KeyError(self._name)
        return found

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return self.get(parameter) is not None

    def get(self, parameter: nn.Parameter) -> _V | None:
        """Return the value of a parameter, if it has one."""
        number, value = vars(parameter).get(self._name, (None, None))
        return value if number == id(parameter) else None

    def pop(self, parameter: nn.Parameter) -> None:
        """Remove a parameter's value."""
        vars(parameter).pop(self._name, None)


def is_attached(name: str) -> bool:
    """Return True for an attribute that holds such a value; copies of a parameter lack it."""
    return name.startswith(_MARK)


# ---- watched parameters --------------------------------------------------------------------------

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
        Tensor.new_empty_strided,
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

_IN_PLACE = frozenset(
    {"__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__", "__ior__"}
    | {"__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__"}
)
# Operations whose names end as if they wrote values.
_WRITE_NOTHING = frozenset({"detach_", "rename_", "requires_grad_", "share_memory_"})
# Operations that return values in other form than tensors.
_RETURN_NUMBERS = frozenset(
    {"__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__"}
    | {"__deepcopy__", "__reduce_ex__"}
    | {"allclose", "equal", "is_nonzero", "item", "numpy", "tolist"}
)
_CONVERT = frozenset({"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"})
# Transformers pads the bias of a tied output layer, by nothing if its size fits.
_KEEP_FORM = _CONVERT | {"pad"}
_RETURN_NO_VALUES = frozenset({"grad"})  # torch.autograd.grad: gradients of the parameter
# Operations that only need the dtype or shape of tensors other than the first.
_ASK_FORM = frozenset({"expand_as", "reshape_as", "to", "type_as", "view_as"})

# Parameters that were read or passed out without their values.
_touched: Attached[bool] = Attached("touched")
# For parameters whose values are being gathered: the callback that waits for them.
_arrivals: Attached[Callable[[], object]] = Attached("arrival")
# How an error names a parameter that is held: its rank and its full name.
_described: Attached[Callable[[], str]] = Attached("described")
# Parameters that the program may cast or move while they are freed.
_castable: Attached[bool] = Attached("castable")
_listeners: list[ReadListener] = []
if hasattr(os, "register_at_fork"):
    # A forked process, such as a DataLoader's worker, has no part in gathers: reads are errors.
    os.register_at_fork(after_in_child=_listeners.clear)
Gather = Callable[[nn.Parameter], AbstractContextManager[None]]
# The context that gathers a parameter to copy it; without one, copies are refused.
_gathers_to_copy: list[Gather] = []


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


def gather_to_copy(gather: Gather | None) -> None:
    """Make `copy.deepcopy` gather sharded values instead of refusing; with None it refuses again.

    So does `numpy()` before `initialize`. All ranks must then copy together, as some libraries do
    with modules at stage 3.
    """
    _gathers_to_copy[:] = [] if gather is None else [gather]


def gathered_to_copy(parameter: nn.Parameter) -> AbstractContextManager[None] | None:
    """Return a context in which a parameter may be copied; None: copies are refused."""
    return _gathers_to_copy[0](parameter) if _gathers_to_copy else None


def guard(parameter: nn.Parameter, describe: Callable[[], str], *, may_be_cast: bool) -> None:
    """Refuse operations that need a parameter's values, or write them, while they are freed.

    `describe` returns its rank and its full name for the error. `may_be_cast`: a cast or move of
    its placeholder returns another one.
    """
    _described[parameter] = describe
    if may_be_cast:
        _castable[parameter] = True
    else:
        _castable.pop(parameter)


def unguard(parameter: nn.Parameter) -> None:
    """Undo `guard`."""
    _described.pop(parameter)
    _castable.pop(parameter)


class _Seen:
    """Mixin for tensors whose operations are seen before they run."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            # A gather moves memory, which a graph must not trace: the operation stays outside.
            return torch.compiler.disable(_see)(func, args, kwargs or {})
        return _see(func, args, kwargs or {})


def _see(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func not in QUESTIONS:
        found = [*_seen_among(args), *_seen_among(kwargs.values())]
        for tensor in found:
            if isinstance(tensor, _Watched):
                _announce(cast(nn.Parameter, tensor))
        freed = [tensor for tensor in found if isinstance(tensor, _Seen)]
        if found and not freed:
            return func(*args, **kwargs)
        empty = [tensor for tensor in freed if _is_refused(tensor)]
        if empty:
            return _without_values(func, args, kwargs, empty)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class _Watched(_Seen):
    """Mixin for the class of a watched parameter."""

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
        return _text_of("Parameter", parameter)


class _ViewOfFreed(_Seen, Tensor):
    """A tensor that shares the memory of a freed parameter, such as its `data`: it has no values.

    It stays so when the parameter's values have come back: they are in other memory.
    """

    parameter: nn.Parameter

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        """Return where the values are."""
        return _text_of("View of a parameter", self)


def _text_of(kind: str, tensor: Tensor) -> str:
    return (
        f"{kind}(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, its values are"
        " sharded over the ranks; read them inside"
        " `with hadal.zero.GatheredParameters([parameter]):`)"
    )


def _owner(tensor: Tensor) -> nn.Parameter:
    """Return the parameter whose values a tensor would have."""
    return cast(nn.Parameter, tensor.parameter if isinstance(tensor, _ViewOfFreed) else tensor)


def _is_refused(tensor: Tensor) -> bool:
    """Return whether a watched tensor has no values; a parameter may have them."""
    if _owner(tensor) not in _described:
        return False
    if isinstance(tensor, _ViewOfFreed):
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def _without_values(func: Any, args: Any, kwargs: dict[str, Any], freed: Sequence[Tensor]) -> Any:
    """Run an operation on freed tensors if it needs no values: a view of them, say.

    Raises:
        ShardedAccessError: it would return values made from them, or write some.
    """
    name = getattr(func, "__name__", "")
    first = [*args, *kwargs.values()][:1]  # torch's initialisations pass it by its name
    targets = [*_seen_among(first if _is_in_place(name) else ()), *_seen_among([kwargs.get("out")])]
    written = [tensor for tensor in targets if _is_refused(tensor)]
    if written:
        raise ShardedAccessError(_lost_write(_owner(written[0])))
    if name == "numpy" and _owner(freed[0]) in _castable:
        gathered = gathered_to_copy(_owner(freed[0]))
        if gathered is not None and freed[0].shape == _owner(freed[0]).shape:
            with gathered:  # libraries hash a model by its values
                return _owner(freed[0]).detach().to(freed[0], copy=True).numpy()
    if name in _RETURN_NUMBERS or _is_in_place(name):
        raise ShardedAccessError(_missing_read(_owner(freed[0]), name))
    is_first = any(value is freed[0] for value in first)
    with torch._C.DisableTorchFunctionSubclass():
        if is_first and name in _KEEP_FORM and _owner(freed[0]) in _castable:
            return _converted(func, freed[0], args[1:], kwargs)
        result = func(*args, **kwargs)
        if name in _ASK_FORM and not is_first:
            return result
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in freed}
        return _checked(result, memory, name)


def _converted(func: Any, tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """Cast or move a placeholder; the result is one too.

    Raises:
        ShardedAccessError: the result has another shape.
    """
    one = tensor[(slice(0, 1),) * tensor.dim()]
    result = func(one, *args, **kwargs)
    if result is one or not isinstance(result, Tensor):
        return tensor if result is one else result
    if result.shape != one.shape:
        raise ShardedAccessError(_missing_read(_owner(tensor), func.__name__))
    return _as_view(result.expand(tensor.shape), tensor)


def _is_in_place(name: str) -> bool:
    is_plain = name.endswith("_") and not name.endswith("__") and name not in _WRITE_NOTHING
    return is_plain or name in _IN_PLACE


def _checked(result: Any, memory: dict[int, Tensor], name: str) -> Any:
    """Return a result that shares the memory of freed tensors, as a view of them."""
    if type(result) in (list, tuple):
        return type(result)(_checked(value, memory, name) for value in result)
    if not isinstance(result, Tensor) or isinstance(result, _Seen):
        return result
    source = memory.get(result.untyped_storage().data_ptr())
    if source is not None:
        return _as_view(result, source)
    if name.endswith("_like") or name in _RETURN_NO_VALUES:
        return result
    raise ShardedAccessError(_missing_read(_owner(next(iter(memory.values()))), name))


def _as_view(result: Tensor, source: Tensor) -> _ViewOfFreed:
    view = result.as_subclass(_ViewOfFreed)
    view.parameter = _owner(source)
    return view


def _lost_write(parameter: nn.Parameter) -> str:
    return (
        f"{_described[parameter]()} was written to while its values were sharded over the ranks,"
        " so the write is lost. Write inside"
        " `with hadal.zero.GatheredParameters([parameter], modifier_rank=0):`."
    )


def _missing_read(parameter: nn.Parameter, name: str) -> str:
    cast = " Change a model's dtype or device before hadal.initialize." if name in _CONVERT else ""
    return (
        f"{_described[parameter]()} was read ({name}) while its values are sharded over the ranks."
        " Read it in the model's forward, or on every rank inside"
        f" `with hadal.zero.GatheredParameters([parameter]):`.{cast}"
    )


def _seen_among(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, _Seen):
            yield cast(Tensor, value)
        elif type(value) in (list, tuple):
            yield from _seen_among(value)


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


# ---- the kinds of parameters that a flat buffer can hold -----------------------------------------

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
