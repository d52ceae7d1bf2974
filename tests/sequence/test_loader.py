"""Batches of whole sequences as slices: DeepSpeed's golden batch, and ragged data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools

from hadal import comm
from hadal.errors import SequenceError
from hadal.plugins.sequence import UlyssesSPDataLoaderAdapter
from hadal.plugins.sequence.loader import padded


def adapter(batches: list[Any]) -> UlyssesSPDataLoaderAdapter:
    ranks = comm.Ranks.world()
    return UlyssesSPDataLoaderAdapter(batches, ranks.rank, ranks.group, ranks.size, "cpu")


def sequences(seed: int, length: int, rows: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 100, (rows, length), generator=generator)
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(length).expand(rows, -1).contiguous(),
        "labels": tokens.clone(),
        "vectors": torch.randn(rows, length, 3, generator=generator),
        "weights": torch.tensor([float(seed)]),
        "name": f"batch {seed}",
    }


def _golden() -> list[dict[str, Any]]:
    tokens = torch.tensor([[1, 10, 10, 10, 2, 2]]) + 100 * comm.get_rank()
    batch = {"input_ids": tokens, "position_ids": torch.arange(6)[None], "labels": tokens.clone()}
    loader = adapter([batch])
    assert len(loader) == comm.get_world_size()
    return [{name: value.tolist() for name, value in one.items()} for one in loader]


def test_the_golden_batch(ranks: RankPools) -> None:
    first, second = ranks(2).run(_golden)
    assert first[0] == {
        "input_ids": [[1, 10, 10]],
        "position_ids": [[0, 1, 2]],
        "shift_labels": [[10, 10, 10]],
    }
    assert second[0] == {
        "input_ids": [[10, 2, 2]],
        "position_ids": [[3, 4, 5]],
        "shift_labels": [[2, 2, -100]],
    }
    assert [one["input_ids"] for one in first] == [[[1, 10, 10]], [[101, 110, 110]]]


def _ragged() -> list[dict[str, Any]]:
    """7 batches on one rank and 9 on the other, of different lengths; seed 100 x rank + number."""
    rank = comm.get_rank()
    batches = [sequences(100 * rank + n, 5 + n % 4, rows=1 + n % 2) for n in range(7 + 2 * rank)]
    loader = adapter(batches)
    found = list(loader)
    assert [one["name"] for one in loader] == [one["name"] for one in found]  # a second epoch
    return found


def test_ragged_data(ranks: RankPools) -> None:
    slices = ranks(2).run(_ragged)
    names = [f"batch {100 * rank + n}" for n in range(7) for rank in (0, 1)]
    assert [one["name"] for one in slices[0]] == [*names, "batch 107", "batch 108"]
    for parts in zip(*slices, strict=True):
        seed = int(parts[0]["name"].split()[1])
        number = seed % 100
        whole = padded(sequences(seed, 5 + number % 4, rows=1 + number % 2), 2)
        assert parts[0].keys() == parts[1].keys() == whole.keys()
        for name in ("input_ids", "position_ids", "shift_labels", "vectors"):
            assert parts[0][name].shape == parts[1][name].shape
            joined = torch.cat([one[name] for one in parts], dim=1)
            assert joined.dtype == whole[name].dtype and torch.equal(joined, whole[name])
        assert parts[1]["weights"] == float(seed)


class Telling:
    """A loader that tells, with its last batch, that it is the last: as Accelerate's."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.end_of_dataloader = batches, False

    def __iter__(self) -> Any:
        for left, batch in zip(reversed(range(len(self.batches))), self.batches, strict=True):
            self.end_of_dataloader = not left
            yield batch


def _told() -> list[bool]:
    loader = Telling([sequences(n, 4) for n in range(1 + comm.get_rank())])
    return [loader.end_of_dataloader for _ in adapter(loader)]  # type: ignore[arg-type]


def test_the_end_is_announced_with_the_last_slice(ranks: RankPools) -> None:
    assert ranks(2).run(_told) == [[False, False, True]] * 2


def test_padding_is_not_a_target_and_continues_positions() -> None:
    batch = sequences(1, 5) | {"attention_mask": torch.ones(1, 5, dtype=torch.long)}
    found = padded(batch, 4)
    assert "labels" not in found
    assert found["shift_labels"].tolist()[0][4:] == [-100] * 4
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert not found["vectors"][:, 5:].any() and found["vectors"].shape == (1, 8, 3)


def _bad(name: str) -> None:
    batch: Any = sequences(0, 4)
    if comm.get_rank() == 1:
        if name == "positions":
            del batch["position_ids"]
        elif name == "length":
            batch["vectors"] = torch.zeros(1, 3, 3)
        elif name == "kind":
            batch = [1, 2]
        else:
            del batch["input_ids"]
    list(adapter([batch]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("positions", "rank 1: a batch with .* has no position_ids"),
        ("length", r"vectors has the shape \(1, 3, 3\), but the batch's sequences 4 positions"),
        ("kind", "a batch is a list; expected a mapping"),
        ("tokens", "has neither input_ids nor inputs_embeds"),
    ],
)
def test_a_bad_batch_is_an_error_on_all_ranks(name: str, message: str, ranks: RankPools) -> None:
    for error in ranks(2).raises(_bad, name):
        assert isinstance(error, SequenceError)
        with pytest.raises(SequenceError, match=message):
            raise error


def _wrong_size() -> None:
    UlyssesSPDataLoaderAdapter([], 0, dist.group.WORLD, 3, "cpu")


def test_a_wrong_size_is_an_error(ranks: RankPools) -> None:
    assert "sp_group has 2 ranks" in str(ranks(2).raises(_wrong_size)[0])
