"""The small frozen values that say how a bucket is treated. A ZeRO stage is one row of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Partition:
    """Which of the three kinds of state are cut over the ranks between uses (Rajbhandari 2020).

    Each kind includes the ones before it: gradients are cut only where optimizer state is.
    """

    optimizer: bool = False
    gradients: bool = False
    weights: bool = False


# Stage 0, 1, 2, 3 of `zero_optimization.stage`, in this order.
STAGES = (
    Partition(),
    Partition(optimizer=True),
    Partition(optimizer=True, gradients=True),
    Partition(optimizer=True, gradients=True, weights=True),
)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype of each thing that a parameter becomes."""

    compute: torch.dtype = torch.float32
    """Weights in forward and backward."""
    master: torch.dtype = torch.float32
    """What the optimizer updates. Where it equals `compute`, the weights themselves are updated."""
    accumulate: torch.dtype = torch.float32
    """Gradients between micro-steps."""
    reduce: torch.dtype = torch.float32
    """Gradients on the wire."""
    state: torch.dtype | None = None
    """What the optimizer remembers of each element; None: as the master. See `state_dtype`."""

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of moments, momenta and sums of squares."""
        return self.state or self.master

    @property
    def keeps_master(self) -> bool:
        """Whether there is a master beside the weights."""
        return self.master != self.compute


@dataclass(frozen=True, slots=True)
class Limits:
    """How buckets are cut and how much may stand unsharded (`numel`: elements), or be under way."""

    bucket_numel: int = 500_000_000
    """Target size of a bucket."""
    persistence_numel: int = 100_000
    """Sharded weights: a parameter with fewer elements stays whole."""
    persistent_total_numel: int = 2**63 - 1
    """Sharded weights: at most so many elements stay whole under the rule before."""
    live_numel: int = 1_000_000_000
    """Sharded weights: at most so many elements stand gathered beyond the present use."""
    reuse_numel: int = 1_000_000_000
    """Sharded weights: a bucket used again within so many elements is not dropped in between."""
    overlap: bool = True
    """Whether reductions go on while backward does."""
