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
        self._names = {
            g: [slot.name for slot in g.bucket.layout.slots if slot.numel] for g in gradients
        }
        self._missing = self._everything()

    def _everything(self) -> dict[Gradients, dict[str, None]]:
        return {g: dict.fromkeys(names) for g, names in self._names.items()}

    def came(self, gradients: Gradients, index: int) -> None:
        """A gradient came for parameter number `index` of a bucket."""
        name = gradients.bucket.layout.slots[index].name
        self._missing[gradients].pop(name, None)

    def clear(self) -> None:
        """After an update: everything is missing anew."""
        self._missing = self._everything()

    def fault(self) -> ModelError | None:
        """The same error on every rank, where a parameter got no gradient on some rank."""
        mine = [name for missing in self._missing.values() for name in missing]
        if not any(gather_codes(len(mine), self._ranks)):
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
