"""`Module.apply` on freed weights: the functions given to it see and change real values.

Initialisations go through `apply`, often on a model that is built already. While one runs,
parameters that it touches are gathered, whichever module they belong to; rank 0's values are kept,
on every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.zero import access
from hadal.zero.bucket import Bucket
from hadal.zero.hooks import ReadWatcher

_M = TypeVar("_M", bound=nn.Module)
_plain_apply = nn.Module.apply
_left_alone: WeakIdKeyDictionary = WeakIdKeyDictionary()
# How many contexts, or applies further out, see to the parameters already.
_attended = 0


def watch_apply() -> None:
    """Take the place of `nn.Module.apply`; on modules without freed weights nothing changes."""
    nn.Module.apply = _gathering_apply  # type: ignore[method-assign]


def leave_alone(parameters: Iterable[nn.Parameter]) -> None:
    """Do not gather these for `apply` (`zero_optimization.override_module_apply` is false)."""
    for parameter in parameters:
        _left_alone[parameter] = True


@contextmanager
def attended() -> Iterator[None]:
    """While it lasts somebody else gathers what is touched."""
    global _attended
    _attended += 1
    try:
        yield
    finally:
        _attended -= 1


def _gathering_apply(self: _M, fn: Callable[[nn.Module], None]) -> _M:
    if _attended or all(_freed_bucket(parameter) is None for parameter in self.parameters()):
        return _plain_apply(self, fn)
    touched = _Touched()

    def watched(module: nn.Module) -> None:
        fn(module)
        touched.end_all_but_latest()

    try:
        with attended(), ReadWatcher(touched.on_read):
            return _plain_apply(self, watched)
    finally:
        touched.end_all()


def _freed_bucket(parameter: nn.Parameter) -> Bucket | None:
    """The bucket of a parameter whose weights are cut over the ranks, where it may be gathered."""
    keeper = access.keeper_of(parameter)
    if keeper is None or parameter in _left_alone:
        return None
    bucket = keeper.bucket_of[parameter]
    return bucket if bucket.partition.weights else None


class _Touched:
    """The buckets that are gathered at the moment because something touched them."""

    def __init__(self) -> None:
        self._held: OrderedDict[Bucket, AbstractContextManager[None]] = OrderedDict()
        self._moves = False

    def on_read(self, parameter: nn.Parameter) -> None:
        """A parameter is about to be read or written."""
        bucket = None if self._moves else _freed_bucket(parameter)
        keeper = access.keeper_of(parameter)
        if bucket is None or keeper is None:
            return
        if bucket not in self._held:
            context = keeper.editing(bucket)
            self._move(lambda: context.__enter__())
            self._held[bucket] = context
        self._held.move_to_end(bucket)

    def end_all_but_latest(self) -> None:
        """Between two calls: the next one mostly works on the same bucket."""
        while len(self._held) > 1:
            self._end(self._held.popitem(last=False)[1])

    def end_all(self) -> None:
        """Keep rank 0's values and free everything."""
        while self._held:
            self._end(self._held.popitem(last=False)[1])

    def _end(self, context: AbstractContextManager[None]) -> None:
        self._move(lambda: context.__exit__(None, None, None))

    def _move(self, act: Callable[[], object]) -> None:
        """Whatever the moves themselves touch is no read."""
        self._moves = True
        try:
            act()
        finally:
            self._moves = False
