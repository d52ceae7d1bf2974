"""Memory estimates: checked against real engines, and the printed tables."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.test_memory import KEYS, PADDING, memory_of_a_rank, most, promise_of
from hypothesis import given, strategies as some
from offload.test_tiers import config_of, model_of, small_blocks, train
from ranks import RankPools
from torch import nn

import hadal
from hadal import zero
from hadal.config import load_config
from hadal.engine.memory import memory_of, plan_rank
from hadal.offload import buffers
from hadal.zero.estimate import (
    FULL,
    HALF,
    Cost,
    JobSize,
    Model,
    ShardTiers,
    TierBytes,
    counted,
    host_nbytes,
    states_of,
)
from hadal.zero.policy import Tier


@given(
    stage=some.integers(0, 3),
    numel=some.integers(10_000, 10**11),
    frozen=some.integers(0, 10**9),
    devices=some.integers(1, 16),
    nodes=some.integers(1, 64),
)
def test_figures_match_the_formulas(
    stage: int, numel: int, frozen: int, devices: int, nodes: int
) -> None:
    job = JobSize(devices, nodes)
    for cost, precision in ((HALF, "bf16"), (FULL, "fp32")):
        promised = sum(promise_of(stage, precision, numel, job.devices))
        found = states_of(stage, Model(numel), job, cost).total.device
        assert promised <= found <= promised * (1 + PADDING) + 16 * job.devices
        resting = frozen / (job.devices if stage == 3 else 1)
        more = states_of(stage, Model(numel, frozen), job, cost).total.device - found
        assert cost.weight * (resting - 1) <= more <= cost.weight * (resting + 1)


def test_host_memory_counts_every_process() -> None:
    model, job = Model(trained=1000, largest=100), JobSize(4, 2)
    assert host_nbytes(model, job, born_sharded=False) == 4 * 4 * 1000
    assert host_nbytes(model, job, born_sharded=True) == 4 * 4 * (125 + 100)


def test_counting_leaves_the_model_unchanged() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 20), nn.Sequential(nn.Linear(20, 30), nn.ReLU()))
    model.append(nn.Linear(20, 30))
    model[2].weight = model[1][0].weight
    model[0].requires_grad_(False)
    assert counted(model) == Model(trained=600 + 30 + 30, frozen=220, largest=630)
    assert counted(nn.Module()) == Model(0, 0, 0)


@pytest.mark.fast_cells("fp32-cost1-3")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("precision", "cost"), [("bf16", HALF), ("fp32", FULL)])
def test_an_engine_holds_the_estimated_bytes(
    stage: int, precision: str, cost: Cost, ranks: RankPools
) -> None:
    """Measured once the gradients of an update are complete, on two ranks."""
    for held in ranks(2).run(memory_of_a_rank, stage, precision, KEYS[0]):
        estimated = states_of(stage, Model(held.numel), JobSize(2), cost).total.device
        assert estimated - 16 <= held.before_step <= most(estimated)


def disk_of_a_rank(stage: int, precision: str, weights: Tier, path: str) -> tuple[int, int]:
    """Return the elements of a model, and the bytes of this rank's files after an update."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    nvme = {"device": "nvme", "nvme_path": path}
    away = nvme | {"max_in_cpu": 100_000, "buffer_size": 1_000_000}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": nvme}
    zero |= {"offload_param": away} if weights is Tier.DISK else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": zero,
    }
    engine, *_ = hadal.initialize(model=model, config=config)
    inputs = torch.ones(1, 512, dtype=next(model.parameters()).dtype)
    engine.backward(engine(inputs).float().sum())
    engine.step()
    nbytes = sum(file.stat().st_size for file in Path(path).glob(f"*-{os.getpid()}-*/states"))
    engine.destroy()
    return 2 * 512 * 513, nbytes


@pytest.mark.parametrize(("stage", "weights"), [(1, Tier.DEVICE), (3, Tier.DEVICE), (3, Tier.DISK)])
@pytest.mark.parametrize(("precision", "cost"), [("bf16", HALF), ("fp32", FULL)])
def test_an_engine_has_the_estimated_bytes_on_disk(
    stage: int, weights: Tier, precision: str, cost: Cost, ranks: RankPools, tmp_path: Path
) -> None:
    rest = ShardTiers(weights, Tier.DISK, in_host_numel=100_000)
    for numel, nbytes in ranks(2).run(disk_of_a_rank, stage, precision, weights, str(tmp_path)):
        held = states_of(stage, Model(numel), JobSize(2), cost, rest).total
        pages = 2 * 4 * 3 * 4096  # two generations of four kinds in at most three buckets
        # One bucket's weights more go to the disk than there is room for on the host.
        more = 2 * cost.weight * 100_000 if weights is Tier.DISK else 0
        assert held.disk <= nbytes <= held.disk * (1 + PADDING) + pages + more


def buffers_of_a_rank(config: dict[str, Any], path: str) -> tuple[int, int]:
    """Return the bytes of host buffers for a disk: estimated, and actually used."""
    taken: list[int] = []
    plain = buffers.BufferPool._made

    def made(self: buffers.BufferPool) -> torch.Tensor:
        taken.append(self.nbytes)
        return plain(self)

    buffers.BufferPool._made = made  # type: ignore[method-assign]
    try:
        with small_blocks():
            rank = plan_rank(load_config(config, world_size=2), model_of(), **NODE)
            found = memory_of(rank).states
            engine, *_ = hadal.initialize(model=model_of(), config=config)
            train(engine, 3)
            engine.destroy()
    finally:
        buffers.BufferPool._made = plain  # type: ignore[method-assign]
    return next(n.held.host for n in found if n.kind == "buffers"), sum(taken)


NODE = {"devices_per_node": 2, "nodes": 1}


@pytest.mark.fast_cells("bf16-AdamW")
@pytest.mark.parametrize("kind", ["AdamW", "Lion", "SGD"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_engine_uses_the_estimated_buffers(
    kind: str, dtype: str, ranks: RankPools, tmp_path: Path
) -> None:
    for pace, weights in ((True, "nvme"), (False, None)):
        section = {"pipeline_read": pace, "pipeline_write": pace, "buffer_count": 9}
        away = {} if weights is None else {"offload_param": {"max_in_cpu": 0}}
        config = config_of(
            3, dtype, "nvme", weights, str(tmp_path), offload_optimizer=section, **away
        )
        config["optimizer"] = {"type": kind, "params": {"lr": 0.01}}
        for estimated, taken in ranks(2).run(buffers_of_a_rank, config, str(tmp_path)):
            assert estimated == taken > 0


numels = some.integers(10_000, 10**11)


@given(stage=some.integers(0, 3), numel=numels, devices=some.integers(1, 64))
def test_an_offloaded_optimizer(stage: int, numel: int, devices: int) -> None:
    model, job = Model(numel), JobSize(devices)
    shard = math.ceil(numel / (devices if stage else 1))
    for tier, place, copies in ((Tier.HOST, 1, 1), (Tier.DISK, 2, 2)):
        rest = ShardTiers(optimizer=tier)
        weights, gradients, optimizer, buffers = states_of(stage, model, job, HALF, rest)
        assert weights == states_of(stage, model, job).weights
        assert gradients == TierBytes(device=2 * numel if stage < 2 else 0, host=2 * shard)
        assert optimizer[place] == copies * 12 * shard and sum(optimizer) == optimizer[place]
        # Weights of fp32 that stay on the device need masters where the optimizer is.
        assert (buffers.host > 0) == (tier is Tier.DISK) and sum(buffers) == buffers.host
        optimizer = states_of(stage, model, job, FULL, rest).optimizer
        assert optimizer[place] == copies * 12 * shard


def test_a_partly_offloaded_optimizer() -> None:
    rest = ShardTiers(optimizer=Tier.HOST, ratio=0.75)
    _, gradients, optimizer, _ = states_of(3, Model(8000), JobSize(2), HALF, rest)
    assert optimizer == TierBytes(device=12 * 1000, host=12 * 3000)
    assert gradients == TierBytes(device=2 * 1000, host=2 * 3000)


@given(numel=numels, frozen=some.integers(0, 10**9), devices=some.integers(1, 64))
def test_offloaded_weights(numel: int, frozen: int, devices: int) -> None:
    model, job = Model(numel, frozen), JobSize(devices)
    shard = math.ceil((numel + frozen) / devices)
    host, disk = ShardTiers(Tier.HOST), ShardTiers(Tier.DISK)
    assert states_of(3, model, job, HALF, host).weights == TierBytes(0, 2 * shard)
    assert states_of(3, model, job, HALF, disk).weights == TierBytes(0, disk=2 * 2 * shard)
    some_stay = states_of(3, model, job, HALF, ShardTiers(Tier.DISK, in_host_numel=50)).weights
    assert some_stay == TierBytes(0, 2 * min(shard, 50), 2 * 2 * max(0, shard - 50))
    # Only stage 3 can put them there.
    assert states_of(2, model, job, HALF, host) == states_of(2, model, job)
    # In fp32 they are the masters of an optimizer that is on the host too.
    both = states_of(3, model, job, FULL, ShardTiers(Tier.HOST, Tier.HOST))
    assert both.optimizer == TierBytes(host=8 * math.ceil(numel / devices))
    assert both.total == TierBytes(
        0, sum(kind.host for kind in (both.weights, both.gradients, both.optimizer))
    )
    apart = states_of(3, model, job, FULL, host)
    assert apart.optimizer == TierBytes(12 * math.ceil(numel / devices))


def test_copies_of_the_states_are_counted() -> None:
    model = Model(64_000)
    plain = states_of(3, model, JobSize(8, 8))
    assert plain.total.device == (2 + 2 + 12) * 1000
    second = states_of(3, model, JobSize(8, 8, second_copy_devices=8))
    assert second.total.device - plain.total.device == 2 * 64_000 // 8


def rows(text: str) -> list[list[str]]:
    """Return the cells of a printed table, without its header."""
    return [[cell.strip() for cell in line.split("|")] for line in text.splitlines()[3:]]


def test_printed_tables(capsys: pytest.CaptureFixture[str]) -> None:
    zero.estimate_zero2_model_states_mem_needs_all_cold(7_500_000_000, 8, 8)
    two = capsys.readouterr().out
    assert "7500.0 M parameters under ZeRO-2" in two
    assert "on 8 x 8 devices" in two
    assert rows(two)[:4] == [
        ["16.64 GB", "360.00 GB", "0.00 GB", "bf16 or fp16"],
        ["15.00 GB", "360.00 GB", "0.00 GB", "bf16 or fp16, offload_optimizer cpu"],
        ["15.00 GB", "360.00 GB", "22.50 GB", "bf16 or fp16, offload_optimizer nvme"],
        ["31.41 GB", "360.00 GB", "0.00 GB", "fp32"],
    ]
    zero.estimate_zero3_model_states_mem_needs_all_cold(7_500_000_000, 100_000_000, 8, 8)
    three = rows(capsys.readouterr().out)
    both = "offload_optimizer {0}, offload_param {0}"
    assert three[:6] == [
        ["2.27 GB", "10.43 GB", "360.00 GB", "0.00 GB", "bf16 or fp16"],
        ["0.63 GB", "19.69 GB", "360.00 GB", "0.00 GB", "bf16 or fp16, offload_optimizer cpu"],
        ["0.63 GB", "10.43 GB", "360.00 GB", "22.50 GB", "bf16 or fp16, offload_optimizer nvme"],
        ["0.40 GB", "22.50 GB", "360.00 GB", "0.00 GB", f"bf16 or fp16, {both.format('cpu')}"],
        ["0.40 GB", "29.98 GB", "360.00 GB", "26.25 GB", f"bf16 or fp16, {both.format('nvme')}"],
        ["2.67 GB", "10.43 GB", "360.00 GB", "0.00 GB", "fp32"],
    ]
    assert len(three) == 10


def test_bytes_are_returned() -> None:
    needs = zero.estimate_zero2_model_states_mem_needs
    assert needs(1000, 4, 2, additional_buffer_factor=1.0) == (4 * 4 * 1000, 2 * 1000)
    assert needs(1000, 1, 1, additional_buffer_factor=1.0) == (14 * 1000, 2 * 1000)
    assert needs(1000, 4, 2, False, 2.0) == (2 * 4 * 4 * 1000, 2 * 1000 + 14 * 125)
    needs3 = zero.estimate_zero3_model_states_mem_needs
    one = {"num_gpus_per_node": 4, "num_nodes": 2, "additional_buffer_factor": 1.0}
    assert needs3(1000, 100, **one) == (4 * 16 * 125, 400, 400)
    assert needs3(1000, 100, zero_init=False, **one) == (4 * 4 * 1000, 400, 400)
    assert needs3(1000, 100, cpu_offload_params=False, **one) == (4 * 14 * 125, 400 + 250, 400)
    in_place = needs3(1000, 100, cpu_offload=False, **one)
    assert in_place == (4 * 4 * (125 + 100), 400 + 16 * 125, 400)
    assert needs3(1000, 100, cpu_offload=False) == (int(1.5 * 4400), 16_000, 400)


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
