"""The usual ZeRO stages and tiers, each planned, and the first one that fits."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hadal.engine.foresight import Foresight, Planner
from hadal.zero.estimate import PLANS, MemoryPlan

# The fraction of a device's memory that is for all but activations, if these are not planned.
_ROOM = 0.8


def plan_stages(
    planner: Planner, batch: Any = None, precision: str = "bf16"
) -> dict[MemoryPlan, Foresight]:
    """Plan a model under each of `PLANS`, with Adam and default keys; `batch` as in `plan`."""
    found = {}
    tensors = (one for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.dim())
    rows = next(map(len, tensors), 1)
    for chosen in PLANS:
        raw: dict[str, Any] = {"train_micro_batch_size_per_gpu": rows}
        raw["zero_optimization"] = chosen.section("/")
        raw |= {} if precision == "fp32" else {precision: {"enabled": True}}
        found[chosen] = planner.plan(raw, batch)
    return found


class MemoryFit(Enum):
    """A classification of how a rank's memory fits into its device."""

    GOOD = "fits"
    TIGHT = "tight"
    """Less than a fifth of the device is left for activations that are not planned."""
    NONE = "does not fit"

    @classmethod
    def of(cls, found: Foresight) -> MemoryFit:
        """Return how a plan fits."""
        if not found.fits:
            return cls.NONE
        room = (1 if found.moments else _ROOM) * found.cluster.device_nbytes
        return cls.GOOD if found.total.device <= room else cls.TIGHT


def best_plan(found: Mapping[MemoryPlan, Foresight]) -> MemoryPlan | None:
    """Return the first plan that fits, else the first that fits tightly, or None."""
    fits = {chosen: MemoryFit.of(plan) for chosen, plan in found.items()}
    best = min(fits, key=lambda chosen: [*MemoryFit].index(fits[chosen]))
    return None if fits[best] is MemoryFit.NONE else best
