"""Memory estimates: the figures of the mechanism itself, and the tables they are printed in."""

from __future__ import annotations

import pytest
import torch
from contracts.test_memory import PADDING, promise_of
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from hadal import zero
from hadal.zero.estimate import FULL, HALF, Job, Model, counted, device_nbytes, host_nbytes


@given(
    stage=some.integers(0, 3),
    numel=some.integers(10_000, 10**11),
    frozen=some.integers(0, 10**9),
    devices=some.integers(1, 16),
    nodes=some.integers(1, 64),
)
def test_figures_are_what_a_rank_is_measured_to_hold(
    stage: int, numel: int, frozen: int, devices: int, nodes: int
) -> None:
    job = Job(devices, nodes)
    for cost, precision in ((HALF, "bf16"), (FULL, "fp32")):
        promised = sum(promise_of(stage, precision, numel, job.devices))
        found = device_nbytes(stage, Model(numel), job, cost)
        assert promised <= found <= promised * (1 + PADDING) + 16 * job.devices
        resting = frozen / (job.devices if stage == 3 else 1)
        more = device_nbytes(stage, Model(numel, frozen), job, cost) - found
        assert cost.weight * (resting - 1) <= more <= cost.weight * (resting + 1)


def test_the_host_holds_what_every_process_builds() -> None:
    model, job = Model(trained=1000, largest=100), Job(4, 2)
    assert host_nbytes(model, job, born_sharded=False) == 4 * 4 * 1000
    assert host_nbytes(model, job, born_sharded=True) == 4 * 4 * (125 + 100)


def test_a_model_is_counted_and_not_touched() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 20), nn.Sequential(nn.Linear(20, 30), nn.ReLU()))
    model.append(nn.Linear(20, 30))
    model[2].weight = model[1][0].weight
    model[0].requires_grad_(False)
    assert counted(model) == Model(trained=600 + 30 + 30, frozen=220, largest=630)
    assert counted(nn.Module()) == Model(0, 0, 0)


def rows(text: str) -> list[list[str]]:
    """The cells of a printed table, without its head."""
    return [[cell.strip() for cell in line.split("|")] for line in text.splitlines()[3:]]


def test_printed_tables(capsys: pytest.CaptureFixture[str]) -> None:
    zero.estimate_zero2_model_states_mem_needs_all_cold(7_500_000_000, 8, 8)
    two = capsys.readouterr().out
    assert "7500.0 M parameters under ZeRO-2" in two
    assert "on 8 x 8 devices" in two
    assert rows(two) == [
        ["360.00 GB", "16.64 GB", "bf16 or fp16"],
        ["360.00 GB", "31.41 GB", "fp32"],
    ]
    zero.estimate_zero3_model_states_mem_needs_all_cold(7_500_000_000, 100_000_000, 8, 8)
    three = rows(capsys.readouterr().out)
    assert three == [
        ["10.43 GB", "2.27 GB", "bf16 or fp16, zero.Init"],
        ["360.00 GB", "2.27 GB", "bf16 or fp16, without zero.Init"],
        ["10.43 GB", "2.67 GB", "fp32, zero.Init"],
        ["360.00 GB", "2.67 GB", "fp32, without zero.Init"],
    ]


def test_live_and_cold_agree(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    numel, largest = 4 * (4096**2 + 4096), 4096**2 + 4096
    zero.estimate_zero2_model_states_mem_needs_all_live(model, 2, additional_buffer_factor=1.0)
    live = capsys.readouterr().out
    zero.estimate_zero2_model_states_mem_needs_all_cold(numel, 2, additional_buffer_factor=1.0)
    assert capsys.readouterr().out == live
    zero.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2, num_nodes=3)
    live = capsys.readouterr().out
    zero.estimate_zero3_model_states_mem_needs_all_cold(numel, largest, 2, 3)
    assert capsys.readouterr().out == live
    model[0].requires_grad_(False)
    zero.estimate_zero3_model_states_mem_needs_all_live(model)
    assert "67.1 M parameters (16.8 M of them frozen) under ZeRO-3" in capsys.readouterr().out
