"""Inputs of recomputed calls that are stored in host memory, on a device whose work is late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_checkpointing.test_keeping import OPTIONS, recomputation, same_numbers
from activation_checkpointing.test_modules import engine_of, losses_of
from ranks import RankPools

import npu
from hadal.device import current_device


def _same_late(options: dict[str, Any]) -> None:
    with npu.asynchronous():
        same_numbers(options, torch.float32)


def test_every_option_has_the_same_bits(npus: RankPools) -> None:
    for options in OPTIONS:
        npus(2).run(_same_late, options)


def _bytes_left(options: dict[str, Any]) -> int:
    """The bytes on the device between forward and backward, beside those of the last output."""
    call = recomputation(options).call
    values = torch.randn(1 << 10, requires_grad=True, device=current_device()) * 1
    before = torch.accelerator.memory_allocated()
    for _ in range(4):
        values = call(lambda x: x.sin().cos().sin(), values)
    torch.accelerator.synchronize()
    found = torch.accelerator.memory_allocated() - before
    values.sum().backward()
    return found


def _host_residence() -> None:
    assert _bytes_left({}) == 4 * (1 << 12)
    assert _bytes_left({"cpu_checkpointing": True}) == 0


def test_no_input_stays_on_the_device(npus: RankPools) -> None:
    npus(1).run(_host_residence)


def _modules(stage: int) -> None:
    found = []
    for section in (None, {"modules": "units", "cpu_checkpointing": True}):
        with npu.asynchronous(), npu.with_float64():
            engine = engine_of(section, stage)
            found.append(losses_of(engine))
            engine.destroy()
    assert found[0] == found[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_modules_of_an_engine(npus: RankPools, stage: int) -> None:
    npus(2).run(_modules, stage)
