"""Rounds: once updates are alike nobody says a word, whoever leaves them hangs nobody."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from cases import often, rarely
from engine.toys import assert_close, engine_of
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool, RankPools

from hadal import comm
from hadal.comm.bell import Bell
from hadal.errors import LossError, MismatchError, UsageError
from hadal.zero import GatheredParameters, agreement, asking, rounds
from hadal.zero.bucket import Weights
from hadal.zero.gathering import Phase
from hadal.zero.gradients import Arrival
from hadal.zero.rounds import Course, RoundPass
from hadal.zero.trace import Kind
from zero.test_gathering import ALL, BLOCKS, CUT, DROPS, Refuses, blocks, inputs_of

# ---- which rounds are known ---------------------------------------------------------------------

USUAL = (RoundPass(Kind.BACKWARD, True, None),)
OTHER = (RoundPass(Kind.BACKWARD, False, None), *USUAL)


def known_along(course: Course, came: Sequence[bool]) -> list[bool]:
    """Rounds by whether each was known; `came`: whether it was the usual one."""
    found = []
    for is_usual in came:
        found.append(course.is_known)
        if not found[-1]:
            course.came(USUAL if is_usual else OTHER)
        elif is_usual:
            course.held()
        else:
            course.left()
            course.came(None)
    return found


def test_two_rounds_alike_make_the_third_known() -> None:
    assert known_along(Course(), [True] * 5) == [False, False, True, True, True]
    course = Course()
    course.came(None)
    assert known_along(course, [True] * 3) == [False, False, True]


@pytest.mark.parametrize("interval", [4, 7, 30])
def test_what_comes_at_regular_intervals_is_expected(interval: int) -> None:
    came = [number % interval != interval - 1 for number in range(8 * interval)]
    known = known_along(Course(), came)
    left = [number for number, is_usual in enumerate(came) if known[number] and not is_usual]
    assert len(left) <= 4
    assert any(known[-interval:]) or interval == 4


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=300, max_size=300))
def test_irregular_rounds_are_left_ever_less_often(came: list[bool]) -> None:
    known = known_along(Course(), came)
    left = sum(k and not usual for k, usual in zip(known, came, strict=True))
    assert left <= 300 / 8 + 8


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
    asks: bool = True,
) -> list[bool]:
    """Record whether each round was steady when it began.

    Without `asks`, ranks cannot ask each other for weights beside their plans.
    """
    here = Bell.here if asks else lambda: None
    with patch.object(Bell, "here", here), patch.object(asking, "PATIENCE_S", 0.05):
        return _steady_of(updates, stage, settings, meets)


def _steady_of(
    updates: Sequence[Sequence[Sequence[Micro]]], stage: int, settings: dict[str, Any], meets: bool
) -> list[bool]:
    model = blocks()
    changes = {"zero_optimization": {**CUT, **settings, "stage": stage}}
    accumulation = len(updates[0])
    engine = engine_of(stage, model, gradient_accumulation_steps=accumulation, **changes)
    rounds_, steady = engine._parts.runtime.gathering.rounds, []
    begin = rounds_._begin_round

    def note() -> None:
        begin()
        steady.append(rounds_.is_steady)

    rounds_._begin_round = note
    train(engine, model, updates, meets=meets)
    assert not [
        bucket
        for bucket in engine._parts.runtime.gathering._buckets
        if bucket.state is not Weights.SHARDED
    ]
    state = {name: value.cpu() for name, value in engine.state_dict().items()}
    assert_close(state, plain_after(updates))
    engine.destroy()
    return steady


WORLD = 2
CALM = [[[Micro()] * WORLD]]


def with_one(micros: Sequence[Micro], accumulation: int = 1, at: int = 0) -> Any:
    """Steady updates, one in which a micro-step is another one, and more of the usual ones."""
    usual = [[[Micro()] * WORLD for _ in range(accumulation)]]
    odd = [list(row) for row in usual[0]]
    odd[at] = list(micros)
    return [*usual * 4, odd, *usual * 4]


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
@pytest.mark.parametrize("odd", often(ODD, *USUAL))
def test_a_steady_round_may_be_left(odd: str, ranks: RankPools) -> None:
    at = list(ODD).index(odd)
    for stage, accumulation, where in ((3, 1, 0), (3, 3, at % 3), (at % 3, 3, 2)):
        settings = DROPS if at % 2 else {}
        updates = with_one(ODD[odd], accumulation, where)
        for asks in (True, False)[: 2 if stage == 3 else 1]:
            given = updates, stage, settings, False, asks
            for steady in ranks(WORLD).run(train_as_plain_torch, *given):
                assert any(steady)


@pytest.mark.slow_cells(
    "another branch-default",
    "less-default",
    "more-default",
    "all less-default",
    "all another way-default",
    "each another way-default",
    "a forward that raises-default",
    "forwards that raise-default",
    "one raises, one strays-default",
    "evaluation-default",
    "evaluation between-default",
    "access-default",
    "access between-default",
    "state-default",
    "a meeting-default",
)
@pytest.mark.parametrize("settings", [{}, rarely(DROPS)], ids=["default", "nothing kept"])
@pytest.mark.parametrize("odd", ODD)
def test_others_may_wait_in_a_collective_of_their_own(
    odd: str, settings: dict[str, Any], ranks: RankPools
) -> None:
    for steady in ranks(WORLD).run(train_as_plain_torch, with_one(ODD[odd]), 3, settings, True):
        assert any(steady)


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
    while len(updates) < 14:
        for _ in range(chance.randrange(3, 6)):
            updates.append([[Micro()] * world for _ in range(accumulation)])
        wild = [[Micro()] * world for _ in range(accumulation)]
        for _ in range(chance.randrange(1, 3)):
            wild[chance.randrange(accumulation)] = odd()
        updates.append(wild)
    return updates


@pytest.mark.slow_cells("0", "1")
@pytest.mark.parametrize("seed", often(range(8), 0, 1, 2))
def test_any_programs_train_as_plain_torch_does(seed: int, ranks: RankPools) -> None:
    world = 2 + seed % 2
    settings = [{}, DROPS, {"stage3_prefetch_bucket_size": 1}][seed % 3]
    updates = random_updates(seed, world)
    ranks(world).run(train_as_plain_torch, updates, 3, settings, False, False)
    ranks(world).run(train_as_plain_torch, updates, 3, settings, True)


# ---- words --------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[str]]:
    """Every exchange between ranks that is no tensor of the model's."""
    told: list[str] = []
    codes, sums = agreement.gather_codes_and_least, rounds.sum_

    def note_codes(*given: Any) -> Any:
        told.append(given[-1])
        return codes(*given)

    def note_sum(*given: Any) -> None:
        told.append(given[-1])
        sums(*given)

    agreement.gather_codes_and_least, rounds.sum_ = note_codes, note_sum
    try:
        yield told
    finally:
        agreement.gather_codes_and_least, rounds.sum_ = codes, sums


def words_of_each_update(stage: int, accumulation: int, interval: int) -> list[int]:
    """With an evaluation before every so many updates."""
    model = blocks()
    changes = {"zero_optimization": {**CUT, "stage": stage}, "gradient_clipping": 1.0}
    engine = engine_of(stage, model, gradient_accumulation_steps=accumulation, **changes)
    found = []
    for update in range(20):
        with counted() as told:
            if update and update % interval == 0:
                act(engine, "evaluation")
            train(engine, model, [[[Micro()] * comm.get_world_size()] * accumulation])
        found.append(len(told))
    engine.destroy()
    return found


@pytest.mark.fast_cells("0")
@pytest.mark.parametrize("stage", range(4))
def test_a_steady_round_needs_one_word(stage: int, ranks: RankPools) -> None:
    for accumulation in (1, 3):
        for words in ranks(2).run(words_of_each_update, stage, accumulation, 100):
            assert words[-12:] == [1] * 12
            assert words[0] > 1


def test_regular_evaluations_are_foreseen(ranks: RankPools) -> None:
    for words in ranks(2).run(words_of_each_update, 3, 1, 6):
        assert words[9:12] == words[15:18] == [1, 1, 1]
        # Before its second interval is over the rule is not known: gathers are announced anew.
        assert words[18] < words[12] < words[6], words


# ---- faults -------------------------------------------------------------------------------------


def fault_of(engine: Any, model: Any, kind: str) -> None:
    """The micro-step of the rank that is at fault."""
    if kind == "loss":
        with pytest.raises(LossError, match="expects a scalar"):
            engine.backward(engine(inputs_of(50)))
    elif kind == "loss and step":
        fault_of(engine, model, "loss")
        engine.step()
    elif kind == "left out":
        engine(inputs_of(50))
        with pytest.raises(UsageError, match="has no gradients"):
            engine.step()
    elif kind == "backward":
        handle = model.blocks[2].register_forward_hook(lambda *a: Refuses.apply(a[-1]))
        with pytest.raises(FloatingPointError):
            engine.backward(engine(inputs_of(50)).square().mean())
        handle.remove()
        engine.zero_grad()


def go_on_after_a_fault(stage: int, kind: str) -> None:
    """One rank is at fault in a steady round: the others hear of it before their update."""
    model = blocks()
    engine = engine_of(stage, model, zero_optimization={**CUT, "stage": stage})
    usual = [[[Micro()] * comm.get_world_size()]]
    train(engine, model, usual * 4)
    assert engine._parts.runtime.gathering.rounds.is_steady
    if comm.get_rank() == 1:
        fault_of(engine, model, kind)
    else:
        engine.backward(engine(inputs_of(50)).square().mean())
        with pytest.raises(LossError, match="skipped on all ranks"):
            engine.step()
    assert all(g.state is Arrival.EMPTY for g in engine._parts.runtime.gradients) or (
        kind == "backward" and comm.get_rank() == 1
    )
    train(engine, model, usual * 4)
    assert_close(engine.state_dict(), plain_after_rows(usual * 4, 2))
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


@pytest.mark.fast_cells("0-left out", "2-loss")
@pytest.mark.parametrize("kind", ["loss", "loss and step", "left out", "backward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_fault_on_one_rank_is_told_before_the_update(
    stage: int, kind: str, ranks: RankPools
) -> None:
    ranks(2).run(go_on_after_a_fault, stage, kind)


def accumulate_around_a_fault(stage: int) -> None:
    """The micro-step of a refused loss is over: the ranks stay in step."""
    model = blocks()
    changes = {"zero_optimization": {**CUT, "stage": stage}}
    engine = engine_of(stage, model, gradient_accumulation_steps=3, **changes)
    usual = [[[Micro()] * comm.get_world_size()] * 3]
    train(engine, model, usual * 4)
    told = 0
    for micro in range(3):
        try:
            outputs = engine(inputs_of(micro))
            is_bad = micro == 1 and comm.get_rank() == 1
            engine.backward(outputs if is_bad else outputs.square().mean())
            engine.step()
        except LossError:
            told += 1
    assert told == 1 + comm.get_rank()
    assert engine.micro_steps == 15
    assert engine.global_steps == 4
    train(engine, model, usual * 3)
    assert engine.global_steps == 7
    engine.destroy()


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_refused_micro_step_counts(stage: int, ranks: RankPools) -> None:
    ranks(2).run(accumulate_around_a_fault, stage)


def differ_when_steady(stage: int, kind: str) -> str:
    """Programs that differ are told, on every rank."""
    model = blocks()
    settings = {"divergent_ranks": False} if kind == "path" else {}
    changes = {"zero_optimization": {**CUT, **settings, "stage": stage}}
    engine = engine_of(stage, model, gradient_accumulation_steps=2, **changes)
    usual = [[[Micro()] * comm.get_world_size()] * 2]
    train(engine, model, usual * 5)
    assert engine._parts.runtime.gathering.rounds.is_steady
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


@pytest.mark.slow_cells("checkpoint-2", "path-3")
@pytest.mark.parametrize(
    ("kind", "stage"),
    often(
        [("boundary", 0), ("boundary", 2), ("checkpoint", 2), ("checkpoint", 3), ("path", 3)],
        *[("boundary", 0), ("checkpoint", 2), ("path", 3)],
    ),
)
def test_programs_that_differ_are_told_on_all_ranks(kind: str, stage: int) -> None:
    pool = RankPool(2)  # of its own: what one has sent may never be fetched
    try:
        told = pool.run(differ_when_steady, stage, kind)
    finally:
        pool.close()
    told_of = "took different paths" if kind == "path" else "the ranks' programs differ"
    assert all(told_of in one for one in told), told


# ---- engines that share a process ---------------------------------------------------------------


def train_two_engines(stage: int, joint: bool) -> list[bool]:
    """Each for itself, or with one loss; whether each was steady at the end."""
    models = [blocks(), blocks()]
    changes = {"zero_optimization": {**CUT, "stage": stage}}
    engines = [engine_of(stage, model, **changes) for model in models]
    usual = [[[Micro()] * comm.get_world_size()]]
    for step in range(7):
        if not joint:
            for engine, model in zip(engines, models, strict=True):
                train(engine, model, usual)
            continue
        outputs = [engine(inputs_of(step)) for engine in engines]
        sum(one.square().mean() for one in outputs).backward()  # type: ignore[union-attr]
        for engine in engines:
            engine.step()
    steady = [engine._parts.runtime.gathering.rounds.is_steady for engine in engines]
    first, second = (engine.state_dict() for engine in engines)
    assert_close(first, second)
    for engine in engines:
        engine.destroy()
    return steady


@pytest.mark.fast_cells("True-3")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("joint", [False, True])
def test_engines_that_mix_meet_and_others_need_not(
    joint: bool, stage: int, ranks: RankPools
) -> None:
    assert ranks(2).run(train_two_engines, stage, joint) == [[not joint] * 2] * 2
