"""Gradients on the wire, key by key: the numbers, the bytes and the order of events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import every
from comm.traffic import counted
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from engine.toys import (
    TINY,
    Leaves,
    alone,
    assert_close,
    assert_equal,
    batch_of,
    engine_of,
    given_gradients,
    loss_of,
    mean_gradients,
    model_of,
    train,
)
from hadal import comm
from hadal.config import load_config
from hadal.engine.policies import limits_of, reduction_of, transport_of, wire_dtype
from hadal.engine.precision import precisions_of
from hadal.errors import ModelError
from hadal.zero.gradients import Arrival, Gradients
from hadal.zero.policy import Transport

SHAPES = ((5, 7), (3,), (), (40, 4), (2, 0))
STAGES = (0, 1, 2, 3)
SGD = {"type": "SGD", "params": {"lr": 1.0}}
NO_SCATTER = {"reduce_scatter": False}


def zero_leaves() -> Leaves:
    model = Leaves(SHAPES)
    with torch.no_grad():
        for leaf in model.leaves:
            leaf.zero_()
    return model


def engine_at(stage: int, model: nn.Module | None = None, zero: Any = (), **changes: Any) -> Any:
    """An engine whose first step, from zero, leaves the negative gradients in the weights."""
    changes = {"optimizer": SGD, "train_micro_batch_size_per_gpu": 1, **changes}
    changes["zero_optimization"] = {"stage": stage, **TINY, **dict(zero)}
    return engine_of(stage, zero_leaves() if model is None else model, **changes)


def applied(engine: Any, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The gradient that the optimizer got after some micro-steps of one update."""
    for micro in gradients:
        engine.backward(engine(micro))
        engine.step()
    assert engine.global_steps == 1
    state = engine.state_dict()
    engine.destroy()
    return [-value for value in state.values()]


def scaled(factor: float, step: int = 0) -> list[Tensor]:
    rank = comm.get_rank()
    return [gradient * factor for gradient in given_gradients(SHAPES, step, rank)]


def mine(step: int = 0) -> list[Tensor]:
    return scaled(1.0, step)


def assert_all_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), (one, other)


def assert_all_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def legal(stage: int) -> dict[str, Any]:
    """The keys that scaling requires at a stage."""
    return NO_SCATTER if stage >= 2 else {}


# ---- mean, sum, and when it is divided -----------------------------------------------------------


def add_up() -> None:
    world = comm.get_world_size()
    for stage in STAGES[:3]:
        for accumulation in (1, 2):
            engine = engine_at(
                stage, gradient_allreduce_op="SUM", gradient_accumulation_steps=accumulation
            )
            steps = range(accumulation)
            found = applied(engine, [mine(step) for step in steps])
            expected = [
                sum(one) * (world / accumulation)
                for one in zip(*(mean_gradients(SHAPES, step) for step in steps), strict=True)
            ]
            assert_all_close(found, expected)


def the_norm_and_the_clip_of_a_sum() -> None:
    """Both are those of what is applied: of the sum."""
    world = comm.get_world_size()
    expected = [value * world for value in mean_gradients(SHAPES, 0)]
    norm = float(torch.cat([value.flatten() for value in expected]).norm())
    for stage in STAGES[:3]:
        engine = engine_at(stage, gradient_allreduce_op="sum", gradient_clipping=1.0)
        engine.backward(engine(mine()))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm)
        assert engine.clip_coefficient == pytest.approx(1 / norm, rel=1e-5)
        found = [-value for value in engine.state_dict().values()]
        assert_all_close(found, [value / norm for value in expected])
        engine.destroy()


def add_up_what_comes_later() -> None:
    """Parameters that are thawed and added as a group travel like those of the start."""
    world, late = comm.get_world_size(), (1, 3)
    for stage in STAGES[:3]:
        model = zero_leaves()
        members = [model.leaves[index].requires_grad_(False) for index in late]
        strict = {"ignore_unused_parameters": False}
        engine = engine_at(stage, model, strict, gradient_allreduce_op="sum")
        for step in range(2):
            if step == 1:
                for member in members:
                    member.requires_grad_(True)
                engine.optimizer.add_param_group({"params": members, "lr": 1.0})
            engine.backward(engine(mine(step)))
            engine.step()
        first, second = (mean_gradients(SHAPES, step) for step in range(2))
        for index, value in enumerate(engine.state_dict().values()):
            seen = second[index] if index in late else first[index] + second[index]
            torch.testing.assert_close(-value, seen * world)
        engine.destroy()


def divide_before() -> None:
    """The same mean, whenever it is divided."""
    for stage in STAGES:
        for keys in (
            {"prescale_gradients": True},
            {"gradient_predivide_factor": 2.0},
            {"gradient_predivide_factor": 3.0},
        ):
            found = applied(engine_at(stage, zero=legal(stage), **keys), [mine()])
            assert_all_close(found, mean_gradients(SHAPES, 0))


def prescaling_rounds_after_dividing() -> None:
    """On an fp16 wire, half of the smallest number vanishes, unless it is divided afterwards."""
    wire = {"communication_data_type": "fp16"}
    tiny = [torch.full(shape, 2.0**-24) for shape in SHAPES]
    for stage in STAGES:
        kept = applied(engine_at(stage, zero=legal(stage), **wire), [tiny])
        assert_all_equal(kept, tiny)
        lost = applied(engine_at(stage, zero=legal(stage), prescale_gradients=True, **wire), [tiny])
        assert_all_equal(lost, [value * 0 for value in tiny])


def predividing_saves_a_narrow_sum() -> None:
    """Sums beyond fp16's range arrive correctly if part of the division precedes the wire."""
    wire = {"communication_data_type": "fp16"}
    large = [torch.full(shape, 2.0**17) for shape in SHAPES]
    for stage in STAGES:
        zero = legal(stage)
        plain = applied(engine_at(stage, zero=zero, **wire), [large])
        assert not any(value.isfinite().any() for value in plain if value.numel())
        found = applied(engine_at(stage, zero=zero, gradient_predivide_factor=8, **wire), [large])
        assert_all_equal(found, large)


def run(check: Callable[[], None], world: int, ranks: RankPools) -> None:
    ranks(world).run(check)


@pytest.mark.fast_cells(
    "add_up-1",
    "add_up_what_comes_later-1",
    "the_norm_and_the_clip_of_a_sum-1",
    "the_norm_and_the_clip_of_a_sum-2",
)
@pytest.mark.claims("gradient_allreduce_op")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "check",
    [add_up, add_up_what_comes_later, the_norm_and_the_clip_of_a_sum],
    ids=lambda c: c.__name__,
)
def test_sums(check: Callable[[], None], world: int, ranks: RankPools) -> None:
    run(check, world, ranks)


@pytest.mark.fast_cells("3")
@pytest.mark.claims("prescale_gradients", "gradient_predivide_factor")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_division_before_the_wire(world: int, ranks: RankPools) -> None:
    run(divide_before, world, ranks)


@pytest.mark.claims("prescale_gradients")
def test_prescaling_rounds_after_dividing(ranks: RankPools) -> None:
    run(prescaling_rounds_after_dividing, 2, ranks)


@pytest.mark.claims("gradient_predivide_factor")
def test_predividing_saves_a_narrow_sum(ranks: RankPools) -> None:
    run(predividing_saves_a_narrow_sum, 2, ranks)


def test_a_rank_outside_the_division_is_reported_as_idle() -> None:
    keys = {"prescale_gradients": True, "gradient_predivide_factor": 2}
    (note,) = load_config({"train_batch_size": 8, **keys}).notes
    assert note.startswith("gradient_predivide_factor: has no effect: prescale_gradients")


# ---- the dtype on the wire -----------------------------------------------------------------------


def padded_numel(engine: Any) -> int:
    return sum(g.bucket.layout.numel for g in engine._parts.runtime.gradients)


def the_wires_dtype() -> None:
    """The bytes and the rounding match the dtype."""
    world = comm.get_world_size()
    dtypes = {
        "FP16": torch.float16,
        "bf16": torch.bfloat16,
        "Fp32": torch.float32,
        None: torch.float32,
    }
    # What a wire keeps of this tells which it was.
    given = [torch.full(shape, 1 + 2.0**-9 + 2.0**-12) for shape in SHAPES]
    zero = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
    for stage in STAGES:
        sent = {}
        for name, dtype in dtypes.items():
            engine = engine_at(stage, zero=zero, communication_data_type=name)
            numel = padded_numel(engine)
            loss = engine(given)
            with counted() as traffic:
                engine.backward(loss)
            sent[name] = traffic.nbytes
            engine.step()
            found = [-value for value in engine.state_dict().values()]
            assert_all_equal(found, [value.to(dtype).float() for value in given])
            engine.destroy()
        elements = (2 if stage == 0 else 1) * (world - 1) * (numel // world)
        gathers = sent["Fp32"] - 4 * elements  # stage 3 needs its weights in backward
        assert (gathers > 0) == (stage == 3)
        for name, dtype in dtypes.items():
            assert sent[name] - gathers == elements * dtype.itemsize, (stage, name)


@pytest.mark.claims("communication_data_type")
def test_gradients_travel_in_the_dtype_asked_for(ranks: RankPools) -> None:
    run(the_wires_dtype, 2, ranks)


def configured(**keys: Any) -> Any:
    return load_config({"train_batch_size": 8, **keys})


def wire_of(config: Any, device: str = "cpu") -> torch.dtype:
    """The dtype on the wire of a weight that is given in fp32."""
    model = nn.Linear(2, 2)
    return precisions_of(config, model, torch.device(device))(model.weight).reduce


@pytest.mark.claims("communication_data_type")
@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"fp16": {"enabled": True}}, torch.float16),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            torch.float32,
        ),
        ({"communication_data_type": "bF16"}, torch.bfloat16),
    ],
)
def test_without_a_word_the_wire_follows_the_model(keys: Any, dtype: torch.dtype) -> None:
    assert wire_of(configured(**keys)) is dtype


@pytest.mark.claims("communication_data_type")
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_an_accelerator_adds_up_in_fp32_unless_another_dtype_is_named(kind: str) -> None:
    named = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    config = configured(**{kind: {"enabled": True}})
    assert wire_of(config, "cuda") is torch.float32
    assert wire_of(configured(**{kind: {"enabled": True}}, communication_data_type=kind)) is named
    config = configured(**{kind: {"enabled": True}}, data_types={"grad_accum_dtype": "bf16"})
    assert wire_of(config, "cuda") is torch.float32
    config = configured(torch_autocast={"enabled": True, "dtype": kind})
    assert wire_of(config, "cuda") is named
    config = configured(
        torch_autocast={"enabled": True, "dtype": kind, "lower_precision_safe_modules": []}
    )
    assert wire_of(config, "cuda") is torch.float32


@pytest.mark.claims("seq_parallel_communication_data_type")
def test_shared_sequences_have_a_wire_of_their_own() -> None:
    config = configured(communication_data_type="bf16")
    assert wire_dtype(config) is torch.bfloat16
    assert wire_dtype(config.model_copy(update={"sequence_parallel_size": 2})) is torch.float32
    config = configured(seq_parallel_communication_data_type="FP16", bf16={"enabled": True})
    assert wire_of(config) is torch.bfloat16
    assert wire_of(config.model_copy(update={"sequence_parallel_size": 4})) is torch.float16
    config = configured(seq_parallel_communication_data_type=None, bf16={"enabled": True})
    assert wire_of(config.model_copy(update={"sequence_parallel_size": 4})) is torch.bfloat16
    shared = config.model_copy(update={"sequence_parallel_size": 4})
    assert reduction_of(shared).factors(8) == (1.0, 1 / 2)


# ---- the way -------------------------------------------------------------------------------------


def bytes_of_backward(stage: int) -> None:
    """A rank sends each other one its shard; at stage 0 each owner's mean comes back too."""
    world = comm.get_world_size()
    engine = engine_of(stage, zero_optimization={"stage": stage, **TINY})
    numel = padded_numel(engine)
    inputs, targets = batch_of(0)
    loss = loss_of(engine(inputs), targets)
    with counted() as traffic:
        engine.backward(loss)
    engine.step()
    engine.destroy()
    assert traffic.nbytes == 4 * (world - 1) * (numel // world) * (1 if stage else 2)


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_go_to_their_owners_alone(world: int, ranks: RankPools) -> None:
    for stage in STAGES[:3]:
        ranks(world).run(bytes_of_backward, stage)


@pytest.mark.fast_cells("1-2", "2-3")
@pytest.mark.claims("zero_optimization.allgather_bucket_size")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks("world")
def test_weights_are_gathered_as_asked(stage: int) -> None:
    """After a step weights arrive in one gather or in pieces: the same ones."""
    world = comm.get_world_size()
    states = []
    for keys in (
        {"allgather_bucket_size": 0},
        {"allgather_bucket_size": 16 * world + 1},  # any number, odd ones too
    ):
        engine = engine_of(stage, zero_optimization={"stage": stage, **TINY, **keys})
        train(engine, range(2))
        loss = loss_of(engine(batch_of(2)[0]), batch_of(2)[1])
        engine.backward(loss)
        with counted() as traffic:
            engine.step()
        shards = [g.bucket.layout.shard_numel * 4 for g in engine._parts.runtime.gradients]
        assert max(traffic.of("isend")) == (64 if keys["allgather_bucket_size"] else max(shards))
        assert sum(traffic.of("isend")) == (world - 1) * sum(shards)
        states.append(engine.state_dict())
        engine.destroy()
    assert_equal(*states)


@pytest.mark.claims(
    "allgather_size",
    "zero_optimization",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.reduce_bucket_size",
)
def test_bucket_sizes_act_where_they_belong() -> None:
    def values(zero: Any, **keys: Any) -> tuple[int, int]:
        config = configured(zero_optimization=zero, **keys)
        return limits_of(config).bucket_numel, transport_of(config, 2).refresh_numel

    sizes = {"reduce_bucket_size": 1000, "allgather_bucket_size": 10}
    for stage in (1, 2):
        assert values({"stage": stage, **sizes}) == (1000, 10)
    assert values({"stage": 3, **sizes})[0] == 10
    assert values({"stage": 3, "reduce_bucket_size": 7})[0] == 7
    assert values({"stage": 1, "allgather_bucket_size": 0})[1] == Transport().refresh_numel
    # The old boolean form: stage 1 or 0, with the old key for the size.
    config = configured(zero_optimization=True, allgather_size=20)
    assert config.zero_optimization.stage == 1
    assert transport_of(config, 2).refresh_numel == 20
    assert configured(zero_optimization=False).zero_optimization.stage == 0


# ---- when ----------------------------------------------------------------------------------------


def events(stage: int, micro_steps: int, **zero: Any) -> list[list[str]]:
    """Per micro-step: gradients as they come, reductions as they start, the end of autograd."""
    model = model_of()
    engine = engine_of(
        stage,
        model,
        gradient_accumulation_steps=micro_steps,
        zero_optimization={"stage": stage, **TINY, "reduce_bucket_size": 1, **zero},
    )
    told: list[str] = []
    start = Gradients.start_reduce
    Gradients.start_reduce = lambda self, **rest: (told.append("reduce"), start(self, **rest))[1]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: told.append("gradient"))
    by_step = []
    try:
        for step in range(micro_steps):
            told.clear()
            inputs, targets = batch_of(step)
            first = inputs.clone().requires_grad_()
            loss = loss_of(engine(first), targets)
            first.register_hook(lambda _: told.append("end"))
            engine.backward(loss)
            by_step.append(list(told))
            engine.step()
    finally:
        Gradients.start_reduce = start
    engine.destroy()
    return by_step


@pytest.mark.claims("zero_optimization.grad_hooks")
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_inside_backward_or_behind_it(stage: int, ranks: RankPools) -> None:
    for inside in (True, False):
        for early, last in ranks(2).run(reductions, stage, inside):
            gradients = 6
            assert early.count("gradient") == last.count("gradient") == gradients
            # Where gradients are not sharded, only the last micro-step reduces.
            assert ("reduce" in early) == (stage >= 2)
            first = last.index("reduce")
            if inside or stage >= 2:
                assert "gradient" in last[first:]
            else:
                assert "gradient" not in last[first:]
            assert last.count("reduce") >= 4


def reductions(stage: int, inside: bool) -> list[list[str]]:
    return events(stage, 2, grad_hooks=inside)


def behind_backward_trains_alike(stage: int) -> None:
    states = []
    for inside in (True, False):
        zero = {"stage": stage, **TINY, "grad_hooks": inside}
        engine = engine_of(stage, zero_optimization=zero, gradient_accumulation_steps=2)
        train(engine, range(4))
        states.append(engine.state_dict())
        engine.destroy()
    assert_equal(*states)


@pytest.mark.slow_cells("2")
@pytest.mark.claims("zero_optimization.grad_hooks")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_when_gradients_are_reduced_changes_no_number(world: int, ranks: RankPools) -> None:
    for stage in STAGES:
        ranks(world).run(behind_backward_trains_alike, stage)


def in_flight(stage: int, overlap: bool | None) -> int:
    """The most reductions that are under way when a gradient comes."""
    model = model_of()
    zero = {"stage": stage, **TINY, "reduce_bucket_size": 1, "overlap_comm": overlap}
    engine = engine_of(stage, model, zero_optimization=zero)
    runtime, most = engine._parts.runtime, 0

    def look(_: Any) -> None:
        nonlocal most
        most = max(most, sum(g.state is Arrival.REDUCING for g in runtime.gradients))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    train(engine, range(2))
    engine.destroy()
    return most


@pytest.mark.claims("zero_optimization.overlap_comm")
@pytest.mark.parametrize("stage", STAGES)
def test_reductions_run_during_backward(stage: int, ranks: RankPools) -> None:
    for overlap in (True, None):
        assert all(1 <= most <= 2 for most in ranks(2).run(in_flight, stage, overlap))
    assert ranks(2).run(in_flight, stage, False) == [0, 0]


# ---- the norm, and what clips --------------------------------------------------------------------


def without_a_norm(stage: int) -> None:
    states = []
    for computes in (True, False):
        zero = {"stage": stage, **TINY, "compute_grad_norm": computes}
        engine = engine_of(stage, zero_optimization=zero, steps_per_print=1)
        log = logging.getLogger("hadal.engine.report")
        with patch.object(log, "info") as told:
            train(engine, range(2))
        assert (engine.get_global_grad_norm() is not None) == computes
        assert engine.clip_coefficient == 1.0
        if comm.get_rank() == 0:
            text, *values = told.call_args.args
            assert (", norm " in text % tuple(values)) == computes
        states.append(engine.state_dict())
        engine.destroy()
    assert_equal(*states)


def overflow_without_a_norm(stage: int) -> None:
    """One element on one rank overflows: every rank skips the update."""
    model = model_of()
    zero = {"stage": stage, **TINY, "compute_grad_norm": False}
    engine = engine_of(
        stage, model, zero_optimization=zero, fp16={"enabled": True, "initial_scale_power": 4}
    )
    before = engine.state_dict()
    inputs, targets = batch_of(0)
    loss = loss_of(engine(inputs.half()), targets)
    is_last = comm.get_rank() == comm.get_world_size() - 1
    engine.backward(loss * (1e9 if is_last else 1.0))
    engine.step()
    assert engine.overflow
    assert engine.skipped_steps == 1
    assert_equal(engine.state_dict(), before)
    loss = loss_of(engine(inputs.half()), targets)
    engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 1
    assert any(not torch.equal(v, before[n]) for n, v in engine.state_dict().items())
    engine.destroy()


@pytest.mark.slow_cells("without_a_norm-2", "without_a_norm-3")
@pytest.mark.claims("zero_optimization.compute_grad_norm")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "check", [without_a_norm, overflow_without_a_norm], ids=lambda c: c.__name__
)
def test_no_norm(check: Callable[[int], None], world: int, ranks: RankPools) -> None:
    for stage in (1, 2):
        ranks(world).run(check, stage)


def clipped(stage: int) -> None:
    expected = mean_gradients(SHAPES, 0)
    norm = float(torch.cat([value.flatten() for value in expected]).norm())
    for limit, factor in ((0.0, 1.0), (norm * 2, 1.0), (norm / 4, 0.25), (None, 1 / norm)):
        engine = engine_at(stage, gradient_clipping=limit)
        engine.backward(engine(mine()))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm)
        assert engine.clip_coefficient == pytest.approx(factor, rel=1e-5)
        found = [-value for value in engine.state_dict().values()]
        assert_all_close(found, [value * factor for value in expected])
        engine.destroy()


@pytest.mark.fast_cells("3")
@pytest.mark.claims("gradient_clipping", "zero_optimization.stage")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_norm_is_clipped_at_every_stage(world: int, ranks: RankPools) -> None:
    """0 clips nothing; without a word the limit is 1."""
    for stage in STAGES:
        ranks(world).run(clipped, stage)


# ---- unused parameters ---------------------------------------------------------------------------


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, inputs: Tensor, use_right: bool) -> Tensor:
        return self.left(inputs) + (self.right(inputs) if use_right else 0)


def refuse_unused(stage: int) -> None:
    rank, world = comm.get_rank(), comm.get_world_size()
    strict = {"stage": stage, **TINY, "ignore_unused_parameters": False}
    engine = engine_of(stage, Halves(), zero_optimization=strict, gradient_accumulation_steps=2)
    inputs, targets = batch_of(0)

    def micro_step(use_right: bool) -> None:
        engine.backward(loss_of(engine(inputs, use_right), targets))
        engine.step()

    # Whether each micro-step of an update uses the right half, and the ranks that never do.
    plan = [
        ((True, False), []),
        ((False, True), []),
        ((rank > 0, False), [0]),
        ((False, False), list(range(world))),
    ]
    for (first, last), missing in plan:
        before = engine.state_dict()
        micro_step(first)
        if not missing:
            micro_step(last)
            continue
        with pytest.raises(ModelError) as raised:
            micro_step(last)
        at = f"(rank {', '.join(map(str, missing))})"
        assert f"for right.weight {at}, right.bias {at}. Make" in str(raised.value)
        assert "zero_optimization.ignore_unused_parameters" in str(raised.value)
        assert_equal(engine.state_dict(), before)
        micro_step(True)  # the same micro-step again: nothing of the refused one is left
    assert engine.global_steps == len(plan)
    engine.module.right.requires_grad_(False)
    micro_step(False)
    micro_step(False)  # what is frozen meanwhile is not missed
    engine.destroy()
    lenient = engine_of(stage, Halves())
    lenient.backward(loss_of(lenient(inputs, False), targets))
    lenient.step()
    lenient.destroy()


def refuse_unused_at_the_step(stage: int) -> None:
    """No backward is known to be the last: the step tells."""
    strict = {"stage": stage, **TINY, "ignore_unused_parameters": False}
    inputs, targets = batch_of(0)
    for managed in (True, False):
        engine = engine_of(
            stage, Halves(), zero_optimization=strict, managed_gradient_accumulation=managed
        )
        before = engine.state_dict()
        for uses, is_refused in ((False, True), (comm.get_rank() > 0, True), (True, False)):
            with engine.no_sync():
                engine.backward(loss_of(engine(inputs, uses), targets))
            if is_refused:
                with pytest.raises(ModelError, match=r"right.weight \(rank 0"):
                    engine.step()
                assert_equal(engine.state_dict(), before)
            else:
                engine.step()
        assert engine.global_steps == 1
        engine.destroy()


@pytest.mark.fast_cells("1")
@pytest.mark.claims("zero_optimization.ignore_unused_parameters")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parameters_without_a_gradient_may_be_refused(world: int, ranks: RankPools) -> None:
    for stage in STAGES:
        ranks(world).run(refuse_unused, stage)
        ranks(world).run(refuse_unused_at_the_step, stage)


# ---- embeddings ----------------------------------------------------------------------------------

WORDS, WIDTH = 200, 6


class Reader(nn.Module):
    def __init__(self, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=sparse)
        self.bags = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=sparse)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.words(tokens) + self.bags(tokens[:, None]))))


def reader(**kinds: bool) -> Reader:
    torch.manual_seed(5)
    return Reader(**kinds)


def tokens_of(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(WORDS, (5,), generator=generator)


def read(engine: Any, steps: range) -> Iterator[int]:
    """Train; yield the bytes that each backward sent."""
    for step in steps:
        tokens = tokens_of(step, comm.get_rank())
        loss = nn.functional.cross_entropy(engine(tokens).float(), tokens)
        with counted() as traffic:
            engine.backward(loss)
        engine.step()
        yield traffic.nbytes


EMBEDDINGS: list[tuple[dict[str, bool], dict[str, Any]]] = [
    ({}, {}),
    ({"sparse": True}, {"gradient_accumulation_steps": 2}),
    ({"tied": True}, {}),
    ({"sparse": True}, {"bf16": {"enabled": True}}),
]


@pytest.mark.fast_cells("1-2")
@pytest.mark.claims("sparse_gradients")
@every(world=[2, 3, 1], stage=STAGES)
@on_ranks("world")
def test_embeddings_travel_in_rows(stage: int) -> None:
    """The same weights; fewer bytes, unless a head shares the embedding and fills every row."""
    for kinds, keys in EMBEDDINGS:
        states, sent = [], []
        for sparse in (False, True):
            engine = engine_of(stage, reader(**kinds), sparse_gradients=sparse, **keys)
            sent.append(list(read(engine, range(4)))[-1])
            states.append(engine.state_dict())
            engine.destroy()
        assert_equal(states[1], states[0])
        if comm.get_world_size() > 1 and "tied" not in kinds and stage < 3:
            assert sent[1] < 0.6 * sent[0], (stage, kinds, keys, sent)


class Dialects(nn.Module):
    """Which of the embeddings is read is said from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.dialects = nn.ModuleList(nn.Embedding(WORDS, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, dialect: int) -> Tensor:
        return self.head(torch.tanh(self.dialects[dialect](tokens)))


def read_dialects(stage: int) -> None:
    """Ranks read embeddings of their own: rows come late, on one rank only, or not at all."""
    rank, states = comm.get_rank(), []
    for sparse in (False, True):
        torch.manual_seed(5)
        zero = {"stage": stage, **TINY}
        engine = engine_of(stage, Dialects(), sparse_gradients=sparse, zero_optimization=zero)
        for step in range(5):
            tokens = tokens_of(step, rank)
            dialect = (0, 0, rank, 2 - rank, 1)[step] % 3
            engine.backward(nn.functional.cross_entropy(engine(tokens, dialect), tokens))
            engine.step()
        states.append(engine.state_dict())
        engine.destroy()
    assert_equal(*states)


@pytest.mark.slow
@pytest.mark.claims("sparse_gradients")
@pytest.mark.parametrize("world", [2, 3])
def test_rows_come_late_too(world: int, ranks: RankPools) -> None:
    for stage in STAGES:
        ranks(world).run(read_dialects, stage)


# ---- where they lie ------------------------------------------------------------------------------


def borders(stage: int) -> None:
    for precision in ({}, {"bf16": {"enabled": True}}):
        for aligned in (True, False):
            zero = {"stage": stage, **TINY, "parameter_alignment": aligned}
            engine = engine_of(stage, Leaves(SHAPES), zero_optimization=zero, **precision)
            for bucket in engine._parts.runtime.buckets:
                itemsize = bucket.full.dtype.itemsize
                assert bucket.layout.shard_numel * itemsize % 16 == 0
                for slot in bucket.layout.slots:
                    assert slot.numel == 0 or slot.offset * itemsize % 16 == 0
            for parameter in engine.module.parameters():
                if stage < 3 and parameter.numel():
                    assert parameter.data_ptr() % 16 == 0
            engine.destroy()


@pytest.mark.claims("zero_optimization.parameter_alignment")
def test_parameters_start_on_16_byte_borders_whether_asked_or_not(ranks: RankPools) -> None:
    for stage in STAGES:
        ranks(2).run(borders, stage)


def the_same_with(keys: dict[str, Any], zero: dict[str, Any]) -> None:
    states = []
    for given, inside in (({}, {}), (keys, zero)):
        stage = zero.get("stage", 2)
        engine = engine_of(stage, zero_optimization={"stage": stage, **TINY, **inside}, **given)
        for gradients in engine._parts.runtime.gradients:
            ends = gradients.bucket.layout.slots
            assert all(one.stop <= other.offset for one, other in pairwise(ends))
        train(engine, range(2))
        states.append(engine.state_dict())
        engine.destroy()
    assert_equal(*states)


@pytest.mark.slow_cells("keys3-zero3")
@pytest.mark.claims(
    "disable_allgather",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.reduce_scatter",
    "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization.allgather_partitions",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params",
    "zero_optimization.use_all_reduce_for_fetch_params",
)
@pytest.mark.parametrize(
    ("keys", "zero"),
    [
        ({}, {"reduce_scatter": False}),
        ({}, {"use_multi_rank_bucket_allreduce": False}),
        ({}, {"allgather_partitions": False}),
        ({}, {"stage": 3, "stage3_use_all_reduce_for_fetch_params": True}),
        ({}, {"stage": 3, "use_all_reduce_for_fetch_params": True}),
        ({"disable_allgather": True}, {}),
        ({}, {"contiguous_gradients": False}),
        ({}, {"round_robin_gradients": True}),
    ],
)
def test_arguments_without_effect_are_logged_and_ignored(
    keys: Any, zero: Any, ranks: RankPools
) -> None:
    (note,) = configured(**keys, zero_optimization={"stage": 2, **zero}).notes
    assert note.endswith("has no effect")
    ranks(2).run(the_same_with, keys, zero)


@on_ranks(2)
def test_the_reference_of_this_file_is_plain_torch() -> None:
    """Scaled, sent in rows, reduced behind backward: still what one process trains."""
    engine = engine_of(
        1,
        zero_optimization={"stage": 1, **TINY, "grad_hooks": False},
        prescale_gradients=True,
    )
    train(engine, range(3))
    assert_close(engine.state_dict(), alone(model_of(), [[0], [1], [2]]))
    engine.destroy()
