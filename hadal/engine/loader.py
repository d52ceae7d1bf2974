"""The data loader that `initialize(training_data=...)` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from hadal.comm import Ranks


class ShardedLoader:
    """Gives each rank its own part of a data set, in a new order each epoch.

    Iterating it once is one epoch. An `IterableDataset` is read as it comes: it must shard itself.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        ranks: Ranks,
        collate_fn: Callable[[list[Any]], Any] | None,
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        self._sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            self._sampler = DistributedSampler(dataset, ranks.size, ranks.rank, drop_last=drop_last)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size,
            sampler=self._sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
        )
        self._epoch = 0

    def __len__(self) -> int:
        """Micro-batches of one epoch on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """One epoch's micro-batches."""
        if self._sampler is not None:
            self._sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._loader)
