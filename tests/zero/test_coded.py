"""ZeRO++: weights and gradients travel as fewer bytes, and what stays exact stays exact.

Four ranks stand for two nodes of two. What a rank sends, and to whom, is counted where it sends.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import rarely
from engine.toys import engine_of
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from hadal import comm
from hadal.comm.codecs import Blockwise
from hadal.comm.collectives import gather_objects
from hadal.errors import UsageError
from hadal.zero import GatheredParameters
from hadal.zero.gathering import Phase

from .nodes import HPZ, Sent, nodes_of, sending
from .test_gathering import CUT, DROPS, blocks, one_step as one_path, random_rows

WIDTH, BLOCKS = 64, 3
WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
LOCO = {**GRADIENTS, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 3}}
BF16 = {"bf16": {"enabled": True}}


class Wide(nn.Module):
    """Blocks that are wide enough for scales to be few; lets tests look while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.seen: dict[str, Tensor] = {}
        self.edit: Any = lambda block: None

    def forward(self, inputs: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            inputs = inputs + torch.tanh(block(inputs))
            self.edit(number)
            self.seen[f"blocks.{number}.weight"] = block.weight.detach().clone()
        return inputs


def wide() -> Wide:
    torch.manual_seed(5)
    return Wide()


CHANGES = ("bf16", "fp16", "gradient_accumulation_steps")


def engine_on_nodes(stage: int = 3, model: nn.Module | None = None, **settings: Any) -> Any:
    changes = {key: settings.pop(key) for key in CHANGES if key in settings}
    zero = {**CUT, "reduce_bucket_size": 5000, **DROPS, "stage": stage, **settings}
    with nodes_of(2):
        return engine_of(stage, model or wide(), zero_optimization=zero, **changes)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 * step + comm.get_rank())
    inputs = torch.randn(8, WIDTH, generator=generator)
    return inputs, inputs.roll(1, 1).sign()


def one_step(engine: Any, step: int) -> float:
    inputs, targets = batch(step)
    dtype = next(engine.module.parameters()).dtype
    loss = (engine(inputs.to(dtype)).float() - targets).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.state_dict().items()}


# ---- bytes ------------------------------------------------------------------------------------


def sent_in_a_step(stage: int, settings: dict[str, Any]) -> dict[Phase, Sent]:
    engine = engine_on_nodes(stage, **BF16, **settings)
    for step in range(3):
        one_step(engine, step)
    with sending(engine) as sent:
        one_step(engine, 3)
    engine.destroy()
    return sent


def sums(sent: dict[Phase, Sent]) -> Sent:
    return sum(sent.values(), Counter())


@pytest.mark.claims("zero_optimization.zero_quantized_weights")
def test_weights_take_about_half_the_bytes(ranks: RankPools) -> None:
    plain = ranks(4).run(sent_in_a_step, 3, {})
    for one, other in zip(ranks(4).run(sent_in_a_step, 3, WEIGHTS), plain, strict=True):
        for where in ("inside", "across"):
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                assert 0.5 < one[phase]["weights", where] / other[phase]["weights", where] <= 0.52
            assert sums(one)["gradients", where] == sums(other)["gradients", where]


def test_with_a_second_copy_coded_weights_cross_nodes_in_forward_only(ranks: RankPools) -> None:
    plain = ranks(4).run(sent_in_a_step, 3, HPZ)
    for one, other in zip(ranks(4).run(sent_in_a_step, 3, {**HPZ, **WEIGHTS}), plain, strict=True):
        forward = [sent[Phase.FORWARD]["weights", "across"] for sent in (one, other)]
        assert 0.5 < forward[0] / forward[1] <= 0.52
        assert not one[Phase.BACKWARD]["weights", "across"]


@pytest.mark.fast_cells("3")
@pytest.mark.claims("zero_optimization.zero_quantized_gradients")
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_take_about_a_quarter_and_cross_nodes_once(stage: int, ranks: RankPools) -> None:
    plain = ranks(4).run(sent_in_a_step, stage, {})
    for one, other in zip(ranks(4).run(sent_in_a_step, stage, GRADIENTS), plain, strict=True):
        across = sums(one)["gradients", "across"] / sums(other)["gradients", "across"]
        # A node's two ranks each send half of the node's sum, in a bit more than a quarter.
        assert 0.125 < across <= 0.27 / 2
        inside = sums(one)["gradients", "inside"] / sums(other)["gradients", "inside"]
        assert 0.5 < inside <= 0.27 * 2


def logged_in_a_step(stage: int, settings: dict[str, Any]) -> tuple[int, float]:
    """Bytes that a rank sends in a step, by the log: of gathers, and of reductions across nodes."""
    engine = engine_on_nodes(stage, **BF16, **settings)
    for step in range(3):
        one_step(engine, step)
    comm.start_log(debug=True)
    one_step(engine, 3)
    rows = comm.log_summary()
    comm.stop_log()
    comm.reset_log()
    engine.destroy()
    weights = sum(row.sent_nbytes for row in rows if row.site.startswith("the gather of"))
    mine = comm.get_rank() // 2
    across = 0.0
    for row in rows:
        if row.site.startswith("the reduction of"):
            others = len(row.ranks) - 1
            far = sum(rank // 2 != mine for rank in row.ranks)
            across += row.sent_nbytes * far / others
    return weights, across


def test_the_log_of_collectives_counts_as_few_bytes(ranks: RankPools) -> None:
    both = {**WEIGHTS, **GRADIENTS}
    plain = ranks(4).run(logged_in_a_step, 3, {})
    for one, other in zip(ranks(4).run(logged_in_a_step, 3, both), plain, strict=True):
        assert 0.5 < one[0] / other[0] <= 0.52
        assert 0.125 < one[1] / other[1] <= 0.27


def train_below(stage: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    engine = engine_on_nodes(stage, **BF16, **settings)
    for step in range(2):
        one_step(engine, step)
    found = weights_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_where_gradients_are_not_sharded_nothing_is_coded(stage: int, ranks: RankPools) -> None:
    keys = {**WEIGHTS, **GRADIENTS, "zero_quantized_nontrainable_weights": True}
    plain, coded = (ranks(2).run(train_below, stage, settings) for settings in ({}, keys))
    for one, other in zip(plain, coded, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())


def sent_without_nodes() -> tuple[Sent, bool]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hadal").addHandler(handler)
    with nodes_of(None):
        engine = engine_of(
            3, wide(), zero_optimization={**CUT, "reduce_bucket_size": 5000, **GRADIENTS}, **BF16
        )
    logging.getLogger("hadal").removeHandler(handler)
    with sending(engine) as sent:
        one_step(engine, 0)
    engine.destroy()
    return sums(sent), any("in one hop over all ranks" in message for message in records)


def test_where_nodes_are_unknown_there_is_one_hop_and_that_is_told(ranks: RankPools) -> None:
    for rank, (sent, is_told) in enumerate(ranks(4).run(sent_without_nodes)):
        assert sent["gradients", "across"] == 2 * sent["gradients", "inside"] > 0
        assert is_told == (rank == 0)


# ---- what stays exact -------------------------------------------------------------------------


def look(settings: dict[str, Any]) -> None:
    engine = engine_on_nodes(**BF16, **WEIGHTS, **settings)
    for step in range(3):
        one_step(engine, step)
    exact = weights_of(engine)
    masters = {
        name: hadal.utils.safe_get_full_fp32_param(parameter)
        for name, parameter in engine.module.named_parameters()
    }
    for name, value in exact.items():
        assert torch.equal(value, masters[name].to(torch.bfloat16)), name
    with torch.no_grad():
        engine(batch(7)[0].bfloat16())
    seen = engine.module.seen
    everybody = gather_objects(seen, engine._parts.runtime.ranks)
    for name, value in seen.items():
        assert all(torch.equal(value, other[name]) for other in everybody), name
        assert not torch.equal(value, exact[name]), name
        step = exact[name].float().abs().max() / 127
        assert (value.float() - exact[name].float()).abs().max() < step
    with GatheredParameters(list(engine.module.parameters())):
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, exact[name]), name
    # In a forward they are read as it uses them; and what was looked at has not changed.
    with torch.no_grad():
        engine(batch(7)[0].bfloat16())
    assert all(torch.equal(engine.module.seen[name], value) for name, value in seen.items())
    for bucket in engine._parts.runtime.buckets:
        codec, shard = bucket.transport.gather, bucket.shard
        assert codec == Blockwise(8, 256)
        assert torch.equal(shard, bucket.master.bfloat16())
    found = engine._consolidated_16bit_state_dict()
    if found is not None:
        assert all(torch.equal(found[name], value) for name, value in exact.items())
    # Where a block is kept, what forward has left must not be what the program is left with.
    model = engine.module
    engine(batch(7)[0].bfloat16())
    engine.destroy()
    assert all(torch.equal(p, exact[name]) for name, p in model.named_parameters())


@pytest.mark.fast_cells("announced")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        HPZ,
        {"mics_hierarchical_params_gather": True},
        {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9},
        {"divergent_ranks": True},
    ],
    ids=["plain", "hpz", "hops", "kept", "announced"],
)
def test_ranks_compute_with_the_same_rounded_weights_and_others_find_exact_ones(
    settings: dict[str, Any], ranks: RankPools
) -> None:
    ranks(4).run(look, settings)


@on_ranks(2)
def test_reads_between_forward_and_backward_change_nothing() -> None:
    """Whole weights are asked for while forward has left rounded ones for backward."""
    kept = {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9}
    both = []
    for reads in (False, True):
        engine = engine_on_nodes(**BF16, **WEIGHTS, **kept)
        for step in range(3):
            inputs, targets = batch(step)
            loss = (engine(inputs.bfloat16()).float() - targets).square().mean()
            if reads:
                rounded = engine.module.seen["blocks.0.weight"]
                with GatheredParameters([engine.module.blocks[0].weight]):
                    assert not torch.equal(engine.module.blocks[0].weight, rounded)
            engine.backward(loss)
            engine.step()
        both.append(weights_of(engine))
        engine.destroy()
    assert all(torch.equal(both[0][name], value) for name, value in both[1].items())


@on_ranks(4)
def test_a_second_copy_is_always_of_what_forward_uses() -> None:
    """A coded gather for the others leaves the copy behind; this rank holds exact weights."""
    engine = engine_on_nodes(**BF16, **WEIGHTS, **HPZ)
    bucket = engine._parts.runtime.buckets[0]
    exact, shard = torch.empty(bucket.layout.numel, dtype=torch.bfloat16), bucket.shard.clone()
    bucket.unshard(exact=True)
    exact.copy_(bucket.full)
    assert torch.equal(exact[bucket.span[0] : bucket.span[1]], shard)
    bucket.serve()
    bucket.reshard()
    with sending(engine) as sent:
        bucket.unshard()
    assert not sums(sent)["weights", "across"]
    near = bucket.full.clone()
    bucket.reshard()
    bucket.outdate()
    bucket.unshard()
    assert torch.equal(bucket.full, near)
    assert not torch.equal(near, exact)
    bucket.reshard()
    engine.destroy()


def edit(settings: dict[str, Any]) -> None:
    engine = engine_on_nodes(**BF16, **WEIGHTS, **settings)
    one_step(engine, 0)
    exact = weights_of(engine)
    weight = engine.module.blocks[1].weight
    with GatheredParameters([weight], modifier_rank=1):
        if comm.get_rank() == 1:
            weight.data[3] = 0.125
    exact["blocks.1.weight"][3] = 0.125
    found = weights_of(engine)
    assert all(torch.equal(found[name], value) for name, value in exact.items())

    def write(number: int) -> None:
        if number == 2:
            with torch.no_grad():
                engine.module.blocks[2].weight[5, ::2] = 0.25

    engine.module.edit = write
    with torch.no_grad():
        engine(batch(1)[0].bfloat16())
    engine.module.edit = lambda number: None
    exact["blocks.2.weight"][5, ::2] = 0.25
    found = weights_of(engine)
    for name, value in exact.items():
        assert torch.equal(found[name], value), name
    with torch.no_grad():
        engine(batch(1)[0].bfloat16())
    seen = engine.module.seen
    assert (seen["blocks.1.weight"][3].float() - 0.125).abs().max() < 0.002
    everybody = gather_objects(seen, engine._parts.runtime.ranks)
    assert all(torch.equal(seen[name], one[name]) for one in everybody for name in seen)
    engine.destroy()


@pytest.mark.fast_cells("plain")
@pytest.mark.parametrize("settings", [{}, HPZ], ids=["plain", "hpz"])
def test_what_users_write_is_kept_and_nothing_beside_it_is_rounded(
    settings: dict[str, Any], ranks: RankPools
) -> None:
    ranks(4).run(edit, settings)


@pytest.mark.fast_cells("hpz")
@pytest.mark.parametrize("settings", [{}, HPZ], ids=["plain", "hpz"])
@on_ranks(4)
def test_ranks_may_read_different_weights(settings: dict[str, Any]) -> None:
    """Each rank asks for another parameter, and the others lend."""
    engine = engine_on_nodes(**BF16, **WEIGHTS, **settings)
    one_step(engine, 0)
    exact = weights_of(engine)
    for _ in range(2):
        with torch.no_grad():
            engine(batch(1)[0].bfloat16())
        number = comm.get_rank() % BLOCKS
        weight = engine.module.blocks[number].weight
        with GatheredParameters([weight]):
            assert torch.equal(weight, exact[f"blocks.{number}.weight"])
    seen = engine.module.seen
    everybody = gather_objects(seen, engine._parts.runtime.ranks)
    assert all(torch.equal(seen[name], one[name]) for one in everybody for name in seen)
    engine.destroy()


# ---- one training, however weights come and go -------------------------------------------------


# What the first way has given, for all others.
BASE: list[dict[str, Tensor]] = []
PLAIN: dict[int, list[list[float]]] = {}


def trained(settings: dict[str, Any], folder: str, born: bool) -> dict[str, Tensor]:
    settings = dict(settings)
    if settings.pop("on_disk", False):
        settings["offload_param"] = {"device": "nvme", "nvme_path": folder}
    model = None
    if born:
        with hadal.zero.Init():
            model = wide()
    engine = engine_on_nodes(model=model, **BF16, **WEIGHTS, **GRADIENTS, **settings)
    for step in range(4):
        one_step(engine, step)
    found = weights_of(engine)
    engine.destroy()
    return found


@pytest.mark.fast_cells("no-overlap")
@pytest.mark.parametrize(
    "settings, born",
    [
        ({"divergent_ranks": True}, False),
        ({"stage3_prefetch_bucket_size": 0}, False),
        ({"overlap_comm": False}, False),
        ({"on_disk": True}, False),
        ({}, True),
        ({"enable_sanity_checks": True, **HPZ}, False),
    ],
    ids=["announced", "no-prefetch", "no-overlap", "disk", "born", "sanity-hpz"],
)
def test_training_is_the_same_however_weights_come_and_go(
    settings: dict[str, Any], born: bool, ranks: RankPools, tmp_path: Path
) -> None:
    if not BASE:
        BASE.extend(ranks(4).run(trained, {}, str(tmp_path), False))
    found = ranks(4).run(trained, settings, str(tmp_path), born)
    for one, other in zip(found, BASE, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())


def losses(stage: int, settings: dict[str, Any]) -> list[float]:
    engine = engine_on_nodes(stage, **BF16, **settings)
    found = [one_step(engine, step % 4) for step in range(40)]
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, settings",
    [
        pytest.param(2, GRADIENTS, id="gradients"),
        rarely(3, {**WEIGHTS, **GRADIENTS, **HPZ}, id="all-hpz"),
        rarely(3, {**WEIGHTS, **LOCO}, id="loco"),
    ],
)
def test_the_loss_falls_as_it_does_in_plain_training(
    stage: int, settings: dict[str, Any], ranks: RankPools
) -> None:
    if stage not in PLAIN:
        PLAIN[stage] = ranks(4).run(losses, stage, {})
    plain = torch.tensor(PLAIN[stage]).mean(0)
    coded = torch.tensor(ranks(4).run(losses, stage, settings)).mean(0)
    assert plain[-1] < plain[0] / 2
    assert not torch.equal(plain, coded)
    assert ((coded - plain).abs() / plain).max() < 0.02


# ---- overflow, error feedback and checkpoints -------------------------------------------------


def overflow() -> None:
    engine = engine_on_nodes(
        **WEIGHTS, **LOCO, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    )
    one_step(engine, 0)
    before, scale = weights_of(engine), engine.loss_scale
    residuals = [r.clone() for g in engine._parts.runtime.gradients for r in g.residuals]
    inputs, targets = batch(1)
    loss = (engine(inputs.half()).float() - targets).square().mean()
    engine.backward(loss * (torch.inf if comm.get_rank() == 2 else 1.0))
    engine.step()
    assert engine.skipped_steps == 1
    after = weights_of(engine)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert engine.loss_scale == scale / 2
    assert residuals
    for gradients in engine._parts.runtime.gradients:
        assert all(residual.isfinite().all() for residual in gradients.residuals)
    assert one_step(engine, 2) < 10
    assert engine.skipped_steps == 1
    engine.destroy()


def test_a_gradient_that_overflows_is_seen_by_every_rank(ranks: RankPools) -> None:
    ranks(4).run(overflow)


@on_ranks(4)
def test_what_was_lost_follows_the_loss_scale() -> None:
    """Residuals grow with the loss scale."""
    engine = engine_on_nodes(
        **LOCO, fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
    )
    gradients, scale = engine._parts.runtime.gradients, engine.loss_scale
    while engine.loss_scale == scale:
        assert engine.global_steps < 5
        inputs, targets = batch(engine.global_steps)
        engine.backward((engine(inputs.half()).float() - targets).square().mean())
        before = [residual.clone() for g in gradients for residual in g.residuals]
        engine.step()
    after = [residual for g in gradients for residual in g.residuals]
    assert engine.loss_scale == 2 * scale
    assert after
    assert all(torch.equal(one, 2 * other) for one, other in zip(after, before, strict=True))
    engine.destroy()


@pytest.mark.slow
@pytest.mark.claims("zero_optimization.zeropp_loco_param")
@pytest.mark.claims("zero_optimization.zeropp_loco_param.err_beta")
@pytest.mark.claims("zero_optimization.zeropp_loco_param.reset_T")
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(4)
def test_what_is_lost_is_averaged_and_forgotten_after_so_many_updates(stage: int) -> None:
    found = []
    for decay in (0.0, 0.75):
        settings = {**GRADIENTS, "zeropp_loco_param": {"err_beta": decay, "reset_T": 2}}
        engine = engine_on_nodes(stage, gradient_accumulation_steps=2, **settings)
        engine.optimizer.param_groups[0]["lr"] = 0.0  # the same gradients each time
        residuals = []
        for _ in range(5):
            one_step(engine, 0)  # each of the two micro-steps is reduced
            one_step(engine, 1)
            gradients = engine._parts.runtime.gradients
            residuals.append(torch.cat([r.clone() for g in gradients for r in g.residuals]))
        # After two updates it begins anew.
        for first, second in ((0, 2), (1, 3), (2, 4)):
            assert torch.equal(residuals[first], residuals[second])
        assert not torch.equal(residuals[0], residuals[1])
        found.append(residuals)
        engine.destroy()
    # An average stays smaller than what it is made of.
    for average, last in zip(found[1], found[0], strict=True):
        assert 0 < average.norm() < 0.7 * last.norm()


@on_ranks(4)
def test_a_checkpoint_forgets_what_was_lost_so_that_a_resumed_run_is_the_same(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hadal").addHandler(handler)
    engine = engine_on_nodes(**BF16, **WEIGHTS, **LOCO)
    for step in range(2):
        one_step(engine, step)
    engine.save_checkpoint(tmp_path, tag="one")
    assert not any(g.residuals for g in engine._parts.runtime.gradients)
    for step in range(2, 4):
        one_step(engine, step)
    on = weights_of(engine)
    engine.save_checkpoint(tmp_path, tag="two")
    engine.destroy()
    other = engine_on_nodes(**BF16, **WEIGHTS, **LOCO)
    one_step(other, 9)
    other.load_checkpoint(tmp_path, tag="one")
    assert not any(g.residuals for g in other._parts.runtime.gradients)
    for step in range(2, 4):
        one_step(other, step)
    again = weights_of(other)
    other.destroy()
    logging.getLogger("hadal").removeHandler(handler)
    assert all(torch.equal(on[name], value) for name, value in again.items())
    times = sum("error feedback" in message for message in told)
    assert times == (2 if comm.get_rank() == 0 else 0), told  # once for each engine


# ---- frozen weights ---------------------------------------------------------------------------

FROZEN = {"zero_quantized_nontrainable_weights": True}


def adapted() -> Wide:
    model = wide()
    for number, block in enumerate(model.blocks):
        block.requires_grad_(number == 1)
    return model


def held_nbytes(engine: Any) -> int:
    buckets = [b for b in engine._parts.runtime.buckets if not b.trainable]
    return sum(t.nbytes for bucket in buckets for t in bucket._shard.memory)


@pytest.mark.fast_cells("plain")
@pytest.mark.claims("zero_optimization.zero_quantized_nontrainable_weights")
@pytest.mark.parametrize("settings", [{}, HPZ, WEIGHTS], ids=["plain", "hpz", "coded"])
@on_ranks(4)
def test_frozen_weights_rest_in_half_the_memory(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = engine_on_nodes(model=adapted(), **BF16, **settings)
    given, nbytes = weights_of(plain), held_nbytes(plain)
    plain.destroy()
    engine = engine_on_nodes(model=adapted(), **BF16, **FROZEN, **settings)
    assert 0.5 < held_nbytes(engine) / nbytes < 0.53
    rounded = weights_of(engine)
    for name, value in rounded.items():
        is_trained = name.startswith("blocks.1.")
        assert torch.equal(value, given[name]) == is_trained, name
        assert (value - given[name]).abs().max() <= given[name].abs().max() / 127
    with sending(engine) as sent:
        one_step(engine, 0)
    # Two of three blocks cost half; the trained one travels as it is.
    assert sums(sent)["weights", "across"] > 0
    assert all(
        torch.equal(engine.module.seen[name], value)
        for name, value in rounded.items()
        if name in engine.module.seen and not name.startswith("blocks.1.")
    )
    for step in range(1, 3):
        one_step(engine, step)
    trained = weights_of(engine)
    assert not torch.equal(trained["blocks.1.weight"], rounded["blocks.1.weight"])
    assert torch.equal(trained["blocks.0.weight"], rounded["blocks.0.weight"])
    weight = engine.module.blocks[0].weight
    with GatheredParameters([weight], modifier_rank=0):
        if comm.get_rank() == 0:
            weight.data[3] = 0.125
    edited = weights_of(engine)["blocks.0.weight"]
    assert (edited[3] - 0.125).abs().max() < 0.002
    assert torch.equal(edited[5:], rounded["blocks.0.weight"][5:])
    assert held_nbytes(engine) < 0.53 * nbytes
    engine.save_checkpoint(tmp_path, tag="held")
    saved = weights_of(engine)
    engine.destroy()
    for wishes in (FROZEN, {}):
        other = engine_on_nodes(model=adapted(), **BF16, **wishes, **settings)
        other.load_checkpoint(tmp_path, tag="held")
        found = weights_of(other)
        assert all(torch.equal(found[name], value) for name, value in saved.items())
        assert one_step(other, 3) < 10
        other.destroy()


@on_ranks(2)
def test_a_frozen_weight_may_be_trained_later() -> None:
    """A frozen weight that is trained later: from what it was rounded to, exactly from then on."""
    engine = engine_on_nodes(model=adapted(), **BF16, **FROZEN)
    one_step(engine, 0)
    rounded = weights_of(engine)
    engine.module.blocks[0].requires_grad_(True)
    engine.optimizer.add_param_group({"params": list(engine.module.blocks[0].parameters())})
    for name, value in weights_of(engine).items():
        assert torch.equal(value, rounded[name]), name
    one_step(engine, 1)
    assert torch.equal(engine.module.seen["blocks.0.weight"], rounded["blocks.0.weight"])
    with torch.no_grad():
        engine(batch(2)[0].bfloat16())
    found = weights_of(engine)["blocks.0.weight"]
    assert not torch.equal(found, rounded["blocks.0.weight"])
    assert torch.equal(engine.module.seen["blocks.0.weight"], found)
    engine.destroy()


# ---- any paths --------------------------------------------------------------------------------


def along(rows: Any, settings: dict[str, Any]) -> None:
    zero = {**CUT, **settings, **WEIGHTS, **GRADIENTS, "enable_sanity_checks": True}
    with nodes_of(2):
        engine = engine_of(3, blocks(), zero_optimization=zero)
    for step, row in enumerate(rows):
        one_path(engine, step, row[comm.get_rank()])
        if step == 2:
            with GatheredParameters(list(engine.module.parameters())):
                pass
    assert torch.stack([p.isfinite().all() for p in engine.state_dict().values()]).all()
    engine.destroy()


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("seed", range(4))
def test_ranks_on_any_paths_are_given_the_same_weights(seed: int, ranks: RankPools) -> None:
    settings = [{}, HPZ, DROPS, {**HPZ, "mics_hierarchical_params_gather": True}][seed]
    ranks(4).run(along, random_rows(seed, 4, 5), settings)


# ---- at birth ---------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_asked_at_birth_must_be_asked_of_initialize() -> None:
    with hadal.zero.Init(zero_quantized_weights=True, zero_quantized_nontrainable_weights=True):
        model = wide()
    with pytest.raises(UsageError, match=r"created with .*; set .*\.zero_quantized_weights true"):
        engine_on_nodes(model=model, **FROZEN)
    with pytest.raises(UsageError, match=r"zero_quantized_nontrainable_weights true"):
        engine_on_nodes(model=model, **WEIGHTS)
    engine = engine_on_nodes(model=model, **WEIGHTS, **FROZEN)
    one_step(engine, 0)
    engine.destroy()
