"""Which parameters got no gradient in a whole update, for those who want to be told."""

from __future__ import annotations

from collections.abc import Sequence

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes, gather_objects
from hadal.errors import ModelError
from hadal.zero.gradients import Gradients

_SHOWN = 20


class UnusedCheck:
    """Remembers which gradients came on this rank since the last update."""

    def __init__(self, gradients: Sequence[Gradients], ranks: Ranks) -> None:
        self._ranks = ranks
        self._gradients = list(gradients)
        self._came: set[tuple[Gradients, int]] = set()
        self._passed = False

    def came(self, gradients: Gradients, index: int) -> None:
        """A gradient came for parameter number `index` of a bucket."""
        self._came.add((gradients, index))

    def clear(self) -> None:
        """After an update: everything is missing anew."""
        self._came.clear()
        self._passed = False

    def _missing(self) -> list[str]:
        """Full names of what has elements, is not frozen meanwhile, and got nothing."""
        return [
            slot.name
            for one in self._gradients
            for index, slot in enumerate(one.bucket.layout.slots)
            if slot.numel
            and one.bucket.parameters[index].requires_grad
            and (one, index) not in self._came
        ]

    def fault(self) -> ModelError | None:
        """The same error on every rank, where a parameter got no gradient on some rank.

        Ranks talk until nothing is missing, and no more in that update.
        """
        mine = [] if self._passed else self._missing()
        if self._passed or not any(gather_codes(len(mine), self._ranks)):
            self._passed = True
            return None
        ranks_of: dict[str, list[int]] = {}
        for rank, names in enumerate(gather_objects(mine, self._ranks)):
            for name in names:
                ranks_of.setdefault(name, []).append(rank)
        told = [f"{name} (rank {', '.join(map(str, r))})" for name, r in ranks_of.items()]
        rest = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        return ModelError(
            f"no gradient came in this update for {'; '.join(told[:_SHOWN])}{rest}. Let the loss"
            " depend on each parameter, freeze those that it shall not (requires_grad_(False)), or"
            " leave out zero_optimization.ignore_unused_parameters: then they count as zero."
        )
