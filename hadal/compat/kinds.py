"""Kinds of exceptions: programs catch DeepSpeed's, and so Hadal's errors are of these kinds too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from hadal.errors import HadalError


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
