"""The small frozen values that say how a bucket is treated. A ZeRO stage is one row of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch

from hadal.comm.codecs.codec import Codec
from hadal.comm.factors import Factors


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
    rounds_early: bool = False
    """Whether masters start from rounded weights, and means are rounded before they are added."""

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of moments, momenta and sums of squares."""
        return self.state or self.master

    @property
    def keeps_master(self) -> bool:
        """Whether there is a master beside the weights."""
        return self.master != self.compute


class Tier(Enum):
    """A kind of memory that values are stored in between uses."""

    DEVICE = auto()
    """The memory that computes."""
    HOST = auto()
    """The memory of the host; the same if a CPU computes."""
    DISK = auto()
    """Files."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the gradients of all ranks become one."""

    adds_up: bool = False
    """Whether they are added, and not averaged."""
    prescales: bool = False
    """Whether all of the division comes before they are rounded to the dtype on the wire."""
    predivides_by: float = 1.0
    """Otherwise: what they are divided by before; the rest of the division comes after."""
    sequence_parallel_size: int = 1
    """Ranks that share a sample: the mean is over samples, so over 1/size of the ranks."""
    inside_backward: bool = True
    """Whether gradients that are not sharded are reduced while backward goes on, or behind it."""
    refuses_unused: bool = False
    """Whether a parameter that got no gradient in an update is an error."""
    stays: bool = False
    """Whether each rank keeps its own, because the optimizer exchanges what it makes of them.
    Only where optimizer state is not partitioned."""

    def factors(self, world_size: int) -> Factors:
        """What gradients are multiplied with before they travel, and their sum afterwards."""
        divisor = 1.0 if self.adds_up else world_size / self.sequence_parallel_size
        if self.prescales:
            return Factors(1.0 / divisor, 1.0)
        return Factors(1.0 / self.predivides_by, self.predivides_by / divisor)


@dataclass(frozen=True, slots=True)
class Feedback:
    """What is lost of a coded gradient is added to the next one (LoCo, Xie 2024)."""

    decay: float = 0.8
    """How much of the average of what was lost stays at each message."""
    updates: int = 1024
    """After so many it is forgotten."""


@dataclass(frozen=True, slots=True)
class Transport:
    """How the weights and gradients of a bucket travel (ZeRO++, Wang 2023)."""

    gather: Codec | None = None
    """Of weights that are sharded, where forward and backward use them; None: as they are. For all
    other uses they travel as they are."""
    frozen: Codec | None = None
    """Of those of them that are not trained: they are stored encoded too. None: as all others."""
    refresh_numel: int = 2**63 - 1
    """Elements gathered at a time of weights that are whole but were stepped in shards."""
    refreshes_late: bool = True
    """Whether these are still gathered when the next forward begins, until it reads them; only
    where a device goes on beside its collectives."""
    reduce: Codec | None = None
    """Of gradients that are sharded; None: in `Precision.reduce`. Rows of an embedding, and sums
    over copies, are not coded."""
    feedback: Feedback | None = None
    """Of what `reduce` loses; None: it is lost."""


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
    prefetch_numel: int = 50_000_000
    """Sharded weights: at most so many elements are gathered ahead of their use, or one bucket."""
    overlap: bool = True
    """Whether reductions go on while backward does."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """What is done about ranks, and updates, that take different paths through the model."""

    is_expected: bool = False
    """Ranks differ all the time: every gather is announced, nothing is planned."""
    is_tolerated: bool = True
    """Ranks that differ fall back to announcing; else it is an error on every rank."""
    tells_always: bool = False
    """Each plan that no longer holds is told, not only the first."""
