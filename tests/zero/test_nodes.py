"""Nodes: which bytes cross between them with a second copy of weights, copies of all, two hops.

Four ranks stand for two nodes of two. What a rank sends, and to whom, is counted where it sends.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine import toys
from engine.test_topology import cut_sequences
from engine.toys import engine_of
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal import comm, utils
from hadal.comm import Ranks, collectives, rows
from hadal.comm.collectives import gather_objects
from hadal.errors import CheckpointError, ConfigError, UsageError
from hadal.zero import GatheredParameters
from hadal.zero.gathering import Phase

from .test_gathering import (
    ALL,
    BLOCKS,
    CUT,
    DROPS,
    LIMITS,
    PADDED,
    blocks,
    inputs_of,
    one_step,
    raise_and_retry,
    random_rows,
    train_along,
    watched,
)
from .test_runtime import PLANS
from .test_runtime import train_along as train_branches
from .test_state import (
    read_gradients,
    read_moments,
    read_values,
    write_gradients,
    write_inside_gathered,
    write_moments,
    write_values,
)

HPZ = {"zero_hpz_partition_size": 2}
MICS = {"mics_shard_size": 2}
HOPS = {"mics_hierarchical_params_gather": True}
ITEMSIZE = 4
SHARD = PADDED // 4 * ITEMSIZE  # bytes of one rank's cut of a bucket over all ranks

# Agreements between ranks: numbers, not values.
WORDS = (collectives._CODE, collectives._SMALL)
# (what, to whom): bytes. "Weights" is every gather, "gradients" every reduction.
Sent = Counter[tuple[str, str]]


def what_is(label: str) -> str:
    for start, name in (("the gather of", "weights"), ("the reduction of", "gradients")):
        if label.startswith(start):
            return name
    return label


@contextmanager
def sending(engine: Any) -> Iterator[dict[Phase, Sent]]:
    """What this rank sends meanwhile, by what the model is doing."""
    sent: dict[Phase, Sent] = {phase: Counter() for phase in Phase}
    gathering = engine._parts.runtime.gathering
    original = collectives.send

    def send(tensor: Tensor, other: int, ranks: Ranks, tag: int, label: str) -> Any:
        is_near = ranks.numbers[other] // 2 == comm.get_rank() // 2
        if tag not in WORDS:
            where = "inside" if is_near else "across"
            sent[gathering.phase][what_is(label), where] += tensor.nbytes
        return original(tensor, other, ranks, tag, label)

    collectives.send = rows.send = send
    try:
        yield sent
    finally:
        collectives.send = rows.send = original


@contextmanager
def nodes_of(size: int | None) -> Iterator[None]:
    """What the launcher says of the ranks of a node."""
    before = os.environ.pop("LOCAL_WORLD_SIZE")
    if size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


def node_engine(model: nn.Module | None = None, **settings: Any) -> Any:
    zero = {**CUT, **DROPS, **settings}
    with nodes_of(2):
        return engine_of(
            3, model or blocks(), zero_optimization=zero, gradient_accumulation_steps=2
        )


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
    secondary = [b._secondary for b in buckets if b._secondary is not None]
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
    """Whether any weights are cut, and whether a second copy of any could be."""
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


def the_same_on_both_copies() -> None:
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


def test_copies_stay_the_same_bit_for_bit(ranks: RankPools) -> None:
    ranks(4).run(the_same_on_both_copies)


# ---- ranks that part, and programs that look in between -------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_paths_train_as_plain_torch_does(seed: int, ranks: RankPools) -> None:
    routes = [HPZ, MICS, {**HPZ, **HOPS}][seed % 3]
    settings = {**LIMITS[(seed + 1) % 5], **routes}
    ranks(4).run(on_nodes, train_along, random_rows(seed, 4, 4), settings)


@pytest.mark.parametrize("settings", [HPZ, MICS], ids=["hpz", "mics"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_gradients_that_come_late_or_not_at_all(
    plan: list[tuple[int, int]], settings: dict[str, Any], ranks: RankPools
) -> None:
    rows = [(*row, *row[::-1]) for row in plan]
    ranks(4).run(under, settings, train_branches, rows, 3, timeout=30)


def lendings_of_announced_gathers(settings: dict[str, Any]) -> list[int]:
    """How often this rank lends in each micro-step, while the nodes take different paths."""
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


def own_the_boundary(settings: dict[str, Any]) -> None:
    """Where no backward is known to be the last, gradients of copies meet in the step."""
    zero = {**toys.TINY, **settings}
    keys = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
    engine = engine_of(3, zero_optimization={"stage": 3, **zero}, **keys)
    updates = [[0, 1], [2, 3], [4, 5]]
    for micro_steps in updates:
        for step in micro_steps:
            toys.backward(engine, step)
        engine.step()
    toys.assert_close(engine.state_dict(), toys.alone(toys.model_of(), updates))
    engine.destroy()


def test_the_boundary_may_be_unknown(ranks: RankPools) -> None:
    ranks(4).run(own_the_boundary, MICS)


@pytest.mark.parametrize("settings", [HPZ, MICS, {**HPZ, **HOPS}], ids=["hpz", "mics", "hops"])
def test_a_forward_that_raises_under_a_plan(settings: dict[str, Any], ranks: RankPools) -> None:
    ranks(4).run(on_nodes, raise_and_retry, (1,), {**DROPS, **settings})


def on_nodes(check: Callable[..., None], *args: Any) -> None:
    with nodes_of(2):
        check(*args)


def under(settings: dict[str, Any], check: Callable[..., None], *args: Any) -> None:
    """Run a check of engines whose settings it chooses itself under these settings too."""
    before = dict(toys.TINY)
    toys.TINY.update(settings)
    try:
        on_nodes(check, *args)
    finally:
        toys.TINY.clear()
        toys.TINY.update(before)


@pytest.mark.parametrize("settings", [HPZ, MICS], ids=["hpz", "mics"])
def test_what_stands_behind_a_parameter(settings: dict[str, Any], ranks: RankPools) -> None:
    for check, *args in (
        (read_values, 3, {}, True),
        (read_gradients, 3, {}, 3),
        (read_moments, 3, {}, True),
        (write_values, 3, {}, False),
        (write_inside_gathered, 3),
        (write_gradients, 3, {}, 2),
        (write_moments, 3, False),
    ):
        ranks(4).run(under, settings, check, *args)


@pytest.mark.parametrize("settings", [HPZ, MICS], ids=["hpz", "mics"])
def test_ranks_that_share_a_sequence(settings: dict[str, Any], ranks: RankPools) -> None:
    ranks(4).run(under, settings, cut_sequences, 3, 2, "key")


def edit_between_gathers() -> None:
    """What was written while a second copy holds is found by the next gather, wherever from."""
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


def test_edits_reach_the_second_copy(ranks: RankPools) -> None:
    ranks(4).run(edit_between_gathers)


class Adapted(nn.Module):
    """A large frozen layer and a small trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.trained = nn.Linear(6, 6)

    def forward(self, inputs: Tensor, path: Any = ALL) -> Tensor:
        return self.trained(torch.tanh(self.frozen(inputs)))


def frozen_weights_cross_once() -> None:
    engine = node_engine(Adapted(), **HPZ)
    crossed = []
    for step in range(6):
        with sending(engine) as sent:
            one_step(engine, step)
        crossed.append(sent[Phase.FORWARD]["weights", "across"])
    engine.destroy()
    assert crossed == [4 * SHARD, 0, 2 * SHARD, 0, 2 * SHARD, 0]


def test_frozen_weights_cross_nodes_once(ranks: RankPools) -> None:
    ranks(4).run(frozen_weights_cross_once)


# ---- born sharded ----------------------------------------------------------------------------


def born(arguments: dict[str, Any], size: int | None, zero: dict[str, Any]) -> list[Tensor]:
    if size is not None:
        near, _ = Ranks.world().in_blocks(size)
        arguments = {**arguments, "zero_param_parallel_group": near.group}
    with hadal.zero.Init(**arguments):
        model = blocks()
    engine = node_engine(model, **zero)
    for step in range(4):
        one_step(engine, step)
    weights = list(engine.state_dict().values())
    engine.destroy()
    return weights


@pytest.mark.parametrize(("size", "zero"), [(2, HPZ), (None, HPZ), (None, MICS), (4, {})])
def test_models_are_born_sharded_all_the_same(size: Any, zero: Any, ranks: RankPools) -> None:
    config = {"zero_optimization": {"stage": 3, **zero}}
    found = ranks(4).run(born, {"config_dict_or_path": config}, size, zero)
    expected = ranks(4).run(born, {"enabled": False}, None, zero)
    assert all(map(torch.equal, found[3], expected[0]))


def test_a_group_at_birth_must_be_the_one_of_the_key(ranks: RankPools) -> None:
    for error in ranks(4).raises(born, {}, 2, {}):
        assert isinstance(error, UsageError)
        assert "zero_optimization.zero_hpz_partition_size 2" in str(error)


def born_beside_each_other() -> None:
    _, across = Ranks.world().in_blocks(2)
    with pytest.raises(UsageError, match=r"expected a block of consecutive ones"):
        hadal.zero.Init(zero_param_parallel_group=across.group)


def test_a_group_at_birth_must_be_a_block(ranks: RankPools) -> None:
    ranks(4).run(born_beside_each_other)


def born_in_copies() -> None:
    """The older door, with its arguments in its own order."""
    config = {"zero_optimization": {"stage": 3, **MICS}}
    with hadal.zero.MiCS_Init(None, None, None, True, config_dict_or_path=config):
        model = blocks()
    assert bool(model.blocks[0].weight.isnan().all())
    engine = node_engine(model, **MICS)
    one_step(engine, 0)
    engine.destroy()


def test_mics_init_is_a_name_of_init(ranks: RankPools) -> None:
    ranks(4).run(born_in_copies)


# ---- what does not fit -----------------------------------------------------------------------


def wrong_nodes(sizes: list[int | None], zero: dict[str, Any]) -> None:
    with nodes_of(sizes[comm.get_rank()]):
        engine_of(3, blocks(), zero_optimization={**CUT, **zero})


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([3] * 4, "nodes of 3 ranks do not divide the blocks of 4"),
        ([None] * 4, "rank 1: None"),
        ([2, 2, 1, None], "rank 2: 1, rank 3: None"),
    ],
)
def test_nodes_that_do_not_fit_are_told(sizes: Any, told: str, ranks: RankPools) -> None:
    for error in ranks(4).raises(wrong_nodes, sizes, HOPS):
        assert isinstance(error, ConfigError)
        assert error.faults[0].path == "zero_optimization.mics_hierarchical_params_gather"
        assert told in error.faults[0].message


def go_on(zero: dict[str, Any], folder: str) -> None:
    engine = node_engine(**zero)
    for step in range(4):
        one_step(engine, step)
    engine.save_checkpoint(folder)
    for step in range(4, 8):
        one_step(engine, step)
    expected = list(engine.state_dict().values())
    engine.destroy()
    again = node_engine(**zero)
    one_step(again, 9)
    again.eval()
    again.load_checkpoint(folder)
    for step in range(4, 8):
        one_step(again, step)
    assert all(map(torch.equal, again.state_dict().values(), expected))
    again.destroy()


def load_elsewhere(folder: str) -> None:
    engine = node_engine()
    engine.load_checkpoint(folder)


@pytest.mark.parametrize("zero", [HPZ, MICS], ids=["hpz", "mics"])
def test_training_goes_on_from_a_checkpoint(zero: Any, ranks: RankPools, tmp_path: Any) -> None:
    ranks(4).run(go_on, zero, str(tmp_path))
    if zero is MICS:
        for error in ranks(4).raises(load_elsewhere, str(tmp_path)):
            assert isinstance(error, CheckpointError)
