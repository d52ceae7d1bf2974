"""Prediction of the next trace from earlier ones, also for models that alternate.

Nothing here communicates: all ranks get the same input and predict the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.zero.trace import Kind, Trace

# A prediction earns credit when it comes true and loses credit when it does not; it starts with the
# most. Without credit (after three failures in a row, or more than one in four) it is not used.
_EARNED, _COST, _CREDIT = 1, 3, 9
# The number of contexts of one kind that are remembered.
_CONTEXTS = 48

# The paths of the two preceding passes; `_ANY` matches every path.
_Context = tuple[int | None, int | None]
_ANY = -1
_LAST_RESORT: _Context = (_ANY, _ANY)


@dataclass(slots=True)
class _Memory:
    """The trace that followed some context."""

    trace: Trace
    credit: int = _CREDIT
    is_doubted: bool = False
    """True: another trace followed the last time; if one does again, it replaces this one."""


class Foresight:
    """A memory of which trace followed which.

    A forward is predicted from the two before it, so that two alternating models, or two steps of
    each, are distinguished; if this order is new, from the one before it; otherwise the latest
    trace is predicted. A backward is predicted from its forward, or from the backward just before.
    """

    def __init__(self) -> None:
        self._memories: dict[Kind, dict[_Context, _Memory]] = {kind: {} for kind in Kind}
        self._history: dict[Kind, _Context] = dict.fromkeys(Kind, (None, None))

    def forget(self, kind: Kind) -> None:
        """Forget the traces of a kind, because the next ones will differ."""
        self._memories[kind].clear()

    def expected(self, kind: Kind) -> Trace | None:
        """Return the trace to plan for; None if none is known or predictions failed too often."""
        memory = self._memory(kind)
        return None if memory is None or memory.credit <= 0 else memory.trace

    def likely(self, kind: Kind, before: Trace | None = None) -> Trace | None:
        """Return the trace that may come next, or the backward that may follow `before`, if any."""
        if before is None:
            memory = self._memory(kind)
        else:
            memory = self._memories[kind].get((before.path_digest, None))
        return None if memory is None else memory.trace

    def came(
        self, kind: Kind, trace: Trace | None, *, has_held: bool | None, is_learned: bool = True
    ) -> bool:
        """Record the end of a pass.

        Args:
            kind: its kind.
            trace: the trace of all ranks; None if the ranks took different paths.
            has_held: True if the prediction came true; None if nothing was planned.
            is_learned: True if the trace may occur again.

        Returns:
            True if the prediction will not be used any more.
        """
        memory = self._memory(kind)
        if memory is not None and has_held is not None:
            earned = _EARNED if has_held else -_COST
            memory.credit = min(_CREDIT, memory.credit + earned)
        if trace is not None and is_learned:
            self._learn(kind, trace, surprises=has_held is False)
        self._note(kind, None if trace is None else trace.path_digest)
        return memory is not None and memory.credit <= 0

    def _contexts(self, kind: Kind) -> list[_Context]:
        """Return the contexts to search, the nearest first."""
        nearest = self._history[kind]
        if kind is Kind.BACKWARD:
            return [nearest]
        return [nearest, (_ANY, nearest[1]), _LAST_RESORT]

    def _memory(self, kind: Kind) -> _Memory | None:
        memories = self._memories[kind]
        found = (memories[context] for context in self._contexts(kind) if context in memories)
        return next(found, None)

    def _learn(self, kind: Kind, trace: Trace, *, surprises: bool) -> None:
        memories = self._memories[kind]
        if len(memories) >= _CONTEXTS:
            memories.clear()
        for context in self._contexts(kind):
            known = memories.setdefault(context, _Memory(trace))
            is_other = known.trace != trace
            known.is_doubted = (
                is_other and surprises and not known.is_doubted and context != _LAST_RESORT
            )
            if not known.is_doubted:
                known.trace = trace

    def _note(self, kind: Kind, path: int | None) -> None:
        if kind is Kind.BACKWARD:
            self._history[kind] = (self._history[kind][0], path)
            return
        self._history[kind] = (self._history[kind][1], path)
        if kind is Kind.FORWARD:
            self._history[Kind.BACKWARD] = (path, None)
