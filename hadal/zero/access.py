"""Reading and writing one whole parameter, wherever its values rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Protocol

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm import get_world_size
from hadal.comm.collectives import broadcast_
from hadal.errors import UsageError
from hadal.zero.bucket import Bucket
from hadal.zero.runtime import ZeroRuntime


class Keeper(Protocol):
    """Whoever holds the buckets of some parameters: an engine's runtime, or `zero.Init`."""

    @property
    def bucket_of(self) -> Mapping[nn.Parameter, Bucket]:
        """The bucket of each parameter that it holds."""

    def whole(self, buckets: Iterable[Bucket]) -> AbstractContextManager[None]:
        """A context in which these buckets are readable."""


# Who keeps a parameter, so that `GatheredParameters` needs nothing but the parameter.
_keepers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(keeper: Keeper, parameters: Iterable[nn.Parameter]) -> None:
    """Make parameters known to `GatheredParameters`."""
    for parameter in parameters:
        _keepers[parameter] = keeper


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `register`."""
    for parameter in parameters:
        _keepers.pop(parameter, None)


def is_kept_by_engine(parameter: nn.Parameter) -> bool:
    """Whether an engine's runtime holds this parameter."""
    return isinstance(_keepers.get(parameter), ZeroRuntime)


class GatheredParameters:
    """Make whole parameters readable for a while, and keep what one rank writes into them.

    A no-op for parameters that no engine manages. All ranks must enter it together.

    Args:
        params: a parameter, or several.
        modifier_rank: the rank whose changes inside are given to all ranks and kept, by its number
            among those that share the parameters (all ranks, but where parts of the model lie on
            several). With None each rank must make the same changes.
        fwd_module: accepted for DeepSpeed's signature; any module that reads an outside parameter
            is noticed by itself.
        enabled: False makes it a no-op.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._parameters = [p for p in given if enabled and p in _keepers]
        shared_by = (_keepers[p].bucket_of[p].ranks.size for p in self._parameters)
        size = min(shared_by, default=get_world_size())
        if modifier_rank is not None and not 0 <= modifier_rank < size:
            raise UsageError(
                f"GatheredParameters(modifier_rank={modifier_rank}): there is no such rank;"
                f" expected 0..{size - 1}, or None"
            )
        self._modifier_rank = modifier_rank
        self._stack = ExitStack()

    def __enter__(self) -> None:
        buckets: dict[Keeper, list[Bucket]] = {}
        for parameter in self._parameters:
            keeper = _keepers[parameter]
            buckets.setdefault(keeper, []).append(keeper.bucket_of[parameter])
        for keeper, held in buckets.items():
            self._stack.enter_context(keeper.whole(held))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            if kind is None and self._modifier_rank is not None:
                for parameter in self._parameters:
                    bucket = _keepers[parameter].bucket_of[parameter]
                    name = f"the broadcast of rank {self._modifier_rank}'s changes in {bucket.name}"
                    broadcast_(parameter.detach(), self._modifier_rank, bucket.ranks, name)
