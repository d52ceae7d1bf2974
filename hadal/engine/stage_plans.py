"""The usual ZeRO stages and tiers, each planned, and the first one that fits."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from hadal.engine.foresight import Foresight, Planner
from hadal.zero.policy import Tier

# The fraction of a device's memory that is for all but activations, if these are not planned.
_ROOM = 0.8


class MemoryPlan(NamedTuple):
    """A ZeRO stage, and the tiers of the optimizer and of the weights."""

    stage: int
    optimizer: Tier = Tier.DEVICE
    weights: Tier = Tier.DEVICE

    def section(self, folder: str) -> dict[str, Any]:
        """Return `zero_optimization` for it; `folder` is on the disk."""
        section: dict[str, Any] = {"stage": self.stage}
        for name, tier in (("offload_optimizer", self.optimizer), ("offload_param", self.weights)):
            if tier is Tier.HOST:
                section[name] = {"device": "cpu", "pin_memory": True}
            elif tier is Tier.DISK:
                section[name] = {"device": "nvme", "nvme_path": folder, "pin_memory": True}
        return section

    def named(self) -> dict[str, Any]:
        """Return the stage and the tiers as the configuration names them."""
        section, found = self.section(""), {"stage": self.stage}
        for name in ("offload_optimizer", "offload_param"):
            found[name] = section.get(name, {"device": "none"})["device"]
        return found


PLANS = (
    *(MemoryPlan(stage) for stage in range(4)),
    *(MemoryPlan(stage, Tier.HOST) for stage in range(4)),
    *(MemoryPlan(stage, Tier.DISK) for stage in (1, 2, 3)),
    MemoryPlan(3, Tier.HOST, Tier.HOST),
    MemoryPlan(3, Tier.DISK, Tier.DISK),
)
"""The usual plans, fastest first."""


def plan_stages(
    planner: Planner, batch: Any = None, precision: str = "bf16"
) -> dict[MemoryPlan, Foresight]:
    """Plan a model under each of `PLANS`, with Adam and default keys; `batch` as in `plan`."""
    found = {}
    for chosen in PLANS:
        raw: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
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
    for wanted in (MemoryFit.GOOD, MemoryFit.TIGHT):
        for chosen, fit in fits.items():
            if fit is wanted:
                return chosen
    return None
