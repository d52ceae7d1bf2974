"""Copies of a parameter that lies in a bucket: values in memory of their own, or a refusal.

`copy.deepcopy` and `pickle` (so `torch.save` too) ask the object itself first, so each parameter
that a bucket holds is given its own answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from hadal.errors import ShardedAccessError
from hadal.zero.attached import is_attached
from hadal.zero.bucket import Bucket
from hadal.zero.kinds import alone

_COPY, _PICKLE = "__deepcopy__", "__reduce_ex__"
Gather = Callable[[nn.Parameter], AbstractContextManager[None]]
_gather: list[Gather] = []


class Buckets(Protocol):
    """The bucket of each parameter that somebody holds."""

    def __getitem__(self, parameter: nn.Parameter, /) -> Bucket: ...


def gather_to_copy(gather: Gather | None) -> None:
    """Let `copy.deepcopy` gather values that are spread, in the place of refusing; None: refuse.

    All ranks must copy then. Programs that are known to do so are those whose libraries copy
    modules at stage 3 on every rank.
    """
    _gather[:] = [] if gather is None else [gather]


def guard(parameter: nn.Parameter, bucket_of: Buckets) -> None:
    """Let copies of `parameter` hold its values in memory of their own, not its whole bucket."""
    guarded = _Guarded(parameter, bucket_of)
    setattr(parameter, _COPY, guarded.deepcopy)
    setattr(parameter, _PICKLE, guarded.reduce)


def unguard(parameter: nn.Parameter) -> None:
    """Undo `guard`."""
    for name in (_COPY, _PICKLE):
        vars(parameter).pop(name, None)


class _Guarded:
    """One guarded parameter, held weakly: it is the parameter that holds this."""

    __slots__ = ("_bucket_of", "_parameter")

    def __init__(self, parameter: nn.Parameter, bucket_of: Buckets) -> None:
        self._parameter = weakref.ref(parameter)
        self._bucket_of = bucket_of

    def deepcopy(self, memo: dict[int, Any]) -> nn.Parameter:
        """Answer `copy.deepcopy`."""
        parameter = self._parameter()
        assert parameter is not None  # it is being copied
        if id(parameter) not in memo:
            memo[id(parameter)] = self._copied(parameter, "copied")
        copied: nn.Parameter = memo[id(parameter)]
        return copied

    def reduce(self, protocol: Any) -> Any:
        """Answer `pickle`."""
        parameter = self._parameter()
        assert parameter is not None  # it is being pickled
        copied = self._copied(parameter, "pickled")
        own = {
            name: value
            for name, value in vars(parameter).items()
            if name not in _NAMES and not is_attached(name)
        }
        vars(copied).update(own)
        return copied.__reduce_ex__(protocol)

    def _copied(self, parameter: nn.Parameter, verb: str) -> nn.Parameter:
        # Where reads are watched (forward, `zero.Init`) this look gathers the values.
        values = parameter.data
        # A placeholder is one element, spread over the shape.
        if values.numel() > 1 and not any(values.stride()):
            if _gather and verb == "copied":
                with _gather[0](parameter):
                    return alone(parameter, parameter.data.clone())
            bucket = self._bucket_of[parameter]
            pairs = zip(bucket.layout.slots, bucket.parameters, strict=True)
            name = next(slot.name for slot, known in pairs if known is parameter)
            raise ShardedAccessError(
                f"rank {bucket.ranks.rank}: parameter {name} was {verb} while its values are"
                " spread over the ranks. Go inside `with"
                " hadal.zero.GatheredParameters(model.parameters()):` on every rank, or take"
                " engine.state_dict()."
            )
        return alone(parameter, values.clone())


_NAMES = frozenset((_COPY, _PICKLE))
