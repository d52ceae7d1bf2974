"""Non-finite gradients: which rank logs them, how often, and when training ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import RankPools

from engine.test_report import Ears
from engine.toys import batch_of, engine_of, loss_of
from hadal import comm
from hadal.engine.update import SkippedInARow
from hadal.errors import NonFiniteError
from hadal.zero import GatheredParameters

BF16 = {"bf16": {"enabled": True}}


def train_on(wrong: list[int], updates: int, keys: dict[str, Any], rank: int = 0) -> list[str]:
    """Train; rank `rank`'s inputs are NaN in the updates `wrong`. What was logged, or raised."""
    engine = engine_of(1, **keys)
    with Ears() as ears:
        dtype = next(engine.module.parameters()).dtype
        try:
            for step in range(updates):
                inputs, targets = batch_of(step)
                if step in wrong and comm.get_rank() == rank:
                    inputs = inputs * math.nan
                engine.backward(loss_of(engine(inputs.to(dtype)), targets))
                engine.step()
        except NonFiniteError as error:
            ears.heard.append(str(error))
        engine.destroy()
    return ears.heard


def test_fp32_warns_once_of_the_parameter_and_the_rank(ranks: RankPools) -> None:
    told, silent = ranks(2).run(train_on, [1], 4, {}, 1)
    assert silent == []
    assert told == [
        "update 1: the gradient of 0.weight is not finite, nor is the loss on rank 1. This training"
        " does not skip such updates, so weights become NaN; this is logged once"
    ]


def test_bf16_speaks_of_skipping_and_not_of_a_loss_scale() -> None:
    lines = train_on([1, 3], 5, BF16)
    told = "the gradient of 0.weight is not finite, nor is the loss on rank 0"
    assert lines == [f"update {n} skipped: {told}" for n in (1, 3)]


def skip_because_of(where: str) -> list[str]:
    """Rank 1's inputs are NaN; or a weight becomes NaN, on all ranks."""
    engine = engine_of(2, **BF16)
    inputs, targets = batch_of(0)
    if where == "weight":
        with GatheredParameters([engine.module[2].bias], modifier_rank=0), torch.no_grad():
            engine.module[2].bias[0] = math.nan
    elif comm.get_rank():
        inputs = inputs * math.nan
    with Ears() as ears:
        if where == "direct":
            loss_of(engine(inputs.bfloat16()), targets).backward()
        else:
            engine.backward(loss_of(engine(inputs.bfloat16()), targets))
        engine.step()
    engine.destroy()
    return ears.heard


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("input", ", nor is the loss on rank 1"),
        ("weight", ", nor is the loss on rank 0, 1, nor is the weight 2.bias"),
        ("direct", ""),
    ],
)
def test_a_skipped_update_names_its_source(where: str, told: str, ranks: RankPools) -> None:
    line, silent = ranks(2).run(skip_because_of, where)
    assert line == [f"update 0 skipped: the gradient of 0.weight is not finite{told}"]
    assert silent == []


@pytest.mark.parametrize("count", [2, 3])
def test_many_skipped_updates_in_a_row_end_training_on_all_ranks(
    count: int, ranks: RankPools
) -> None:
    keys = {**BF16, "max_skipped_updates": 3}
    wrong = [1, 2, *range(4, 4 + count)]
    for told in ranks(2).run(train_on, wrong, 9, keys):
        errors = [line for line in told if "updates were skipped" in line]
        assert len(errors) == (count == 3)
        for error in errors:
            assert error.startswith("the last 3 updates were skipped, the last one is update 6")
            assert "3 times: the gradient of 0.weight is not finite" in error


def test_any_number_may_be_skipped_if_the_key_allows_it() -> None:
    assert len(train_on(list(range(30)), 30, {**BF16, "max_skipped_updates": 0})) == 30
    assert "the last 20 updates were skipped" in train_on(list(range(30)), 30, BF16)[-1]


def test_overflows_that_lower_the_scale_of_fp16_do_not_count() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}
    lines = train_on(list(range(6)), 8, {"fp16": fp16, "max_skipped_updates": 2})
    assert [line.split("; ")[1] for line in lines] == [
        f"loss scale {2 ** (6 - n)} -> {2 ** (5 - n)}" for n in range(6)
    ]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"hysteresis": 2}, ["stays 64, hysteresis 2", "64 -> 32"]),
        ({"hysteresis": 3}, ["stays 64, hysteresis 3"] * 2),
        ({"loss_scale": 64}, ["64 (static)"] * 2),
    ],
)
def test_a_scale_that_stays_is_reported(keys: dict[str, int], told: list[str]) -> None:
    lines = train_on([0, 1], 2, {"fp16": {"enabled": True, "initial_scale_power": 6, **keys}})
    assert [line.split("; ")[1] for line in lines] == [f"loss scale {one}" for one in told]


def test_reasons_are_listed_by_their_number() -> None:
    run = SkippedInARow(3)
    run.add(4, "a")
    run.add(5, "b")
    with pytest.raises(NonFiniteError, match=r"update 6; [^\n]+\n  2 times: b\n  1 times: a\n"):
        run.add(6, "b")
    run.add(7, "b")
    run.clear()
    run.add(8, "b")
    run.add(9, "b")


def test_finite_norms_are_not_reported() -> None:
    assert train_on([], 3, {}) == []
