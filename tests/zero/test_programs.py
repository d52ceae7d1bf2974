"""Programs in which a rank does something else for once: the numbers are right, nobody hangs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from engine.toys import assert_close, engine_of
from ranks import RankPool, RankPools, on_ranks

from hadal import comm
from hadal.errors import LossError, MismatchError, UsageError
from hadal.zero import GatheredParameters
from hadal.zero.bucket import Weights
from hadal.zero.gathering import Phase
from hadal.zero.gradients import Arrival
from zero.test_gathering import ALL, BLOCKS, CUT, DROPS, Refuses, blocks, inputs_of

# ---- any programs -------------------------------------------------------------------------------


class Micro(NamedTuple):
    """The actions of one rank in one micro-step."""

    path: Sequence[int] = ALL
    raises_before: int | None = None
    before: str = ""
    """Actions of all ranks at the beginning."""
    between: str = ""
    """Actions of all ranks between forward and backward."""


def act(engine: Any, what: str) -> None:
    if what == "evaluation":
        with torch.no_grad():
            engine(inputs_of(99).to(engine.device))
    elif what == "access":
        with GatheredParameters(list(engine.module.parameters())[:2]):
            pass
    elif what == "state":
        engine.state_dict()
    elif what == "meeting":
        engine._parts.runtime.meet_at_checkpoint()


def train(
    engine: Any, model: Any, updates: Sequence[Sequence[Sequence[Micro]]], *, meets: bool = False
) -> None:
    """`meets`: in collectives of the program's own, behind each forward and each backward."""
    rank, number = comm.get_rank(), 0
    for update in updates:
        for row in update:
            micro = row[rank]
            act(engine, micro.before)
            inputs = inputs_of(number).to(engine.device)
            number += 1
            if micro.raises_before is not None:
                model.raises_before = micro.raises_before
                with pytest.raises(FloatingPointError):
                    engine(inputs)
                model.raises_before = None
            loss = engine(inputs, micro.path).square().mean()
            act(engine, micro.between)
            if meets:
                torch.distributed.all_reduce(loss.detach().clone())
            engine.backward(loss)
            if meets:
                torch.distributed.all_reduce(loss.detach().clone())
            engine.step()
            assert engine._parts.runtime.gathering.phase is Phase.IDLE


def plain_after(updates: Sequence[Sequence[Sequence[Micro]]]) -> dict[str, Any]:
    plain, world, number = blocks(), comm.get_world_size(), 0
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for update in updates:
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for row in update:
            for other in range(world):
                loss = plain(inputs_of(number, other), row[other].path).square().mean()
                (loss / world / len(update)).backward()
            number += 1
        optimizer.step()
    return dict(plain.state_dict())


def train_as_plain_torch(
    updates: Sequence[Sequence[Sequence[Micro]]],
    stage: int,
    settings: dict[str, Any],
    meets: bool = False,
) -> None:
    model = blocks()
    changes = {"zero_optimization": {**CUT, **settings, "stage": stage}}
    engine = engine_of(stage, model, gradient_accumulation_steps=len(updates[0]), **changes)
    train(engine, model, updates, meets=meets)
    assert not [
        bucket
        for bucket in engine._parts.runtime.gathering._buckets
        if bucket.state is not Weights.SHARDED
    ]
    state = {name: value.cpu() for name, value in engine.state_dict().items()}
    assert_close(state, plain_after(updates))
    engine.destroy()


WORLD = 2


def with_one(micros: Sequence[Micro], accumulation: int = 1, at: int = 0) -> Any:
    """Usual updates, one in which a micro-step is another one, and more of the usual ones."""
    usual = [[[Micro()] * WORLD for _ in range(accumulation)]]
    odd = [list(row) for row in usual[0]]
    odd[at] = list(micros)
    return [*usual * 2, odd, *usual * 2]


def all_do(**what: Any) -> list[Micro]:
    return [Micro(**what)] * WORLD


def one_does(**what: Any) -> list[Micro]:
    return [Micro(), Micro(**what)]


ODD = {
    "another branch": one_does(path=(0, 2, 1, 3, 4)),
    "less": one_does(path=(0, 1)),
    "more": one_does(path=(0, 1, 1, 2, 3, 4, 0)),
    "all less": all_do(path=(0, 2)),
    "all another way": all_do(path=(4, 3, 2, 1, 0)),
    "each another way": [Micro((0, 2, 4, 1)), Micro((3, 2, 1, 0, 4))],
    "a forward that raises": one_does(raises_before=2),
    "forwards that raise": all_do(raises_before=3),
    "one raises, one strays": [Micro(raises_before=4), Micro((1, 0))],
    "evaluation": all_do(before="evaluation"),
    "evaluation between": all_do(between="evaluation"),
    "access": all_do(before="access"),
    "access between": all_do(between="access"),
    "state": all_do(before="state"),
    "a meeting": all_do(before="meeting"),
    "a meeting between": all_do(between="meeting"),
}


USUAL = ("another branch", "all less", "one raises, one strays", "evaluation between", "state")


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
def test_one_micro_step_may_be_another(odd: str, ranks: RankPools) -> None:
    at = list(ODD).index(odd)
    for stage, accumulation, where in ((3, 1, 0), (3, 3, at % 3), (at % 3, 3, 2)):
        settings = DROPS if at % 2 else {}
        updates = with_one(ODD[odd], accumulation, where)
        ranks(WORLD).run(train_as_plain_torch, updates, stage, settings)


@pytest.mark.fast_cells("a meeting between-default")
@pytest.mark.parametrize("settings", [{}, DROPS], ids=["default", "nothing kept"])
@pytest.mark.parametrize("odd", ODD)
def test_others_may_wait_in_a_collective_of_their_own(
    odd: str, settings: dict[str, Any], ranks: RankPools
) -> None:
    ranks(WORLD).run(train_as_plain_torch, with_one(ODD[odd]), 3, settings, True)


def random_updates(seed: int, world: int) -> Any:
    chance = random.Random(seed)
    accumulation = chance.choice((1, 1, 2, 3))

    def odd() -> list[Micro]:
        if chance.random() < 0.4:
            what = chance.choice(("evaluation", "access", "state", "meeting"))
            return [Micro(**{chance.choice(("before", "between")): what})] * world
        row = []
        for _ in range(world):
            path = chance.choice((ALL, tuple(chance.choices(ALL, k=chance.randrange(1, 7)))))
            raises = chance.choice((None, None, chance.randrange(BLOCKS)))
            row.append(Micro(path, raises))
        return row

    updates: list[Any] = []
    while len(updates) < 12:
        for _ in range(chance.randrange(1, 4)):
            updates.append([[Micro()] * world for _ in range(accumulation)])
        wild = [[Micro()] * world for _ in range(accumulation)]
        for _ in range(chance.randrange(1, 3)):
            wild[chance.randrange(accumulation)] = odd()
        updates.append(wild)
    return updates


@pytest.mark.fast_cells("2")
@pytest.mark.parametrize("seed", range(8))
def test_any_programs_train_as_plain_torch_does(seed: int, ranks: RankPools) -> None:
    world = 2 + seed % 2
    settings = [{}, DROPS, {"stage3_prefetch_bucket_size": 1}][seed % 3]
    updates = random_updates(seed, world)
    for meets in (False, True):
        ranks(world).run(train_as_plain_torch, updates, 3, settings, meets)


# ---- faults -------------------------------------------------------------------------------------


def fault_of(engine: Any, model: Any, kind: str) -> None:
    """The micro-step of the rank that is at fault."""
    if kind == "loss":
        with pytest.raises(LossError, match="expects a scalar"):
            engine.backward(engine(inputs_of(50)))
    elif kind == "left out":
        engine(inputs_of(50))
        with pytest.raises(UsageError, match="has no gradients"):
            engine.step()
    elif kind == "backward":
        handle = model.blocks[2].register_forward_hook(lambda *a: Refuses.apply(a[-1]))
        with pytest.raises(FloatingPointError):
            engine.backward(engine(inputs_of(50)).square().mean())
        handle.remove()


@pytest.mark.fast_cells("0-left out", "2-loss")
@pytest.mark.parametrize("kind", ["loss", "left out", "backward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_fault_on_one_rank_is_told_in_that_backward(stage: int, kind: str) -> None:
    """One rank is at fault: the others hear of it in the same backward."""
    model = blocks()
    engine = engine_of(stage, model, zero_optimization={**CUT, "stage": stage})
    usual = [[[Micro()] * comm.get_world_size()]]
    train(engine, model, usual * 3)
    if comm.get_rank() == 1:
        fault_of(engine, model, kind)
    else:
        told = "raised on another rank" if kind == "backward" else "was refused or not called"
        with pytest.raises(LossError, match=told):
            engine.backward(engine(inputs_of(50)).square().mean())
    assert all(g.state is Arrival.EMPTY for g in engine._parts.runtime.gradients)
    train(engine, model, usual * 3)
    assert_close(engine.state_dict(), plain_after_rows(usual * 3, 2))
    engine.destroy()


def plain_after_rows(updates: Any, times: int) -> dict[str, Any]:
    """Plain torch, whose steps' inputs begin anew each time."""
    plain, world = blocks(), comm.get_world_size()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(times):
        for number, _ in enumerate(updates):
            optimizer.zero_grad()
            for other in range(world):
                (plain(inputs_of(number, other)).square().mean() / world).backward()
            optimizer.step()
    return dict(plain.state_dict())


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_refused_micro_step_is_none_on_all_ranks(stage: int) -> None:
    """A loss that one rank refuses is none on all: the ranks stay in step."""
    model = blocks()
    changes = {"zero_optimization": {**CUT, "stage": stage}}
    engine = engine_of(stage, model, gradient_accumulation_steps=3, **changes)
    usual = [[[Micro()] * comm.get_world_size()] * 3]
    train(engine, model, usual * 2)
    told = 0
    for micro in range(4):
        try:
            outputs = engine(inputs_of(micro))
            is_bad = micro == 1 and comm.get_rank() == 1
            engine.backward(outputs if is_bad else outputs.square().mean())
            engine.step()
        except LossError:
            told += 1
    assert told == 1
    assert engine.micro_steps == 9
    assert engine.global_steps == 3
    train(engine, model, usual * 2)
    assert engine.global_steps == 5
    engine.destroy()


def differ_for_once(stage: int, kind: str) -> str:
    """Programs that differ are told, on every rank."""
    model = blocks()
    settings = {"divergent_ranks": False} if kind == "path" else {}
    changes = {"zero_optimization": {**CUT, **settings, "stage": stage}}
    engine = engine_of(stage, model, gradient_accumulation_steps=2, **changes)
    usual = [[[Micro()] * comm.get_world_size()] * 2]
    train(engine, model, usual * 3)
    with pytest.raises(MismatchError) as caught:
        if comm.get_rank() == 1:
            if kind == "boundary":
                engine.set_gradient_accumulation_boundary(True)
            elif kind == "checkpoint":
                engine._parts.runtime.meet_at_checkpoint()
            elif kind == "path":
                train(engine, model, [[[Micro(), Micro((0, 3, 1, 2, 4))]] * 2])
        train(engine, model, usual)
    return str(caught.value)


@pytest.mark.fast_cells("boundary-0")
@pytest.mark.parametrize(
    ("kind", "stage"),
    [("boundary", 0), ("boundary", 2), ("checkpoint", 2), ("checkpoint", 3), ("path", 3)],
)
def test_programs_that_differ_are_told_on_all_ranks(kind: str, stage: int) -> None:
    pool = RankPool(2)  # of its own: what one has sent may never be fetched
    try:
        told = pool.run(differ_for_once, stage, kind)
    finally:
        pool.close()
    told_of = "took different paths" if kind == "path" else "the ranks' programs differ"
    assert all(told_of in one for one in told), told


# ---- engines that share a process ---------------------------------------------------------------


@pytest.mark.fast_cells("True-3")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("joint", [False, True])
@on_ranks(2)
def test_engines_may_take_turns_or_share_a_loss(stage: int, joint: bool) -> None:
    """Each for itself, or with one loss."""
    models = [blocks(), blocks()]
    changes = {"zero_optimization": {**CUT, "stage": stage}}
    engines = [engine_of(stage, model, **changes) for model in models]
    usual = [[[Micro()] * comm.get_world_size()]]
    for step in range(4):
        if not joint:
            for engine, model in zip(engines, models, strict=True):
                train(engine, model, usual)
            continue
        outputs = [engine(inputs_of(step)) for engine in engines]
        sum(one.square().mean() for one in outputs).backward()  # type: ignore[union-attr]
        for engine in engines:
            engine.step()
    first, second = (engine.state_dict() for engine in engines)
    assert_close(first, second)
    for engine in engines:
        engine.destroy()
