"""`hadal.engine.step_time`: queues by hand, formulas of the wire, and what more speed may do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hadal.config import Config, load_config
from hadal.engine.activations import Features, MicroStep, trace
from hadal.engine.clusters import ComputeCluster, Link, Links, ProductSpeed, Speeds, cluster_named
from hadal.engine.memory import PlannedRank
from hadal.engine.plan import ModelPlan, ModulesPlan, RankCounts, plan_model
from hadal.engine.precision import Casting
from hadal.engine.step_time import PARTS, StepTime, _Queues, step_time
from hadal.zero.estimate import JobSize

WIDTH, BLOCKS, ROWS = 64, 6, 8
PSI = BLOCKS * WIDTH * WIDTH  # elements of the model
GPU = cluster_named("h100x8")


_STARTS = ("micro_step_start", "update_start")


def cluster(**changes: Any) -> ComputeCluster:
    """A cluster of round figures, in which nothing but what a test sets takes time."""
    quick = dict.fromkeys(("host_update", "host_link"), 1e30)
    quick |= dict.fromkeys(("disk_read", "disk_write"), 1e30) | dict.fromkeys(_STARTS, 1e-30)
    products = ProductSpeed(1e-30, 1e30, changes.pop("products", 1e30))
    others = changes.pop("peak", 1e30), changes.pop("bandwidth", 1e30)
    speeds = Speeds(*[products] * 3, *others, update=1e30, launch=1e-30)
    slow = {"speeds": {"fp32": speeds}, "inside": links(1e30), "between": links(1e30)}
    return replace(GPU, **{**quick, **slow, **changes})


def links(bandwidth: float, latency: float = 1e-30) -> dict[str, Links]:
    return {"fp32": Links(*[Link(latency, bandwidth)] * 4)}


def config_of(
    stage: int, zero: dict[str, Any] | None = None, ranks: int = 8, **more: Any
) -> Config:
    raw = {"stage": stage, "reduce_bucket_size": WIDTH * WIDTH, **(zero or {})}
    raw |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return load_config(
        {"train_micro_batch_size_per_gpu": 2, "zero_optimization": raw, **more}, world_size=ranks
    )


class Block(nn.Module):
    """A product whose output is kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        return torch.relu(self.inner(values))


@cache
def tower() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(BLOCKS)))


@cache
def traced(recomputed: bool = False) -> tuple[MicroStep, ModelPlan]:
    config = config_of(0)
    planned = plan_of(config, 8)
    again = Features(list(map(str, range(BLOCKS) if recomputed else ())))
    batch = torch.empty(ROWS, WIDTH, device="meta")
    return trace(tower(), planned.units, batch, Casting(), {}, again), planned


def plan_of(config: Config, ranks: int) -> ModelPlan:
    trained = {p: 0 for p in tower().parameters()}
    counts = RankCounts.of(config, ranks)
    return plan_model(tower(), ModulesPlan(), config, torch.device("cuda"), counts, trained)


def time_of(
    config: Config,
    on: ComputeCluster,
    devices: int = 8,
    nodes: int = 1,
    *,
    recomputed: bool = False,
) -> StepTime:
    ranks = devices * nodes
    planned, counts = plan_of(config, ranks), RankCounts.of(config, ranks)
    micro_step = traced(recomputed)[0]
    job, device = JobSize(devices, nodes), torch.device("cuda")
    rank = PlannedRank(config, tower(), planned, counts, job, device, "AdamW", 2, "the tower")
    found = step_time(micro_step, rank, on)
    assert tuple(found.parts) == PARTS
    assert sum(part.exposed for part in found.parts.values()) == pytest.approx(found.seconds)
    assert all(part.exposed <= part.seconds * (1 + 1e-9) for part in found.parts.values())
    return found


# ---- queues --------------------------------------------------------------------------------------


def test_work_beside_computation_is_exposed_only_as_far_as_it_is_waited_for() -> None:
    queues = _Queues(shares_cores=False)
    first = queues.start("network", "gathers", 3.0)
    second = queues.start("network", "reductions", 2.0)
    queues.compute("forward", 1.0)
    queues.wait(first)
    assert queues.now == 3.0
    queues.compute("forward", 1.0)
    queues.wait(second)
    assert queues.now == 5.0
    assert queues.exposed == {"forward": 2.0, "gathers": 2.0, "reductions": 1.0}
    assert queues.busy == {"forward": 2.0, "gathers": 3.0, "reductions": 2.0}


def test_a_wait_is_charged_to_what_was_under_way() -> None:
    queues = _Queues(shares_cores=False)
    fetched = queues.start("to device", "offload", 4.0)
    gathered = queues.start("network", "gathers", 1.0, fetched)
    queues.compute("forward", 3.0)
    queues.wait(gathered)
    assert (queues.now, queues.exposed["offload"], queues.exposed["gathers"]) == (5.0, 1.0, 1.0)
    queues.wait(fetched)  # over already
    assert queues.now == 5.0


def test_ranks_that_share_cores_do_nothing_beside_computation() -> None:
    queues = _Queues(shares_cores=True)
    event = queues.start("network", "gathers", 3.0)
    queues.compute("forward", 1.0)
    queues.wait(event)
    assert queues.now == 4.0 and queues.exposed == {"gathers": 3.0, "forward": 1.0}


# ---- bytes on the wire ---------------------------------------------------------------------------

_NO_REUSE = {"stage3_max_reuse_distance": 0}


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_sends_what_its_formula_says(stage: int, ranks: int) -> None:
    # Rajbhandari 2020, section 7: 2 Psi, and 3 Psi at stage 3, where weights are gathered twice;
    # but the last block's are used at once again.
    config = config_of(stage, _NO_REUSE if stage == 3 else {}, ranks)
    found = time_of(config, cluster(), ranks)
    one = 4 * PSI * (ranks - 1) // ranks
    sent = {name: part.wire_nbytes for name, part in found.parts.items() if part.wire_nbytes}
    expected = {
        0: {"reductions": 2 * one},
        1: {"reductions": one, "refresh": one},
        2: {"reductions": one, "refresh": one},
        3: {"gathers": 2 * one - one // BLOCKS, "reductions": one},
    }
    assert sent == (expected[stage] if ranks > 1 else {})


def test_buckets_in_reach_are_gathered_once() -> None:
    found = time_of(config_of(3), cluster())
    assert found.parts["gathers"].wire_nbytes == 4 * PSI * 7 // 8


@pytest.mark.parametrize(("stage", "times"), [(0, 1), (1, 1), (2, 3), (3, 3)])
def test_sharded_gradients_are_reduced_in_each_micro_step(stage: int, times: int) -> None:
    once = time_of(config_of(stage), cluster()).parts["reductions"]
    config = config_of(stage, gradient_accumulation_steps=3)
    assert time_of(config, cluster()).parts["reductions"].wire_nbytes == times * once.wire_nbytes


def test_dtypes_and_codecs_are_counted() -> None:
    plain = time_of(config_of(3, _NO_REUSE), cluster()).parts
    halved = time_of(config_of(3, _NO_REUSE, bf16={"enabled": True}), cluster()).parts
    assert halved["gathers"].wire_nbytes * 2 == plain["gathers"].wire_nbytes
    coded = {"zero_quantized_weights": True, "zero_quantized_gradients": True, **_NO_REUSE}
    found = time_of(config_of(3, coded, bf16={"enabled": True}), cluster()).parts
    ratio = found["gathers"].wire_nbytes / halved["gathers"].wire_nbytes
    assert ratio == pytest.approx(0.508, abs=0.01)
    ratio = found["reductions"].wire_nbytes / halved["reductions"].wire_nbytes
    assert ratio == pytest.approx(0.133, abs=0.01)  # of float32


def test_a_copy_per_node_keeps_gathers_inside() -> None:
    slow = cluster(between=links(1e9))
    whole = time_of(config_of(3, _NO_REUSE, 16), slow, 8, 2).parts
    near = {"zero_hpz_partition_size": 8, **_NO_REUSE}
    node = time_of(config_of(3, near, 16), slow, 8, 2).parts
    # The gathers of backward are in the node, whose links take no time.
    again = (2 * BLOCKS - 1) / BLOCKS
    assert node["gathers"].seconds * again == pytest.approx(whole["gathers"].seconds)


def test_ranks_of_a_node_share_the_network() -> None:
    slow = cluster(between=links(1e9))
    found = time_of(config_of(0, ranks=16), slow, 8, 2).parts["reductions"]
    assert found.seconds == pytest.approx(2 * 4 * PSI * 15 / 16 / 8e9)
    near = cluster(between=links(1e9), inside=links(2e9))  # no faster than inside a node
    found = time_of(config_of(0, ranks=16), near, 8, 2).parts["reductions"]
    assert found.seconds == pytest.approx(2 * 4 * PSI * 15 / 16 / 2e9)


def test_copies_of_the_model_meet_in_the_last_reduction() -> None:
    slow = cluster(between=links(1e9))
    config = config_of(3, {"mics_shard_size": 8}, 16, gradient_accumulation_steps=2)
    found = time_of(config, slow, 8, 2).parts
    assert found["gathers"].seconds < 1e-9
    shards = 4 * PSI // 8
    assert found["reductions"].seconds == pytest.approx(shards / 1e9)  # 2 x 1/2: an all-reduce


# ---- times ---------------------------------------------------------------------------------------


def test_reductions_overlap_with_backward_but_for_the_last() -> None:
    # Backward computes 2 products a block, but for the first; a reduction takes half a block.
    product = 2 * ROWS * WIDTH * WIDTH
    one = 2 * 4 * WIDTH * WIDTH * 7 // 8
    on = cluster(products=product, inside=links(float(one)))
    found = time_of(config_of(0), on)
    assert found.parts["forward"].seconds == pytest.approx(BLOCKS)
    assert found.parts["backward"].seconds == pytest.approx(2 * BLOCKS - 1)
    assert found.parts["reductions"].seconds == pytest.approx(BLOCKS)
    assert found.parts["reductions"].exposed == pytest.approx(1.0)
    alone = time_of(config_of(0, {"overlap_comm": False}), on)
    assert alone.parts["reductions"].exposed == pytest.approx(BLOCKS)


def test_gathers_ahead_of_use_are_hidden_but_for_the_first() -> None:
    product = 2 * ROWS * WIDTH * WIDTH
    one = 4 * WIDTH * WIDTH * 7 // 8
    on = cluster(products=product, inside=links(float(one)))
    found = time_of(config_of(3), on)
    assert found.parts["gathers"].seconds == pytest.approx(BLOCKS)
    assert found.parts["gathers"].exposed == pytest.approx(1.0)


def test_refreshed_weights_arrive_in_the_next_forward() -> None:
    product = 2 * ROWS * WIDTH * WIDTH
    one = 4 * WIDTH * WIDTH * 7 // 8
    reduced = links(1e30)
    slow = replace(reduced["fp32"], all_gather=Link(1e-30, one / 0.5))
    on = cluster(products=product, inside={"fp32": slow})
    late = time_of(config_of(1), on).parts["refresh"]
    assert late.seconds == pytest.approx(BLOCKS / 2) and late.exposed == pytest.approx(0.5)
    early = time_of(config_of(1, {"overlap_comm": False}), on).parts["refresh"]
    assert early.exposed == pytest.approx(BLOCKS / 2)


def test_a_host_s_ranks_share_its_cores() -> None:
    host = cluster(computes_on_host=True, devices_per_node=2, products=1e9)
    host = replace(host, inside=links(1e9))
    two, one = (time_of(config_of(0, {}, ranks), host, ranks) for ranks in (2, 1))
    assert two.parts["forward"].seconds == pytest.approx(2 * one.parts["forward"].seconds)
    assert two.parts["reductions"].exposed == two.parts["reductions"].seconds > 0


def test_the_host_updates_while_values_cross() -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    on = cluster(host_update=8.0 * PSI / 8, host_link=4 * PSI / 8 * 2)
    found = time_of(config_of(2, offload), on)
    assert found.parts["update"].exposed == pytest.approx(1.0)
    assert found.parts["offload"].seconds == pytest.approx(1.0)  # half down, half up
    # The last gradient comes down before the update ends, but the last weights go up after it.
    assert 0 < found.parts["offload"].exposed < 0.5
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": "/"}}
    slow = replace(on, disk_read=12 * PSI / 10)
    assert time_of(config_of(2, disk), slow).seconds > 10 > found.seconds


def test_recomputation_is_not_useful_work() -> None:
    on = cluster(products=1e9, peak=2e9)
    plain, again = (time_of(config_of(0), on, recomputed=one) for one in (False, True))
    assert again.seconds > plain.seconds
    assert plain.utilization == pytest.approx(0.5)
    # Of a forward, a backward without the first block's input gradient, and a second forward.
    assert again.utilization == pytest.approx(0.5 * 3 * BLOCKS / (4 * BLOCKS - 1))


def test_gradients_are_copied_and_later_ones_added() -> None:
    on = cluster(bandwidth=4.0 * PSI)
    moved = sum(segment.moved for segment in traced()[0].backward) / (4 * PSI)
    once, twice = (
        time_of(config_of(0, gradient_accumulation_steps=steps), on).parts["backward"].seconds
        for steps in (1, 2)
    )
    assert once == pytest.approx(moved + 2)
    assert twice == pytest.approx(2 * moved + 2 + 3)


def test_samples_are_those_of_all_ranks() -> None:
    found = time_of(config_of(0, ranks=16, gradient_accumulation_steps=3), GPU, 8, 2)
    assert found.samples == 2 * 3 * 16
    assert found.samples_per_second == found.samples / found.seconds


_ZERO = st.fixed_dictionaries(
    {},
    optional={
        "overlap_comm": st.booleans(),
        "stage3_prefetch_bucket_size": st.sampled_from([0, WIDTH * WIDTH, 10**6]),
        "stage3_max_reuse_distance": st.sampled_from([0, 2 * WIDTH * WIDTH, 10**9]),
        "offload_optimizer": st.just({"device": "cpu"}),
    },
)


@given(st.integers(0, 3), _ZERO, st.sampled_from([1, 2]), st.floats(1e5, 1e9), st.floats(1, 100))
def test_more_speed_is_never_slower(
    stage: int, zero: dict[str, Any], steps: int, bandwidth: float, factor: float
) -> None:
    zero = {key: value for key, value in zero.items() if stage == 3 or "stage3" not in key}
    config = config_of(stage, zero, gradient_accumulation_steps=steps)
    slow = cluster(products=1e9, inside=links(bandwidth), host_link=bandwidth)
    fast = replace(slow, inside=links(bandwidth * factor))
    assert time_of(config, fast).seconds <= time_of(config, slow).seconds * (1 + 1e-9)
    fast = replace(slow, host_link=bandwidth * factor)
    assert time_of(config, fast).seconds <= time_of(config, slow).seconds * (1 + 1e-9)
    quick = cluster(products=1e9 * factor, inside=links(bandwidth), host_link=bandwidth)
    assert time_of(config, quick).seconds <= time_of(config, slow).seconds * (1 + 1e-9)


@given(st.integers(0, 3), st.floats(1e5, 1e9))
def test_overlap_is_never_slower(stage: int, bandwidth: float) -> None:
    on = cluster(products=1e9, inside=links(bandwidth))
    found = [time_of(config_of(stage, {"overlap_comm": one}), on) for one in (True, False)]
    assert found[0].seconds <= found[1].seconds * (1 + 1e-9)
