"""`hadal.plan`: memory along an update, and what to change if it does not fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from itertools import repeat
from typing import Any

import pytest
import torch
from ranks import RankPools
from sequence.models import llama, tokens
from torch import Tensor, nn

import hadal
from hadal.comm import Ranks
from hadal.comm.imagined import ImaginedWorld
from hadal.config import load_config
from hadal.engine.activations import _Recorder
from hadal.engine.candidates import CandidatePlanner, advise, merged
from hadal.engine.clusters import cluster_here, cluster_named, cluster_of
from hadal.engine.foresight import Foresight, Planner
from hadal.engine.listeners import GivenArguments
from hadal.engine.memory import SizedModel
from hadal.engine.topology import RequestedRanks
from hadal.errors import ConfigError, ModelError
from hadal.plugins.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from hadal.plugins.pipeline.schedule import BackwardPass, BackwardWeights, ForwardPass

WIDTH, BLOCKS, ROWS = 512, 6, 4096


class Block(nn.Module):
    """A block with a wide layer, of whose output all is kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.narrow(torch.relu(self.widen(values)))


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(BLOCKS)))


BATCH = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta")
PSI = BLOCKS * (8 * WIDTH * WIDTH + 5 * WIDTH)


def planned(stage: int = 0, batch: Any = BATCH, **keys: Any) -> Foresight:
    raw = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    return hadal.plan(model(), merged(raw, keys), batch, cluster="h100x4")


@pytest.mark.parametrize("stage", range(4))
def test_the_peak_is_that_of_one_moment(stage: int) -> None:
    found = planned(stage)
    peak = found.peak
    assert peak is not None and found.micro_step is not None
    assert peak.phase == "backward"
    # When it begins, everything is saved, and no gradient has arrived.
    begun = next(moment for moment in found.moments if moment.phase == "backward")
    assert begun.held["gradients"] == 0
    assert 1 <= begun.held["activations"] / found.micro_step.kept < 1.05
    cuts = [4 if stage >= first else 1 for first in (3, 1)]
    assert peak.held["weights"] == pytest.approx(2 * PSI / cuts[0], rel=0.01)
    assert peak.held["optimizer"] == pytest.approx(12 * PSI / cuts[1], rel=0.01)
    # Each layer's input, of which ReLU's output is one; and the loss.
    assert found.micro_step.kept == 2 * ROWS * BLOCKS * (WIDTH + 4 * WIDTH) + 4
    assert found.total.device == peak.total
    assert [m.phase for m in found.moments].count("step") == 1


def test_gradients_of_earlier_micro_steps_are_there_in_forward() -> None:
    one, many = planned(2), planned(2, gradient_accumulation_steps=4)
    first = next(moment for moment in one.moments if moment.phase == "forward")
    later = next(moment for moment in many.moments if moment.phase == "forward")
    assert first.held["gradients"] == 0
    assert later.held["gradients"] == pytest.approx(2 * PSI / 4, rel=0.01)


def test_inputs_of_recomputed_modules_may_be_on_the_host() -> None:
    units = {"activation_checkpointing": {"modules": "units", "cpu_checkpointing": True}}
    found = planned(3, **units)
    plain = planned(3, activation_checkpointing={"modules": "units"})
    moved = plain.total.device - found.total.device
    assert next(need.held.host for need in found.kinds if need.kind == "inputs") > 0
    assert 0 < moved <= found.micro_step.inputs_of_recomputed * 1.02  # type: ignore[union-attr]


def test_states_that_rest_in_passes_are_on_the_host_there() -> None:
    away = {"deepcompile": True, "offload_opt_states": True}
    found = planned(2, compile=away)
    passing, step = found.moments[0].held, found.moments[-1].held
    assert passing["optimizer"] == pytest.approx(4 * PSI / 4, rel=0.01)  # the masters
    assert step["optimizer"] == pytest.approx(12 * PSI / 4, rel=0.01)
    (optimizer,) = (need.held for need in found.kinds if need.kind == "optimizer")
    assert optimizer.host == step["optimizer"] - passing["optimizer"]


def test_blocks_are_told_as_if_none_was_recomputed() -> None:
    plain = planned(3)
    units = planned(3, activation_checkpointing={"modules": "units"})
    (first, *others) = units.blocks
    assert [first, *others] == plain.blocks
    assert (first.kept, first.recomputed) == (2 * ROWS * 5 * WIDTH, 2 * ROWS * WIDTH)
    saved = sum(block.kept - block.recomputed for block in (first, *others))
    steps = plain.micro_step, units.micro_step
    assert saved == steps[0].kept - steps[1].kept  # type: ignore[union-attr]
    assert planned(3, None).blocks == []


def test_without_a_batch_all_but_activations_is_planned() -> None:
    found = planned(3, None)
    assert found.moments == [] and found.time is None and found.peak is None
    assert {need.kind for need in found.kinds} >= {"weights", "optimizer", "gathers", "reductions"}


def test_the_time_of_an_update_comes_with_it() -> None:
    found = planned(3)
    assert found.time is not None
    assert found.time.samples == 4 * ROWS and 0 < found.time.utilization < 1
    again = planned(3, activation_checkpointing={"modules": "units"})
    assert again.time is not None and again.time.seconds > found.time.seconds


def tight(found: Foresight, share: float) -> Foresight:
    """The same plan on devices that have only a share of what it needs beside the libraries."""
    libraries = sum(
        need.held.device for need in found.kinds if need.kind in ("communicators", "context")
    )
    room = int(libraries + share * (found.total.device - libraries))
    cluster = dataclasses.replace(found.cluster, device_nbytes=room)
    return hadal.plan(found.rank.model, found.raw, found.batch, cluster=cluster)


def test_changes_come_in_the_order_of_their_cost() -> None:
    whole = planned(0)
    assert whole.fits and advise(whole) == []
    # A little less than there is: the optimizer's shards are enough.
    (only,) = advise(tight(whole, 0.99))
    assert only.patch == {"zero_optimization": {"stage": 1}} and only.after.fits
    assert only.saved.device == pytest.approx(12 * PSI * 3 / 4, rel=0.05)
    # Much less: activations go first, as nothing else is as large; and each change is needed.
    some = advise(tight(whole, 0.3))
    assert some[-1].after.fits
    patches = [change.patch for change in some]
    assert {"activation_checkpointing": {"modules": "units"}} in patches
    for left_out in range(len(some)):
        raw = dict(whole.raw)
        for number, patch in enumerate(patches):
            raw = raw if number == left_out else merged(raw, patch)
        assert not hadal.plan(whole.rank.model, raw, BATCH, cluster=some[-1].after.cluster).fits


def test_a_host_that_computes_offloads_nothing() -> None:
    whole = planned(0)
    small = dataclasses.replace(cluster_here(torch.device("cpu"), 2), host_nbytes=1000)
    found = hadal.plan(whole.rank.model, whole.raw, BATCH, cluster=small)
    patches = [str(change.patch) for change in advise(found)]
    assert patches and not any("offload" in patch for patch in patches)


def given(whole: nn.Module) -> GivenArguments:
    return GivenArguments(whole, RequestedRanks(), None)


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_search_offloads_to_a_host_that_computes_only_if_asked(is_listed: bool) -> None:
    away = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    own = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}
    raw = {"train_micro_batch_size_per_gpu": 8, **(own if is_listed else {})}
    planner = CandidatePlanner(
        given(model()), load_config(raw, world_size=2), cluster_here(torch.device("cpu"), 2), 1
    )
    size = {"train_micro_batch_size_per_gpu": 8}
    batch = torch.empty(8, WIDTH, device="meta")
    found, moved = planner.plan(batch, [size | own, size | away])
    assert bool(found) == is_listed and bool(moved) == is_listed


def test_smaller_micro_batches_come_before_the_host() -> None:
    whole = planned(3, activation_checkpointing={"modules": "units"})
    some = advise(tight(whole, 0.8))
    assert some[-1].after.fits
    assert some[0].patch == {
        "train_micro_batch_size_per_gpu": ROWS // 2,
        "gradient_accumulation_steps": 2,
    }
    assert some[0].after.time.samples == 4 * ROWS  # type: ignore[union-attr]


AWAY = {"device": "cpu", "pin_memory": True}


def test_micro_batches_are_halved_again_when_the_state_has_left_the_device() -> None:
    """The update is the peak at first, where smaller batches save nothing."""
    rows, half = ROWS // 4, {"train_micro_batch_size_per_gpu": ROWS // 8}
    raw = planned(0, activation_checkpointing={"modules": "units"}).raw
    raw = merged(raw, {"train_micro_batch_size_per_gpu": rows})
    whole = hadal.plan(model(), raw, BATCH[:rows], cluster="h100x1")
    assert whole.peak is not None and whole.peak.phase == "step"
    zero = {"stage": 3, "offload_optimizer": AWAY, "offload_param": AWAY}
    moved = merged(raw, half | {"zero_optimization": zero})
    least = hadal.plan(model(), moved, BATCH[: rows // 2], cluster="h100x1").total.device
    cluster = dataclasses.replace(whole.cluster, device_nbytes=least)
    some = advise(hadal.plan(model(), raw, BATCH[:rows], cluster=cluster))
    assert some[-1].after.fits
    assert {key for change in some for key in change.patch} >= half.keys()


def test_what_a_host_has_no_room_for_goes_to_a_disk() -> None:
    large, raw = SizedModel(2_000_000_000), {"train_batch_size": 1, "bf16": {"enabled": True}}
    room = {"device_nbytes": 16_000_000_000, "host_nbytes": 8_000_000_000}
    tiny = dataclasses.replace(cluster_named("h100x1"), **room)
    some = advise(hadal.plan(large, raw, cluster=tiny))
    assert some[-1].after.fits
    patches = [str(change.patch) for change in some]
    assert "nvme" in patches[-1]
    assert not any("offload_param" in patch for patch in patches)  # the host would lack more


def test_buffers_of_the_model_are_counted() -> None:
    one, config = model(), planned(3).raw
    before = hadal.plan(one, config, BATCH, cluster="h100x4").total.device
    one.register_buffer("mask", torch.empty(1000, 1000, device="meta"))
    assert hadal.plan(one, config, BATCH, cluster="h100x4").total.device == before + 4_000_000


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_plan_does_not_depend_on_where_it_is_asked_for(context: Any) -> None:
    with context():
        found = planned(2)
    assert found.total == planned(2).total


def test_a_change_that_does_not_fit_the_model_is_left_out() -> None:
    raw = {"train_micro_batch_size_per_gpu": ROWS, "optimizer": {"type": "AdamW"}}
    one = model()[0]  # no repeated blocks, of which "units" could be recomputed
    whole = hadal.plan(one, raw, BATCH.float(), cluster="h100x4")
    assert advise(tight(whole, 0.9))[-1].after.fits
    assert not advise(tight(whole, -0.1))[-1].after.fits


class Scattered(nn.Sequential):
    """Its shapes depend on values."""

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = super().forward(values[values.sum(1).nonzero()[:, 0]])
        return output


def test_a_plan_with_values_has_changes_too() -> None:
    one, batch = Scattered(*(Block() for _ in range(2))), torch.ones(64, WIDTH)
    raw = {"train_micro_batch_size_per_gpu": 64, "optimizer": {"type": "AdamW"}}
    whole = hadal.plan(one, raw, batch, cluster="h100x4", with_values=True)
    room = whole.total.device - 10_000_000
    small = dataclasses.replace(whole.cluster, device_nbytes=room)
    (change,) = advise(dataclasses.replace(whole, cluster=small))
    assert change.patch == {"zero_optimization": {"stage": 1}} and change.after.fits


def test_what_never_fits_is_told_as_far_as_it_goes() -> None:
    whole = planned(0)
    some = advise(tight(whole, -0.1))
    assert some and not some[-1].after.fits


# ---- models in parts -----------------------------------------------------------------------------

IN_PARTS: dict[str, dict[str, Any]] = {
    "slices": {"tensor_parallel": {"autotp_size": 2}},
    "sequences": {"sequence_parallel_size": 2},
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_ranks_with_parts_need_less(name: str) -> None:
    raw = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
    batch = tokens(0)
    whole = hadal.plan(llama(), raw, batch, cluster="h100x4")
    found = hadal.plan(llama(), raw | IN_PARTS[name], batch, cluster="h100x4")
    assert whole.micro_step is not None and found.micro_step is not None
    assert 0.4 < found.micro_step.kept / whole.micro_step.kept < 0.9
    assert found.time is not None and whole.time is not None
    assert found.time.samples == whole.time.samples / 2
    weights = [plan.memory.states[0].held.device for plan in (found, whole)]
    assert (weights[0] < weights[1]) == (name == "slices")
    exchange = found.time.parts[name]
    assert exchange.exposed == pytest.approx(exchange.seconds) and exchange.seconds > 0
    assert exchange.wire_nbytes > 0 and whole.time.parts[name].wire_nbytes == 0


def test_stages_keep_what_their_schedule_keeps() -> None:
    """And they wait for each other."""
    raw = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    kept = {}
    for schedule in ("1f1b", "gpipe"):
        section = {"auto": True, "stages": 2, "schedule": schedule}
        found = hadal.plan(llama(), raw | {"pipeline": section}, tokens(0), cluster="h100x4")
        assert len(found.stages) == 2 and found.total.device == max(found.stages)
        assert found.micro_step is not None and found.time is not None
        kept[schedule] = found.micro_step.peak
        parts = found.time.parts
        assert found.time.samples == 2 * 4 * 2
        # Hidden states in fp32, with positions, or their gradients.
        tokens_sent = 4 * 2 * 12
        assert parts["messages"].wire_nbytes in (tokens_sent * (4 * 32 + 8), tokens_sent * 4 * 32)
        assert sum(part.exposed for part in parts.values()) == pytest.approx(found.time.seconds)
        assert parts["bubble"].seconds > 0
    assert 1.5 < kept["gpipe"] / kept["1f1b"] <= 4


def test_gradients_of_weights_that_are_deferred_fill_the_bubble() -> None:
    plain, deferred = (
        hadal.plan(llama(), staged(schedule), tokens(0), cluster="h100x4")
        for schedule in ("1f1b", "zero_bubble")
    )
    steps = plain.micro_step, deferred.micro_step
    assert plain.time and deferred.time and steps[0] and steps[1]
    assert steps[1].peak > steps[0].peak  # inputs and gradients of linear layers are kept
    later = steps[1].backward[steps[1].later_from :]
    arrived = [name for segment in later for name in segment.arrived]
    assert arrived and all("proj" in name or "head" in name for name in arrived)
    ahead, seconds = deferred.time.passes[1:]
    assert seconds > 0 and plain.time.passes[2] == 0
    waits = [found.time.parts["bubble"].seconds / found.time.seconds for found in (plain, deferred)]
    assert waits[1] < waits[0] and ahead > 0


def test_sequences_of_stages_are_exchanged() -> None:
    raw = staged("1f1b")
    whole, cut = (
        hadal.plan(llama(), raw | keys, tokens(0), cluster="h100x4")
        for keys in ({}, IN_PARTS["sequences"])
    )
    assert whole.time and cut.time and whole.micro_step and cut.micro_step
    assert whole.time.parts["sequences"].wire_nbytes == 0
    assert cut.time.parts["sequences"].wire_nbytes > 0
    assert cut.time.samples == whole.time.samples / 2
    assert 0.4 < cut.micro_step.kept / whole.micro_step.kept < 0.8


def held_in_passes(kind: str) -> list[int]:
    """Return the most bytes that a stage's forwards, backwards and deferred gradients hold in a
    real update, beside the sums of gradients; but not while the first gradients arrive.
    """
    model, raw, batch = STAGED[kind]()
    engine = hadal.initialize(model=model, config=raw)[0]
    engine.train_batch(repeat(batch))
    recorder = _Recorder([], {}, {})
    for parameter in engine.module.parameters():
        recorder._known[parameter.untyped_storage()] = True
    kinds = ForwardPass, BackwardPass, BackwardWeights
    ends = kinds[1 + ("zero_bubble" in kind)]
    executor, found, did = engine._executor, [0] * len(kinds), Counter[Any]()
    act, sums = executor.act, sum(4 * p.numel() for p in engine.module.parameters())

    def noted(one: Any) -> None:
        recorder.segments[-1].peaks[-1] = recorder.now
        act(one)
        if type(one) in kinds and (did[ends] or not did[BackwardPass]):
            held = recorder.segments[-1].peaks[-1].total - sums * bool(did[ends])
            number = kinds.index(type(one))
            if did[ends] or not number:
                found[number] = max(found[number], held)
        did[type(one)] += 1

    executor.act = noted
    with recorder:
        engine.train_batch(repeat(batch))
    engine.destroy()
    return found


def eager() -> Any:
    made = llama()
    made.config._attn_implementation = "eager"
    return made


def staged(schedule: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "pipeline": {"auto": True, "stages": 2, "schedule": schedule},
    }


def own_stages() -> Any:
    """A program's own module: tied embeddings, recomputed layers, and a function."""
    sizes = ("words", nn.Embedding, 64, 32)
    blocks = [LayerSpec(Narrow) for _ in range(4)]
    module = PipelineModule(
        [TiedLayerSpec(*sizes), *blocks, torch.tanh, TiedLayerSpec(*sizes, forward_fn=logits)],
        num_stages=2,
        loss_fn=lambda found, labels: nn.functional.cross_entropy(found.mT, labels),
        partition_method="type:narrow|embedding",
        activation_checkpoint_interval=1,
    )
    ids = torch.zeros(16, 128, dtype=torch.long)
    return module, {key: RAW[key] for key in RAW if key != "pipeline"}, (ids, ids)


class Narrow(nn.Linear):
    """A layer of which the size is known."""

    def __init__(self) -> None:
        super().__init__(32, 32)

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values).relu()


def logits(embedding: nn.Module, values: Tensor) -> Tensor:
    found: Tensor = values @ embedding.weight.T
    return found


RAW = staged("1f1b")
STAGED: dict[str, Any] = {
    **{
        name: partial(lambda name: (eager(), staged(name), tokens(0)), name)
        for name in ("1f1b", "gpipe", "zero_bubble")
    },
    "own": own_stages,
}


@pytest.mark.parametrize("kind", STAGED)
def test_the_activations_of_stages_are_those_of_a_run(kind: str, ranks: RankPools) -> None:
    with ImaginedWorld(0, 2):
        model, raw, batch = STAGED[kind]()
        steps = [
            one.micro_step for one in Planner(model, cluster_of("h100x2"), 1).stages(raw, batch)
        ]
    planned = [
        [
            max((segment.peak.total for segment in part), default=0)
            for part in (
                one.forward,
                one.backward[: one.later_from],
                one.backward[one.later_from :],
            )
        ]
        for one in steps
    ]
    for real, said in zip(ranks(2).run(held_in_passes, kind), planned, strict=True):
        count = 1 if kind == "gpipe" else 3  # all is there in its first backward
        # The last stage has a few kB of labels and losses, and a stage's input after its use.
        assert real[:count] == pytest.approx(said[:count], rel=0.02, abs=8192)


def test_a_part_is_planned_beside_a_world_that_runs(ranks: RankPools) -> None:
    alone = hadal.plan(llama(), PARTS_RAW, tokens(0), cluster="h100x4").total
    assert ranks(2).run(planned_beside) == [alone, alone]


PARTS_RAW = {"train_micro_batch_size_per_gpu": 2, **IN_PARTS["slices"]}


def planned_beside() -> Any:
    found = hadal.plan(llama(), PARTS_RAW, tokens(0), cluster="h100x4").total
    assert Ranks.world().size == 2
    return found


def test_parts_that_do_not_fit_the_model_are_named() -> None:
    raw = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(ModelError, match="autotp_size"):
        hadal.plan(model(), raw, cluster="h100x4")


def test_degrees_are_candidates_of_a_search() -> None:
    raw = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
    config, cluster = load_config(raw, world_size=4), cluster_named("h100x4")
    patches = [
        {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": size}}
        for size in (3, 2, 1)
    ]
    three, two, one = CandidatePlanner(given(llama()), config, cluster, 1).plan(tokens(0), patches)
    assert "3 does not divide the 4 ranks" in three["failure"]
    assert (two["samples"], one["samples"]) == (4, 8)
    # A model that cannot be cut is planned whole.
    config = load_config(raw | {"train_micro_batch_size_per_gpu": ROWS}, world_size=4)
    patches = [{**patch, "train_micro_batch_size_per_gpu": ROWS} for patch in patches]
    _, two, one = CandidatePlanner(given(model()), config, cluster, 1).plan(BATCH.float(), patches)
    assert "autotp_size" in two["failure"] and one["seconds"] > 0


# ---- errors --------------------------------------------------------------------------------------


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no cluster 'h10x8'; did you mean h100x8\?"):
        hadal.plan(model(), {"train_micro_batch_size_per_gpu": 1}, cluster="h10x8")


def test_a_patch_is_merged_into_sections() -> None:
    raw = {"a": 1, "b": {"c": 1, "d": {"e": 1}}}
    assert merged(raw, {"b": {"d": {"f": 2}}, "g": 3}) == {
        "a": 1,
        "b": {"c": 1, "d": {"e": 1, "f": 2}},
        "g": 3,
    }
    assert raw == {"a": 1, "b": {"c": 1, "d": {"e": 1}}}
