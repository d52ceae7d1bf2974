"""Placeholders for names that are not built yet: importable, but they raise when used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hadal.compat.surface import NameKind
from hadal.errors import NotBuiltYetError

_WHOLE_SEQUENCES = (
    "The key sequence_parallel_size splits the sequences of transformers' models; other attention"
    " can be wrapped in hadal.sequence.DistributedAttention"
)
_INSTEAD = {
    "deepspeed.sequence.fpdt_layer.": (
        "For long sequences use sequence_parallel_size (a ring if ranks outnumber heads),"
        " hadal.sequence.TiledMLP, hadal.sequence.linear_cross_entropy and"
        " activation_checkpointing.cpu_checkpointing"
    ),
    "deepspeed.sequence.auto": _WHOLE_SEQUENCES,
    "deepspeed.compile.init_sp.": _WHOLE_SEQUENCES,
    "deepspeed.compile.passes.sp_compile.": _WHOLE_SEQUENCES,
}
"""Prefix of a name -> Hadal's replacement for it."""


def unbuilt(name: str, instead: str | None = None) -> NotBuiltYetError:
    """Return the error for a name that has no home yet; it names a replacement if there is one."""
    if instead is None:
        found = (remedy for start, remedy in _INSTEAD.items() if name.startswith(start))
        instead = next(found, "Do without it")
    return NotBuiltYetError(
        f"{name} is not built yet: the name can be imported, but has no implementation."
        f" {instead}, or run this program with DeepSpeed itself"
    )


def placeholder(name: str, kind: NameKind) -> Any:
    """Return a placeholder for `name`, which raises when it is called or used."""
    if kind is NameKind.FUNCTION:
        return _function(name)
    if kind is NameKind.CLASS:
        leaf = name.rpartition(".")[2]
        return _UnbuiltType(leaf, (_Unbuilt,), {"__module__": name.rpartition(".")[0]})
    return _Value(name)


def _function(name: str) -> Callable[..., NoReturn]:
    def not_built(*args: Any, **kwargs: Any) -> NoReturn:
        raise unbuilt(name)

    not_built.__name__ = name.rpartition(".")[2]
    not_built.__qualname__ = not_built.__name__
    not_built.__doc__ = f"{name}: not built yet; raises when it is called."
    return not_built


class _UnbuiltType(type):
    """Lets a class be imported, subclassed and tested by `isinstance`; anything else raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unbuilt(f"{cls.__module__}.{cls.__name__}.{name}")


class _Unbuilt(metaclass=_UnbuiltType):
    """An instance of a class that is not built; there are none."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Unbuilt:
        named = next(c for c in cls.__mro__ if _Unbuilt in c.__bases__)
        raise unbuilt(f"{named.__module__}.{named.__name__}")


class _Value:
    """A value that is not known here; using it raises."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def _refuse(self, *args: Any) -> NoReturn:
        raise unbuilt(object.__getattribute__(self, "_name"))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # copying, inspecting and printing modules looks these up
        self._refuse()

    def __bool__(self) -> bool:
        self._refuse()

    def __eq__(self, other: object) -> bool:
        self._refuse()

    def __hash__(self) -> int:
        self._refuse()

    def __str__(self) -> str:
        self._refuse()

    __call__ = __contains__ = __getitem__ = __iter__ = __len__ = __setattr__ = _refuse
