"""Shorter sequences: which tensors of a batch are cut, and where."""

from __future__ import annotations

from collections import UserDict, namedtuple

import pytest
import torch

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.seqlen import truncate

IDS = torch.arange(2 * 10).view(2, 10)


def shapes(batch):
    if isinstance(batch, torch.Tensor):
        return list(batch.shape)
    if hasattr(batch, "items"):
        return {name: shapes(value) for name, value in batch.items()}
    return [shapes(each) for each in batch]


def test_every_tensor_over_the_sequence_is_cut():
    batch = {
        "input_ids": IDS,
        "attention_mask": torch.ones(2, 10),
        "labels": IDS.clone(),
        "position_ids": torch.arange(10).expand(3, 2, 10),
        "cache_position": torch.arange(10),
        "mask": torch.ones(2, 1, 10, 10),
        "shared_mask": torch.ones(10, 10),
        "key_mask": torch.ones(2, 1, 1, 10),
        "inputs_embeds": torch.ones(2, 10, 10),
        "weights": torch.ones(2),
        "pixels": torch.ones(2, 3, 10, 10),
        "count": 7,
    }
    found = truncate(batch, 4)
    assert found.pop("count") == batch.pop("count") == 7
    assert shapes(found) == {
        "input_ids": [2, 4],
        "attention_mask": [2, 4],
        "labels": [2, 4],
        "position_ids": [3, 2, 4],
        "cache_position": [4],
        "mask": [2, 1, 4, 4],
        "shared_mask": [4, 4],
        "key_mask": [2, 1, 1, 4],
        "inputs_embeds": [2, 4, 10],
        "weights": [2],
        "pixels": [2, 3, 10, 10],
    }
    assert torch.equal(found["input_ids"], IDS[:, :4])
    assert shapes(batch)["input_ids"] == [2, 10]


def test_nests_keep_their_kinds():
    pair = namedtuple("pair", "x y")
    batch = pair(UserDict(input_ids=IDS), [IDS, (IDS,)])
    found = truncate(batch, 3)
    assert isinstance(found, pair)
    assert isinstance(found.x, UserDict)
    assert isinstance(found.y, list)
    assert isinstance(found.y[1], tuple)
    assert shapes(found) == [{"input_ids": [2, 3]}, [[2, 3], [[2, 3]]]]
    assert shapes(batch)[0] == {"input_ids": [2, 10]}


@pytest.mark.parametrize("length", [10, 11])
def test_a_short_batch_is_unchanged(length):
    batch = {"input_ids": IDS}
    assert truncate(batch, length) is batch


def test_features_without_tokens():
    assert shapes(truncate(torch.ones(2, 10, 6), 4)) == [2, 4, 6]
    assert shapes(truncate([torch.ones(2, 10, 6), IDS], 4)) == [[2, 4, 6], [2, 4]]


def test_batches_that_cannot_be_truncated_are_refused():
    with pytest.raises(UsageError, match=r"no sequences to truncate.* got x \[2, 10\].*curriculum"):
        truncate({"x": torch.ones(2, 10)}, 4)
    with pytest.raises(UsageError, match=r"packed sequences \(cu_seq_lens_q is given\); pad"):
        truncate({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 4, 10])}, 4)
