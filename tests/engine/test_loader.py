"""The loader over `training_data`: each rank its part, in a new order each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch.utils.data import IterableDataset, TensorDataset

import hadal
from engine.toys import ROWS, config_of, engine_of, model_of


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def two_epochs(count: int, changes: dict[str, Any]) -> list[list[list[int]]]:
    _, _, loader, _ = hadal.initialize(
        model=model_of(), training_data=numbers(count), config=config_of(1, **changes)
    )
    assert loader.dataset.tensors[0].numel() == count
    epochs = [[batch[0].tolist() for batch in loader] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
    return epochs


def test_ranks_share_an_epoch_and_shuffle_anew(ranks: RankPools) -> None:
    first, second = ranks(2).run(two_epochs, 24, {})
    orders = []
    for epoch in range(2):
        mine = [n for batch in first[epoch] for n in batch]
        theirs = [n for batch in second[epoch] for n in batch]
        assert sorted(mine + theirs) == list(range(24))
        assert [len(batch) for batch in first[epoch]] == [ROWS] * 4
        orders.append(mine)
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("drop", "lengths"), [(False, [3, 3, 1]), (True, [3, 3])])
def test_the_last_batch_may_be_dropped(drop: bool, lengths: list[int], ranks: RankPools) -> None:
    for epochs in ranks(2).run(two_epochs, 13, {"dataloader_drop_last": drop}):
        assert [len(batch) for batch in epochs[0]] == lengths


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def stream_and_collate() -> list[int]:
    engine = engine_of(0, wishes={"training_data": Stream(), "collate_fn": sum})
    assert engine.training_dataloader is not None
    return list(engine.training_dataloader)


def test_a_stream_is_read_as_it_comes_and_batches_are_the_callers(ranks: RankPools) -> None:
    assert ranks(2).run(stream_and_collate) == [[3, 12, 6]] * 2
