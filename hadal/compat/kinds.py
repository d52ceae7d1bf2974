"""Kinds of exceptions and objects: Hadal's count as DeepSpeed's where programs test for these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

from hadal.compat.surface import unbuilt
from hadal.errors import HadalError, UsageError


@contextmanager
def also(
    *kinds: type[Exception], of: tuple[type[HadalError], ...] = (HadalError,)
) -> Iterator[None]:
    """Let Hadal's errors inside be caught as these kinds too, if they are of `of`.

    Decorates functions.
    """
    try:
        yield
    except of as error:
        kind = type(error)
        missing = tuple(one for one in kinds if not issubclass(kind, one))
        if missing:
            error.__class__ = _both(kind, missing)  # type: ignore[arg-type]
        raise


@cache
def _both(kind: type[HadalError], kinds: tuple[type[Exception], ...]) -> type[HadalError]:
    def reduce(self: HadalError) -> Any:
        return kind, self.args  # ranks send errors to each other as their own kind

    contents = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduce}
    return type(kind.__name__, (kind, *kinds), contents)


class _Recognized(type):
    """A class without objects of its own: an object counts as one if it fits."""

    fits: Callable[[Any], bool]
    of: tuple[type, ...]
    remedy: str

    def __instancecheck__(cls, thing: Any) -> bool:
        """Return whether an object counts as one."""
        return cls.fits(thing)

    def __subclasscheck__(cls, kind: type) -> bool:
        """Return whether all objects of a class may count as one."""
        return type.__subclasscheck__(cls, kind) or issubclass(kind, cls.of)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Refuse a program's own method: nothing here would call it."""
        raise unbuilt(f"replacing {cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a UsageError: the class cannot be instantiated."""
        raise UsageError(f"{cls.__name__} cannot be created by programs: {cls.remedy}")


def recognized(
    name: str, doc: str, fits: Callable[[Any], bool], remedy: str, *of: type, **contents: Any
) -> Any:
    """Return a class for `isinstance`: `fits` tells its objects, `remedy` how to get one."""
    own = {"__doc__": doc, "fits": staticmethod(fits), "remedy": remedy, "of": of, **contents}
    return _Recognized(name, (), own)
