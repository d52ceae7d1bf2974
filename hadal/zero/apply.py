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

from hadal.device import unwatched
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
    touched = Touched(_freed_bucket)

    def watched(module: nn.Module) -> None:
        fn(module)
        touched.keep(1)  # the next call mostly works on the same bucket

    try:
        with attended(), ReadWatcher(touched.on_read):
            return _plain_apply(self, watched)
    finally:
        touched.keep(0)


def _freed_bucket(parameter: nn.Parameter) -> Bucket | None:
    """The bucket of a parameter whose weights are cut over the ranks, where it may be gathered."""
    keeper = access.keeper_of(parameter)
    if keeper is None or parameter in _left_alone:
        return None
    bucket = keeper.bucket_of[parameter]
    return bucket if bucket.partition.weights else None


class Touched:
    """The buckets that are gathered at the moment because an operation touched a parameter.

    At most the `limit` latest stay gathered: a value that an initialisation still holds must not be
    freed under it.
    """

    def __init__(
        self, bucket_of: Callable[[nn.Parameter], Bucket | None], limit: int | None = None
    ) -> None:
        self._bucket_of = bucket_of
        self._limit = limit
        self._held: OrderedDict[Bucket, AbstractContextManager[None]] = OrderedDict()

    def on_read(self, parameter: nn.Parameter) -> None:
        """Gather the bucket of a parameter that is about to be read or written."""
        bucket = self._bucket_of(parameter)
        if bucket is None:
            return
        if bucket not in self._held:
            keeper = access.keeper_of(parameter)
            assert keeper is not None  # it lies in a bucket
            context = keeper.editing(bucket)
            with unwatched():
                context.__enter__()
            self._held[bucket] = context
        self._held.move_to_end(bucket)
        if self._limit is not None:
            self.keep(self._limit)

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._held

    def keep(self, count: int) -> None:
        """Take rank 0's values of all but the `count` latest, on every rank, and free them."""
        while len(self._held) > count:
            with unwatched():
                self._held.popitem(last=False)[1].__exit__(None, None, None)
