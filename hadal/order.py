"""Orders: the samples that each replica reads next, batch by batch.

A loader reads the samples that its order picks, and saves the number of batches it has returned. A
curriculum and packed sequences are other orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Picked(NamedTuple):
    """The samples of one batch of one replica."""

    indices: list[Any]
    samples: int
    """The number of samples that this batch and its peers on the other replicas consume."""
    state: Any = None
    """The order's state after this batch, as plain values; None if epoch and samples suffice."""
    note: Any = None
    """Facts about the batch for users of the loader; not saved."""


@runtime_checkable
class Order(Protocol):
    """Picks samples. Replicas must agree: each picks as many batches, with equal `samples`.

    Workers read ahead, so an order picks batches that the loader may never return. Each batch
    carries the state from which the order can continue: the loader keeps the state of the last
    batch that it returned, saves it, and loads it before it calls `batches` again.
    """

    is_own: bool
    """True if the state covers this replica for one epoch; False: all replicas, over epochs."""

    def __len__(self) -> int:
        """Return the number of this replica's batches in a whole epoch."""

    def batches(self, epoch: int, done: int) -> Iterator[Picked]:
        """Yield this replica's batches of `epoch` after `done` samples of all replicas."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from the state of a batch."""
