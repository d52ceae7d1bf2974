"""Small frozen values that describe how a bucket is treated. A ZeRO stage is one row of them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from hadal.comm.codecs import Codec
from hadal.comm.collectives import Factors


class Partition(NamedTuple):
    """The kinds of state that are sharded between uses (Rajbhandari 2020).

    Each kind includes the ones before it: gradients are sharded only if optimizer state is.
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


class Precision(NamedTuple):
    """The dtypes of one parameter's weights, master, gradients and optimizer state."""

    compute: torch.dtype = torch.float32
    """Weights in forward and backward."""
    master: torch.dtype = torch.float32
    """The values that the optimizer updates; if equal to `compute`, the weights themselves."""
    accumulate: torch.dtype = torch.float32
    """Gradients between micro-steps."""
    reduce: torch.dtype = torch.float32
    """Gradients on the wire."""
    state: torch.dtype | None = None
    """Elementwise optimizer state; None: as the master. See `state_dtype`."""
    rounds_early: bool = False
    """True: masters start from rounded weights, and means are rounded before they are added."""

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of moments, momenta and sums of squares."""
        return self.state or self.master

    @property
    def keeps_master(self) -> bool:
        """Return True if the master is separate from the weights."""
        return self.master != self.compute


class Tier(Enum):
    """A kind of memory that stores values between uses, by its name in the configuration."""

    DEVICE = "none"
    """The memory of the device that computes."""
    HOST = "cpu"
    """The memory of the host; the same if a CPU computes."""
    DISK = "nvme"
    """Files."""


class Reduction(NamedTuple):
    """The reduction of all ranks' gradients to one."""

    adds_up: bool = False
    """True: gradients are added and not averaged."""
    prescales: bool = False
    """True: they are divided completely before they are rounded to the dtype on the wire."""
    predivides_by: float = 1.0
    """Otherwise: the divisor before they are sent; the rest of the division comes after."""
    sequence_parallel_size: int = 1
    """Ranks that share a sample: the mean is over samples, hence over 1/size of the ranks."""
    inside_backward: bool = True
    """True: gradients that are not sharded are reduced during backward, not after it."""
    refuses_unused: bool = False
    """True: a parameter that got no gradient in an update is an error."""
    stays: bool = False
    """True: each rank keeps its own gradients, because the optimizer exchanges its own data.
    Only if optimizer state is not partitioned."""

    def factors(self, world_size: int) -> Factors:
        """Return the factors for gradients before they are sent and for their sum afterwards."""
        divisor = 1.0 if self.adds_up else world_size / self.sequence_parallel_size
        if self.prescales:
            return Factors(1.0 / divisor, 1.0)
        return Factors(1.0 / self.predivides_by, self.predivides_by / divisor)


class Feedback(NamedTuple):
    """Error feedback: the error of a coded gradient is added to the next one (LoCo, Xie 2024)."""

    decay: float = 0.8
    """The weight of the old average of errors at each message."""
    updates: int = 1024
    """The number of updates after which the average is dropped."""


class Transport(NamedTuple):
    """The wire formats of a bucket's weights and gradients (ZeRO++, Wang 2023)."""

    gather: Codec | None = None
    """Codec for gathering sharded weights in forward and backward; None sends them uncoded. All
    other uses send them uncoded."""
    frozen: Codec | None = None
    """Codec for weights that are not trained, also for storing them. None: as all others."""
    refresh_numel: int = 2**63 - 1
    """Elements gathered at a time when whole weights were stepped in shards."""
    refreshes_late: bool = True
    """True: these gathers may last into the next forward, until it reads the weights; only if the
    device can compute during collectives."""
    reduce: Codec | None = None
    """Codec for sharded gradients; None: they are sent in `Precision.reduce`. Rows of an embedding
    and sums over copies are not coded."""
    feedback: Feedback | None = None
    """Error feedback for `reduce`; None: errors are lost."""


class Limits(NamedTuple):
    """Limits on the elements (`numel`) of buckets, of unsharded weights and of prefetches."""

    bucket_numel: int = 500_000_000
    """Target size of a bucket."""
    shared_numel: int = 1_000_000
    """Weights that stay whole: units share a bucket up to this many elements, however small they
    are. A message of this size takes much longer than its start, and its memory is little."""
    persistence_numel: int = 100_000
    """Sharded weights: a parameter with fewer elements stays whole."""
    persistent_total_numel: int = 2**63 - 1
    """Sharded weights: at most this many elements stay whole under `persistence_numel`."""
    live_numel: int = 1_000_000_000
    """Sharded weights: at most this many elements are gathered, including those in use. The unit in
    use always is and, unless this is 0, the one used next."""
    reuse_numel: int = 1_000_000_000
    """Sharded weights: a bucket used again within this many elements is not freed in between."""
    prefetch_numel: int = 50_000_000
    """Sharded weights: at most this many elements, or one unit, are gathered ahead of use."""
    overlap: bool = True
    """True: reductions overlap with backward."""


class Divergence(NamedTuple):
    """The handling of ranks and updates that take different paths through the model."""

    is_expected: bool = False
    """True: ranks differ all the time, so every gather is announced and nothing is planned."""
    is_tolerated: bool = True
    """True: ranks that differ fall back to announcing; otherwise it is an error on every rank."""
    reports_each: bool = False
    """True: each plan that does not come true is reported, not only the first."""
