"""Writes of users to weights between updates, on a device without waits."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import RankPools

import hadal
import npu
from hadal.device import current_device
from hadal.errors import UsageError
from hadal.zero import bucket

from . import runs


def _edited(stage: int, writers: range) -> dict[str, Any]:
    """Weights after three updates, before each of which some are written to in place.

    Of `writers`, the first one's writes count.
    """
    engine = runs.built(runs.config(stage, "bf16"))
    for update in range(3):
        parameters = list(engine.module.parameters())
        some = hadal.zero.GatheredParameters(parameters[:2], modifier_rank=writers[0])
        with some, torch.no_grad():
            if hadal.comm.get_rank() in writers:
                parameters[0].mul_(0.5)
        if stage < 3:
            with torch.no_grad():
                parameters[3].add_(0.25)
        runs.advanced(engine, 1, first=update)
    found = runs.weights(engine)
    engine.destroy()
    return found


def _edited_late(stage: int, writers: range) -> dict[str, Any]:
    with npu.asynchronous():
        return _edited(stage, writers)


@pytest.mark.fast_cells("3-both")
@pytest.mark.parametrize("writers", [range(2), range(1), range(1, 2)], ids=["both", "0", "1"])
@pytest.mark.parametrize("stage", range(4))
def test_writes_in_place_are_taken_up(
    stage: int, writers: range, npus: RankPools, ranks: RankPools
) -> None:
    wanted = ranks(2).run(_edited, stage, writers)
    for here, there in zip(npus(2).run(_edited_late, stage, writers), wanted, strict=True):
        for name, values in there.items():
            assert torch.equal(here[name], values), name


def _written_through_data(stage: int) -> tuple[int, str]:
    """The update of the error, counted from the write on, and its message."""
    with npu.asynchronous():
        engine = runs.built(runs.config(stage, "bf16"))
        runs.advanced(engine, 2)
        engine.module.blocks[1].wide.weight.data.flatten()[-1:].add_(1.0)
        torch.accelerator.synchronize(current_device())
        for update in range(3):
            try:
                runs.advanced(engine, 1, first=2 + update)
                torch.accelerator.synchronize(current_device())
            except UsageError as error:
                engine.destroy()
                return update, str(error)
    return -1, ""


def _written_unseen(stage: int) -> bool:
    """Train on after a write through `.data` that nobody looks for."""
    keys = {"detect_data_writes": False}
    with npu.asynchronous(), patch.object(bucket, "digest", side_effect=AssertionError):
        engine = runs.built(runs.config(stage, "bf16", keys))
        # Before the first update weights may be written in any way.
        first = engine.module.blocks[1].wide.weight
        if stage < 3:
            first.data.fill_(0.5)
        runs.advanced(engine, 2)
        kept = stage == 3 or bool((first.float() - 0.5).abs().max() < 0.1)
        with hadal.zero.GatheredParameters([first]):
            first.data.add_(1.0)
        runs.advanced(engine, 2, first=2)
        engine.destroy()
    return kept


@pytest.mark.claims("zero_optimization.detect_data_writes")
@pytest.mark.parametrize("stage", [1, 3])
def test_writes_through_data_need_not_be_looked_for(stage: int, npus: RankPools) -> None:
    assert npus(2).run(_written_unseen, stage) == [True, True]


@pytest.mark.fast_cells("1")
@pytest.mark.parametrize("stage", range(2))
def test_a_write_through_data_is_reported_one_update_late(stage: int, npus: RankPools) -> None:
    for update, told in npus(2).run(_written_through_data, stage):
        assert update == 1
        assert "blocks.1" in told and "in place under torch.no_grad()" in told


def _written_in_forward(zero: dict[str, Any]) -> tuple[int, str]:
    """The same for a write to gathered weights, which are freed after it."""
    with npu.asynchronous():
        engine = runs.built(runs.config(3, "bf16", zero))
        runs.advanced(engine, 2)
        layer = engine.module.blocks[1].wide

        def write(*_: Any) -> None:
            layer.weight.data[-1:].add_(1.0)

        handle = layer.register_forward_hook(write)
        for update in range(3):
            try:
                runs.advanced(engine, 1, first=2 + update)
                torch.accelerator.synchronize(current_device())
            except UsageError as error:
                engine.destroy()
                return update, str(error)
            handle.remove()
    return -1, ""


@pytest.mark.fast_cells("sharded")
@pytest.mark.parametrize(
    "zero",
    [{}, {"offload_param": {"device": "cpu"}}, {"zero_quantized_weights": True}],
    ids=["sharded", "offloaded", "encoded"],
)
def test_a_write_to_gathered_weights_is_reported_too(zero: dict[str, Any], npus: RankPools) -> None:
    for update, told in npus(2).run(_written_in_forward, zero):
        assert update == 1
        assert "blocks.1" in told and "in place under torch.no_grad()" in told
