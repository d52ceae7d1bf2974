"""Graph passes of DeepSpeed's compiler, as the words that a schedule of `engine.compile` names.

Gathers and reductions stay outside the graphs here, where they are scheduled ahead at any stage; so
a pass asks for what the engine does anyway, or, to move the optimizer's state, for what it then
does around each forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NoReturn

from hadal.errors import NotBuiltYetError, UsageError


class GraphPass(str, Enum):
    """Passes by the names that DeepSpeed registers."""

    REDUCE_AT_STAGE_1 = "zero1_compile"
    REDUCE_AT_STAGE_2 = "zero2_compile"
    GATHER = "zero3_compile"
    PREFETCH = "prefetch"
    SELECTIVE_GATHER = "selective_gather"
    OFFLOAD_PARAMETERS = "offload_parameters"
    OFFLOAD_STATES = "offload_adam_states"
    OFFLOAD_STATES_SYNC = "offload_adam_states_sync"
    OFFLOAD_STATES_FOR_INIT = "offload_adam_states_for_init"

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to change a graph."""
        raise UsageError(
            f"the pass {self.value} was called with a graph; name it in engine.compile("
            "schedule=[(update, [passes])]), as graphs hold no collectives here"
        )


_STAGES = {
    GraphPass.REDUCE_AT_STAGE_1: 1,
    GraphPass.REDUCE_AT_STAGE_2: 2,
    **dict.fromkeys((GraphPass.GATHER, GraphPass.PREFETCH, GraphPass.SELECTIVE_GATHER), 3),
}
_MOVERS = {
    GraphPass.OFFLOAD_STATES,
    GraphPass.OFFLOAD_STATES_SYNC,
    GraphPass.OFFLOAD_STATES_FOR_INIT,
}

Moves = tuple[tuple[int, bool], ...]
"""Updates in ascending order, each with whether the optimizer's state is off the device in forward
and backward from then on."""


def moves_of(schedule: Iterable[tuple[int, Sequence[Any]]], stage: int) -> Moves:
    """Return when a schedule of passes moves the optimizer's state.

    Args:
        schedule: pairs of an update and the passes, or their names, that apply from it on; those of
            an earlier pair no longer do.
        stage: the ZeRO stage.

    Raises:
        UsageError: an entry is no such pair, updates are not ascending, or a pass is for another
            stage, or is not known.
        NotBuiltYetError: a pass moves parameters.
    """
    found: list[tuple[int, bool]] = []
    for entry in schedule:
        match entry:
            case [int(update), [*names]]:
                pass
            case _:
                raise UsageError(
                    f"engine.compile(schedule=...) has {entry!r}, expected pairs of an update and"
                    ' a list of passes, such as (5, ["offload_adam_states"])'
                )
        if found and update <= found[-1][0]:
            raise UsageError(
                f"engine.compile(schedule=...) has update {update} after {found[-1][0]}; list the"
                " updates in ascending order"
            )
        found.append((update, any([_expect(name, stage) in _MOVERS for name in names])))
    return tuple(found)


def moves_states(moves: Moves, update: int) -> bool:
    """Return whether the optimizer's state is off the device in an update's passes."""
    return any([is_off for begin, is_off in moves if begin <= update][-1:])


def _expect(name: Any, stage: int) -> GraphPass:
    known = [one.value for one in GraphPass]
    if name not in known:
        raise UsageError(
            f"engine.compile(schedule=...) has the pass {name!r}, expected some of"
            f" {', '.join(known)}. A function that changes graphs is a backend:"
            " engine.compile(backend=function)"
        )
    found = GraphPass(name)
    if found is GraphPass.OFFLOAD_PARAMETERS:
        raise NotBuiltYetError(
            f"engine.compile(schedule=...): the pass {found.value} is not built yet;"
            " zero_optimization.offload_param keeps weights in host memory"
        )
    needed = _STAGES.get(found, stage)
    if needed != stage:
        raise UsageError(
            f"engine.compile(schedule=...) has the pass {found.value} of stage {needed} at"
            f" zero_optimization.stage {stage}; remove it, or set that stage"
        )
    return found
