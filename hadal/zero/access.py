"""Temporary access to whole parameters, wherever their values are stored, and copies of them.

Used by `GatheredParameters`, functions passed to `Module.apply`, `copy.deepcopy` and `pickle` (and
so by `torch.save`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm import get_world_size
from hadal.comm.collectives import broadcast_
from hadal.device import unwatched
from hadal.errors import CommunicationError, ShardedAccessError, UsageError
from hadal.zero.bucket import Bucket
from hadal.zero.gathering import Phase
from hadal.zero.grouping import register_external_parameter
from hadal.zero.hooks import ReadWatcher, saving, watch_wrappers
from hadal.zero.parameters import Attached, alone, gathered_to_copy, guard, is_attached, unguard
from hadal.zero.runtime import ZeroRuntime


class BucketOf(Protocol):
    """A table of buckets by parameter."""

    def __getitem__(self, parameter: nn.Parameter, /) -> Bucket:
        """Return the bucket of a parameter."""


class Keeper(Protocol):
    """The holder of some parameters' buckets: an engine's runtime, or `zero.Init`."""

    @property
    def bucket_of(self) -> BucketOf:
        """The bucket of each parameter that it holds."""

    def whole(self, buckets: Iterable[Bucket]) -> AbstractContextManager[None]:
        """Return a context in which these buckets are readable."""

    def editing(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Return a context in which initialisations may edit a bucket; rank 0's values are kept."""


# The keeper of each parameter, so that `GatheredParameters` needs nothing but the parameter.
_keepers: Attached[Keeper] = Attached("keeper")
_COPY, _PICKLE = "__deepcopy__", "__reduce_ex__"
_M = TypeVar("_M", bound=nn.Module)
_plain_apply = nn.Module.apply
_left_alone: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The number of active contexts and outer `apply` calls that gather parameters already.
_attended = 0


def register(keeper: Keeper, parameters: Iterable[nn.Parameter]) -> None:
    """Make parameters known to `GatheredParameters`, and make copies of them hold real values."""
    for parameter in parameters:
        _keepers[parameter] = keeper
        held = weakref.ref(parameter)  # the parameter itself holds these
        setattr(parameter, _COPY, partial(_deepcopied, held))
        setattr(parameter, _PICKLE, partial(_reduced, held))
        is_early = not isinstance(keeper, ZeroRuntime)
        guard(parameter, partial(_described, held), may_be_cast=is_early)


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `register`."""
    for parameter in parameters:
        _keepers.pop(parameter)
        unguard(parameter)
        for name in (_COPY, _PICKLE):
            vars(parameter).pop(name, None)


def _described(held: weakref.ref[nn.Parameter]) -> str:
    """Return the rank and the full name of a parameter, for errors."""
    parameter = held()
    assert parameter is not None  # an operation has it
    bucket = _keepers[parameter].bucket_of[parameter]
    return f"rank {bucket.ranks.rank}: parameter {bucket.slot_of(parameter).name}"


def keeper_of(parameter: nn.Parameter) -> Keeper | None:
    """Return the keeper of this parameter's bucket; None if it has none."""
    return _keepers.get(parameter)


def is_kept_by_engine(parameter: nn.Parameter) -> bool:
    """Return True if an engine's runtime holds this parameter."""
    return isinstance(_keepers.get(parameter), ZeroRuntime)


class GatheredParameters:
    """A context in which parameters are whole, and which keeps one rank's changes to them.

    All ranks must enter and leave it together; it may be nested, and used inside forward. A loss
    may depend on values computed from the parameters inside: backward gathers them again. Views of
    whole parameters that are kept (`parameter.detach()`, a state dict) keep their values, and their
    memory, outside of forward and backward.

    While all of a model's parameters are whole, evaluating it (under `torch.no_grad()`) involves no
    other rank: ranks may generate texts of different lengths inside.

    If the block raises, the modifier rank's changes so far are kept on every rank: whichever rank
    raised, all ranks leave with the same values.

    Args:
        params: a parameter, or several. Those that no engine and no `Init` holds (None, a buffer,
            an ordinary parameter) are skipped; whole ones stay whole.
        modifier_rank: the rank whose changes in the block are broadcast and kept, counted among the
            ranks that share the parameters (all ranks, unless the model is split over several).
            Changes on other ranks are overwritten. With None all ranks must make the same changes.
        fwd_module: a module whose forward reads these parameters without owning them
            (`register_external_parameter`).
        enabled: False makes it a no-op.

    Raises:
        UsageError: there is no rank `modifier_rank`.
    """

    def __init__(
        self,
        params: Iterable[Tensor | None] | Tensor,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        wanted = [p for p in given if enabled and isinstance(p, nn.Parameter)]
        self._parameters = [p for p in dict.fromkeys(wanted) if p in _keepers]
        shared_by = (_keepers[p].bucket_of[p].ranks.size for p in self._parameters)
        size = min(shared_by, default=get_world_size())
        if modifier_rank is not None and not 0 <= modifier_rank < size:
            raise UsageError(
                f"GatheredParameters(modifier_rank={modifier_rank}): there is no such rank;"
                f" expected 0..{size - 1}, or None"
            )
        self._modifier_rank = modifier_rank
        self._stack = ExitStack()
        if fwd_module is not None:
            for parameter in self._parameters:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        buckets: dict[Keeper, list[Bucket]] = {}
        for parameter in self._parameters:
            keeper = _keepers[parameter]
            buckets.setdefault(keeper, []).append(keeper.bucket_of[parameter])
        for keeper, held in buckets.items():
            self._stack.enter_context(keeper.whole(held))
            # Forward and backward are in this context already.
            if isinstance(keeper, ZeroRuntime) and keeper.gathering.phase is Phase.IDLE:
                self._stack.enter_context(saving(keeper.gathering))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self._stack:
            # After an error in the user's code the ranks can still communicate.
            is_cut_short = not isinstance(error, Exception | None)
            if self._modifier_rank is None or is_cut_short or isinstance(error, CommunicationError):
                return
            for parameter in self._parameters:
                bucket = _keepers[parameter].bucket_of[parameter]
                name = f"the broadcast of rank {self._modifier_rank}'s changes in {bucket.name}"
                broadcast_(parameter.detach(), self._modifier_rank, bucket.ranks, name)
                # torch does not count writes by collectives, and on an accelerator nothing else
                # shows that there was one.
                increment_version(parameter)


# ---- `Module.apply` ------------------------------------------------------------------------------
#
# Initialisations often call `apply` on a model that is already built. While one runs, the
# parameters that it touches are gathered, whichever module owns them, and rank 0's values are kept
# on every rank.


def watch_apply() -> None:
    """Replace `nn.Module.apply`; nothing changes for modules without freed weights."""
    nn.Module.apply = _gathering_apply  # type: ignore[method-assign]
    watch_wrappers(_keepers.__contains__)


def leave_alone(parameters: Iterable[nn.Parameter]) -> None:
    """Do not gather these for `apply` (`zero_optimization.override_module_apply` is false)."""
    for parameter in parameters:
        _left_alone[parameter] = True


@contextmanager
def attended() -> Iterator[None]:
    """Leave the gathering of touched parameters to the caller inside the block."""
    global _attended
    _attended += 1
    try:
        yield
    finally:
        _attended -= 1


def _gathering_apply(self: _M, fn: Callable[[nn.Module], None]) -> _M:
    if _attended or all(_freed_bucket(parameter) is None for parameter in self.parameters()):
        return _plain_apply(self, fn)
    touched = RecentBuckets(_freed_bucket)

    def watched(module: nn.Module) -> None:
        fn(module)
        touched.keep(1)  # the next call usually works on the same bucket

    try:
        with attended(), ReadWatcher(touched.on_read):
            return _plain_apply(self, watched)
    finally:
        touched.keep(0)


def _freed_bucket(parameter: nn.Parameter) -> Bucket | None:
    """Return the bucket of a freed parameter, if it may be gathered."""
    keeper = keeper_of(parameter)
    if keeper is None or parameter in _left_alone:
        return None
    bucket = keeper.bucket_of[parameter]
    return bucket if bucket.partition.weights else None


class RecentBuckets:
    """The buckets that are gathered now because an operation touched a parameter.

    At most the latest `limit` of them stay gathered: an initialisation may still use the values of
    the last few.
    """

    def __init__(
        self, bucket_of: Callable[[nn.Parameter], Bucket | None], limit: int | None = None
    ) -> None:
        self._bucket_of = bucket_of
        self._limit = limit
        self._held: OrderedDict[Bucket, AbstractContextManager[None]] = OrderedDict()

    def on_read(self, parameter: nn.Parameter) -> None:
        """Gather the bucket of a parameter before it is read or written."""
        bucket = self._bucket_of(parameter)
        if bucket is None:
            return
        if bucket not in self._held:
            keeper = keeper_of(parameter)
            assert keeper is not None  # it is in a bucket
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
        """Free all but the latest `count` buckets; rank 0's values of them are kept."""
        while len(self._held) > count:
            with unwatched():
                self._held.popitem(last=False)[1].__exit__(None, None, None)


# ---- copies --------------------------------------------------------------------------------------
#
# `copy.deepcopy` and `pickle` call methods of the object, so each parameter in a bucket gets its
# own methods, which return values in separate memory or raise an error.


def _deepcopied(held: weakref.ref[nn.Parameter], memo: dict[int, Any]) -> nn.Parameter:
    """Return a copy for `copy.deepcopy`."""
    parameter = held()
    assert parameter is not None  # it is being copied
    if id(parameter) not in memo:
        memo[id(parameter)] = _copied(parameter, "copied")
    copied: nn.Parameter = memo[id(parameter)]
    return copied


def _reduced(held: weakref.ref[nn.Parameter], protocol: Any) -> Any:
    """Return the reduction for `pickle`."""
    parameter = held()
    assert parameter is not None  # it is being pickled
    copied = _copied(parameter, "pickled")
    for name, value in vars(parameter).items():
        if name not in (_COPY, _PICKLE) and not is_attached(name):
            vars(copied)[name] = value
    return copied.__reduce_ex__(protocol)


def _copied(parameter: nn.Parameter, verb: str) -> nn.Parameter:
    # If reads are watched (forward, `zero.Init`), this read gathers the values.
    values = parameter.data
    # A placeholder is one element, expanded to the shape.
    if values.numel() > 1 and not any(values.stride()):
        gathered = gathered_to_copy(parameter) if verb == "copied" else None
        if gathered is not None:
            with gathered:
                return alone(parameter, parameter.data.clone())
        bucket = _keepers[parameter].bucket_of[parameter]
        raise ShardedAccessError(
            f"rank {bucket.ranks.rank}: parameter {bucket.slot_of(parameter).name} was {verb} while"
            " its values were sharded over the ranks. Use `with"
            " hadal.zero.GatheredParameters(model.parameters()):` on every rank, or call"
            " engine.state_dict()."
        )
    return alone(parameter, values.clone())
