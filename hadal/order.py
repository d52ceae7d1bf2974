"""Orders: which samples each replica reads next, batch by batch.

A loader reads what its order picks, and saves how far it has handed batches out. A curriculum, or
packs of sequences, are orders of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Picked(NamedTuple):
    """The samples of one batch of one replica."""

    indices: list[Any]
    samples: int
    """How many samples of all replicas the batch and its peers on the other replicas use up."""
    state: Any = None
    """The order's state after this batch: plain values; None if epoch and samples say all."""
    note: Any = None
    """Facts about the batch for whoever follows the loader; not saved."""


@runtime_checkable
class Order(Protocol):
    """Picks samples. Replicas must agree: each picks as many batches, with equal `samples`.

    Workers read ahead, so an order picks batches that may never be handed out. Whatever it needs to
    go on belongs in the state of each batch: the loader keeps that of the last batch handed out,
    saves it, and loads it before it calls `batches` again.
    """

    is_own: bool
    """True if the state is of this replica alone, for one epoch; else of all, over epochs."""

    def __len__(self) -> int:
        """Return the number of this replica's batches in a whole epoch."""

    def batches(self, epoch: int, done: int) -> Iterator[Picked]:
        """Yield this replica's batches of `epoch` after the first `done` samples of all."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from the state of a batch."""
