"""Nodes: which bytes cross between them with a second copy of weights, copies of all, two hops.

Four ranks stand for two nodes of two. What a rank sends, and to whom, is counted where it sends.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from hadal import comm, utils
from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects
from hadal.zero import GatheredParameters
from hadal.zero.gathering import Phase

from .nodes import HOPS, HPZ, MICS, SHARD, Sent, node_engine, sending
from .test_gathering import ALL, BLOCKS, CUT, PADDED, blocks, inputs_of, one_step, watched


def sent_in_micro_steps(settings: dict[str, Any]) -> list[dict[Phase, Sent]]:
    """In each micro-step of the third update; then in two evaluations behind it."""
    engine = node_engine(**settings)
    for step in range(4):
        one_step(engine, step)
    found = []
    for step in (4, 5):
        with sending(engine) as sent:
            one_step(engine, step)
        found.append(sent)
    for _ in range(2):
        with sending(engine) as sent, torch.no_grad():
            engine(inputs_of(9))
        found.append(sent)
    engine.destroy()
    return found


def test_without_nodes_every_gather_goes_everywhere(ranks: RankPools) -> None:
    for micro_steps in ranks(4).run(sent_in_micro_steps, {}):
        for sent in micro_steps[:2]:
            # The last block's weights stay between forward and backward, the first's between two
            # micro-steps.
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                assert sent[phase]["weights", "across"] >= 2 * (BLOCKS - 1) * SHARD


@pytest.mark.claims("zero_optimization.zero_hpz_partition_size")
def test_with_a_second_copy_no_weights_cross_nodes_in_backward(ranks: RankPools) -> None:
    for first, second, evaluation, again in ranks(4).run(sent_in_micro_steps, HPZ):
        # The first gather after an update goes everywhere.
        assert first[Phase.FORWARD]["weights", "across"] == 2 * BLOCKS * SHARD
        assert evaluation[Phase.FORWARD]["weights", "across"] == 2 * BLOCKS * SHARD
        for sent, phase in (
            (first, Phase.BACKWARD),
            (second, Phase.FORWARD),
            (second, Phase.BACKWARD),
            (again, Phase.FORWARD),
        ):
            across = {what for (what, where), nbytes in sent[phase].items() if where == "across"}
            assert across <= {"gradients"}
            # To one other rank, twice as much as a shard over four.
            assert sent[phase]["weights", "inside"] >= (BLOCKS - 1) * 2 * SHARD


@pytest.mark.claims("zero_optimization.mics_shard_size")
def test_with_copies_only_one_sum_of_shards_crosses_them(ranks: RankPools) -> None:
    for first, second, *evaluations in ranks(4).run(sent_in_micro_steps, MICS):
        for sent in (first, *evaluations):
            assert not [place for phase in sent.values() for place in phase if "across" in place]
        update = sum(second.values(), Counter())
        # A shard over two ranks: half of it to be added up there, half of the sum of mine back.
        assert update["gradients", "across"] == BLOCKS * 2 * SHARD
        assert second[Phase.BACKWARD]["gradients", "across"] > 0  # while backward goes on
        norm = "the sum of the gradient norm"
        assert {what for what, where in update if where == "across"} <= {"gradients", norm}


@pytest.mark.fast_cells("hops-hpz")
@pytest.mark.claims("zero_optimization.mics_hierarchical_params_gather")
@pytest.mark.parametrize("settings", [HOPS, {**HOPS, **HPZ}], ids=["hops", "hops-hpz"])
def test_in_two_hops_each_byte_comes_to_a_node_once(
    settings: dict[str, Any], ranks: RankPools
) -> None:
    found = ranks(4).run(sent_in_micro_steps, settings)
    for rank in range(2):
        # Both ranks of a node together send what the other node does not have: half of it all.
        sums = [found[rank + 2 * node][0][Phase.FORWARD] for node in range(2)]
        assert [sent["weights", "across"] for sent in sums] == [BLOCKS * SHARD] * 2
        assert [sent["weights", "inside"] for sent in sums] == [BLOCKS * 2 * SHARD] * 2
        backward = found[rank][1][Phase.BACKWARD]["weights", "across"]
        assert (backward == 0) == ("zero_hpz_partition_size" in settings)


def test_where_a_copy_lies_on_one_node_there_is_one_hop(ranks: RankPools) -> None:
    for first, *_ in ranks(4).run(sent_in_micro_steps, {**HOPS, **MICS}):
        assert first[Phase.FORWARD]["weights", "inside"] == BLOCKS * 2 * SHARD
        assert not first[Phase.FORWARD]["weights", "across"]


# ---- what is held --------------------------------------------------------------------------


def held_numels(settings: dict[str, Any]) -> tuple[int, int, int]:
    """Elements of masters, of moments, and of the second copy of weights, on this rank."""
    engine = node_engine(**settings)
    for step in range(2):
        one_step(engine, step)
    buckets = engine._parts.runtime.buckets
    with torch.no_grad():
        engine(inputs_of(9))
    secondary = [b.node_copy.kept for b in buckets if b.node_copy.kept is not None]
    moments = [state["exp_avg"] for state in engine.optimizer.state.values()]
    found = [sum(t.numel() for t in kind) for kind in ([b.master for b in buckets], moments)]
    engine.destroy()
    return found[0], found[1], sum(t.numel() for t in secondary)


def test_what_a_rank_holds(ranks: RankPools) -> None:
    whole = BLOCKS * PADDED
    used = BLOCKS * (PADDED - 6) / 4  # padding has no moments
    for settings, masters, secondary in ((HPZ, 4, whole // 2), (MICS, 2, 0)):
        held = ranks(4).run(held_numels, settings)
        assert {one[0] for one in held} == {whole // masters}
        assert {one[2] for one in held} == {secondary}
        assert sum(one[1] for one in held) == used * 4 * 4 / masters


def not_shared(settings: dict[str, Any]) -> tuple[set[bool], set[bool]]:
    """Return whether any weights are sharded, and whether a second copy of any could be."""
    engine = node_engine(**settings)
    buckets = engine._parts.runtime.buckets
    found = {b.partition.weights for b in buckets}, {b.sharing.node is not None for b in buckets}
    one_step(engine, 0)
    engine.destroy()
    return found


def test_what_is_cut_over_one_rank_or_all_is_cut_as_ever(ranks: RankPools) -> None:
    assert ranks(4).run(not_shared, {"mics_shard_size": 1}) == [({False}, {False})] * 4
    assert ranks(4).run(not_shared, {"mics_shard_size": 4}) == [({True}, {False})] * 4
    assert ranks(4).run(not_shared, {"zero_hpz_partition_size": 4}) == [({True}, {False})] * 4
    for settings in ({**HPZ, **HOPS}, MICS):  # one process alone: whatever the sizes
        assert ranks(1).run(not_shared, settings) == [({False}, {False})]


@on_ranks(4)
def test_copies_stay_the_same_bit_for_bit() -> None:
    """Bit for bit, after updates of which one overflows, and with clipping."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine = engine_of(
        3,
        blocks(),
        zero_optimization={**CUT, **MICS},
        gradient_clipping=0.01,
        gradient_accumulation_steps=2,
        **fp16,
    )
    for step in range(8):
        loss = engine(inputs_of(step).half()).float().square().mean()
        # One rank of the second copy overflows, before the update's last micro-step.
        engine.backward(loss * 1e9 if step == 2 and comm.get_rank() == 3 else loss)
        engine.step()
    assert engine.skipped_steps == 1
    assert engine.clip_coefficient < 1
    masters = [bucket.master for bucket in engine._parts.runtime.buckets]
    everywhere = gather_objects([*masters, engine.get_global_grad_norm()], Ranks.world())
    for mine, theirs in zip(everywhere[:2], everywhere[2:], strict=True):
        assert mine[-1] == theirs[-1]
        assert all(map(torch.equal, mine[:-1], theirs[:-1]))
    engine.destroy()


# ---- ranks that part, and what is written in between ----------------------------------------


def lendings_of_announced_gathers(settings: dict[str, Any]) -> list[int]:
    """Count how often this rank lends in each micro-step, while the nodes take different paths."""
    engine = node_engine(divergent_ranks=True, **settings)
    path = (0, 1, 2) if comm.get_rank() < 2 else (3, 4)
    found = []
    for step in range(2):
        with watched(engine) as events:
            one_step(engine, step, path)
        found.append(sum(name == "serve" for name, _ in events))
    engine.destroy()
    return found


def test_a_node_lends_nothing_to_another_one(ranks: RankPools) -> None:
    assert all(min(found) > 0 for found in ranks(4).run(lendings_of_announced_gathers, {}))
    assert ranks(4).run(lendings_of_announced_gathers, MICS) == [[0, 0]] * 4
    # The first gather is everybody's; from then on each node has its own copy.
    assert ranks(4).run(lendings_of_announced_gathers, HPZ) == [[2, 0]] * 2 + [[3, 0]] * 2


@on_ranks(4)
def test_edits_reach_the_second_copy() -> None:
    """The next gather finds values written while a second copy is valid, wherever it reads."""
    engine = node_engine(**HPZ)
    weight = engine.module.blocks[1].weight
    one_step(engine, 0)
    with GatheredParameters([weight], modifier_rank=3), torch.no_grad():
        if comm.get_rank() == 3:
            weight.fill_(0.5)
    with sending(engine) as sent, GatheredParameters([weight]):
        assert bool((weight == 0.5).all())
    assert not sent[Phase.IDLE]["weights", "across"]
    utils.safe_set_full_fp32_param(weight, torch.full_like(weight, 0.25))
    with sending(engine) as sent, GatheredParameters([weight]):
        assert bool((weight == 0.25).all())
    assert sent[Phase.IDLE]["weights", "across"]
    engine.destroy()


class Adapted(nn.Module):
    """A large frozen layer and a small trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.trained = nn.Linear(6, 6)

    def forward(self, inputs: Tensor, path: Any = ALL) -> Tensor:
        return self.trained(torch.tanh(self.frozen(inputs)))


@on_ranks(4)
def test_frozen_weights_cross_nodes_once() -> None:
    engine = node_engine(Adapted(), **HPZ)
    crossed = []
    for step in range(6):
        with sending(engine) as sent:
            one_step(engine, step)
        crossed.append(sent[Phase.FORWARD]["weights", "across"])
    engine.destroy()
    assert crossed == [4 * SHARD, 0, 2 * SHARD, 0, 2 * SHARD, 0]
