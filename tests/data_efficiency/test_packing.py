"""Packs: DeepSpeed's golden ones but for its faults, invariants, and time in proportion."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hadal.plugins.data_efficiency.lengths import (
    PackLimits,
    Packs,
    evened,
    pack,
    pack_alike,
    picked,
    scale_of,
    shuffled,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data/dynamic_batching.json").read_text())
CASES = [
    case
    for case in GOLDEN["batch_by_seqlens"]
    # With min_batch_size DeepSpeed stops at the first place where no pack can begin.
    if isinstance(case["result"], dict) and "min_batch_size" not in case["args"]
]
sizes = st.lists(st.integers(1, 30), max_size=60)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_packs_are_those_of_deepspeed(case: dict[str, Any]) -> None:
    asked = case["args"]
    lengths = np.array(asked["seqlens"])
    order = picked(
        lengths,
        asked.get("sequence_picking_order", "dataloader"),
        asked.get("seed"),
        asked.get("sequence_ids_per_mb"),
    )
    # DeepSpeed never packs the last sample.
    order = order[lengths[order] <= asked["max_tokens"]][:-1]
    limits = PackLimits(asked["max_tokens"], most=asked.get("max_batch_size"))
    count = asked.get("effective_batch_size", 1)
    if asked.get("required_microbatches_of_same_size"):
        made = pack_alike(lengths, order, limits, count)
    else:
        made = pack(lengths, order, limits)
    made = evened(made, count, 1, may_split=False)
    expected = [samples for _, samples in case["result"]["microbatches"]]
    assert [samples.tolist() for samples in made] == expected


def all_of(packs: Packs) -> list[int]:
    return sorted([*packs.ids.tolist(), *packs.too_long.tolist(), *packs.left_over.tolist()])


@given(sizes, st.integers(1, 40), st.integers(1, 4), st.integers(0, 4), st.integers(1, 5))
def test_each_sample_is_in_one_pack_or_reported(
    lengths: list[int], tokens: int, least: int, more: int, multiple: int
) -> None:
    sizes = np.array(lengths, np.int64)
    limits = PackLimits(tokens, least, least + more if more else None)
    order = picked(sizes, "random", 7)
    for made in (pack(sizes, order, limits), pack_alike(sizes, order, limits, multiple)):
        for even in (made, evened(made, multiple, least, may_split=True)):
            assert all_of(even) == list(range(len(lengths)))
            for samples in even:
                assert sizes[samples].sum() <= tokens
                assert least <= len(samples) <= (limits.most or len(lengths))
            assert even.tokens(sizes).tolist() == [int(sizes[one].sum()) for one in even]
        assert len(evened(made, multiple, least, may_split=True)) % multiple == 0
        again = shuffled(made, 1, 2)
        assert sorted(map(tuple, again)) == sorted(map(tuple, made))
    assert not len(pack(sizes, order, PackLimits(40)).left_over)


@given(sizes, st.integers(1, 40))
def test_packs_are_as_large_as_possible(lengths: list[int], tokens: int) -> None:
    made = pack(np.array(lengths, np.int64), np.arange(len(lengths)), PackLimits(tokens))
    expected: list[list[int]] = []
    for sample, length in enumerate(lengths):
        if length > tokens:
            continue
        fits = expected and sum(lengths[one] for one in expected[-1]) + length <= tokens
        expected[-1:] = [[*expected[-1], sample]] if fits else [*expected[-1:], [sample]]
    assert [samples.tolist() for samples in made] == expected


def test_the_largest_packs_are_halved() -> None:
    made = pack(np.ones(7, np.int64), np.arange(7), PackLimits(5))
    assert list(map(len, made)) == [5, 2]
    assert list(map(len, evened(made, 4, 1, may_split=True))) == [2, 1, 2, 2]
    kept = evened(made, 4, 3, may_split=True)
    assert (len(kept), len(kept.left_over)) == (0, 7)


def test_a_place_where_no_pack_can_begin_is_left_over() -> None:
    lengths = np.array([9, 9, 1, 1, 1, 9])
    made = pack(lengths, np.arange(6), PackLimits(12, least=3))
    assert [samples.tolist() for samples in made] == [[1, 2, 3, 4]]
    assert made.left_over.tolist() == [0, 5]


def test_orders() -> None:
    lengths = np.array([5, 1, 3, 1])
    assert picked(lengths, "seqlen", None).tolist() == [1, 3, 2, 0]
    assert picked(lengths, "dataloader", None, np.array([2, 0])).tolist() == [2, 0]
    expected = list(range(4))
    random.Random(3).shuffle(expected)
    assert picked(lengths, "random", 3).tolist() == expected


def test_time_is_in_proportion_to_the_samples() -> None:
    lengths = np.random.default_rng(0).integers(1, 512, 200_000)
    began = time.process_time()
    made = evened(
        pack(lengths, picked(lengths, "random", 1), PackLimits(4096)), 64, 1, may_split=True
    )
    assert time.process_time() - began < 2.0  # 0.15 s; DeepSpeed's 2000 samples take 4.4 s
    assert len(made.ids) == len(lengths)


@pytest.mark.parametrize("case", GOLDEN["scale_lr"], ids=lambda case: str(case["method"]))
def test_learning_rates_are_scaled_as_by_deepspeed(case: dict[str, Any]) -> None:
    def scaled() -> float:
        return float(case["lr"] * scale_of(case["base"], case["bs"], case["method"]))

    if isinstance(case["result"], str):
        with pytest.raises(ValueError, match="Unknown scaling method: cubic"):
            scaled()
    else:
        assert scaled() == pytest.approx(case["result"], rel=1e-15)
