"""Reading and writing one whole parameter, wherever its values are stored."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Protocol

from torch import Tensor, nn

from hadal.comm import get_world_size
from hadal.comm.collectives import broadcast_
from hadal.errors import CommunicationError, UsageError
from hadal.zero import copies
from hadal.zero.attached import Attached
from hadal.zero.bucket import Bucket
from hadal.zero.external import register_external_parameter
from hadal.zero.gathering import Phase
from hadal.zero.hooks import saving
from hadal.zero.runtime import ZeroRuntime


class Keeper(Protocol):
    """Whoever holds the buckets of some parameters: an engine's runtime, or `zero.Init`."""

    @property
    def bucket_of(self) -> copies.Buckets:
        """The bucket of each parameter that it holds."""

    def whole(self, buckets: Iterable[Bucket]) -> AbstractContextManager[None]:
        """A context in which these buckets are readable."""

    def editing(self, bucket: Bucket) -> AbstractContextManager[None]:
        """A context in which initialisations may work on a bucket; rank 0's values are kept."""


# Who keeps a parameter, so that `GatheredParameters` needs nothing but the parameter.
_keepers: Attached[Keeper] = Attached("keeper")


def register(keeper: Keeper, parameters: Iterable[nn.Parameter]) -> None:
    """Make parameters known to `GatheredParameters`, and keep copies of them honest."""
    for parameter in parameters:
        _keepers[parameter] = keeper
        copies.guard(parameter, keeper.bucket_of)


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `register`."""
    for parameter in parameters:
        _keepers.pop(parameter)
        copies.unguard(parameter)


def keeper_of(parameter: nn.Parameter) -> Keeper | None:
    """Who holds this parameter's bucket; None for a parameter of nobody's."""
    return _keepers.get(parameter)


def is_kept_by_engine(parameter: nn.Parameter) -> bool:
    """Whether an engine's runtime holds this parameter."""
    return isinstance(_keepers.get(parameter), ZeroRuntime)


class GatheredParameters:
    """Make whole parameters readable for a while, and keep what one rank writes into them.

    All ranks must enter and leave it together; it may be nested, and used inside forward. What is
    computed from the parameters inside may go into a loss: backward finds their values again.

    What the modifier rank had written before an exception is kept, on every rank: whichever rank
    raised, all of them leave with the same values.

    Args:
        params: a parameter, or several. What no engine and no `Init` holds (None, a buffer, an
            ordinary parameter) is passed over; what is whole already stays so.
        modifier_rank: the rank whose changes inside are given to all ranks and kept, by its number
            among those that share the parameters (all ranks, but where parts of the model lie on
            several); those of other ranks are overwritten. With None each rank must make the same
            changes.
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
            # Inside forward and backward this is done already.
            if isinstance(keeper, ZeroRuntime) and keeper.gathering.phase is Phase.IDLE:
                self._stack.enter_context(saving(keeper.gathering))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            if self._modifier_rank is None or not _can_go_on(error):
                return
            for parameter in self._parameters:
                bucket = _keepers[parameter].bucket_of[parameter]
                name = f"the broadcast of rank {self._modifier_rank}'s changes in {bucket.name}"
                broadcast_(parameter.detach(), self._modifier_rank, bucket.ranks, name)


def _can_go_on(error: BaseException | None) -> bool:
    """Whether the ranks still answer each other: an exception of the user's own code is no end."""
    ordinary = error is None or isinstance(error, Exception)
    return ordinary and not isinstance(error, CommunicationError)
