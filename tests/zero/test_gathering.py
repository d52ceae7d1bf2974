"""Weights on use: plans are followed without a word, left without a hang, and keep the limits."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine.toys import ROWS, assert_close, engine_of
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from hadal import comm
from hadal.errors import LossError, MismatchError, UsageError
from hadal.zero import agreement
from hadal.zero.bucket import Bucket, Weights
from hadal.zero.gathering import Phase
from hadal.zero.gradients import Arrival

WIDTH = 6
BLOCKS = 5
NUMEL = WIDTH * WIDTH + WIDTH  # of a block
PADDED = 48  # of a block's bucket
ALL = tuple(range(BLOCKS))
CUT = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}


class Blocks(nn.Module):
    """Blocks that run in the order that is said from outside; what a path leaves out is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.look: Callable[[], None] = lambda: None
        self.raises_before: int | None = None

    def forward(self, inputs: Tensor, path: Sequence[int] = ALL) -> Tensor:
        for block in path:
            if block == self.raises_before:
                raise FloatingPointError("mine")
            outputs = self.blocks[block](inputs)
            self.look()
            if outputs.requires_grad:
                outputs.register_hook(lambda _: self.look())
            inputs = inputs + torch.tanh(outputs)
        return inputs


def blocks() -> Blocks:
    torch.manual_seed(5)
    return Blocks()


def inputs_of(step: int, rank: int | None = None) -> Tensor:
    rank = comm.get_rank() if rank is None else rank
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(50 * step + rank))


def one_step(engine: Any, step: int, path: Sequence[int] = ALL) -> None:
    engine.backward(engine(inputs_of(step), path).square().mean())
    engine.step()


@contextmanager
def watched(engine: Any) -> Iterator[list[tuple[str, int]]]:
    """Record each start of a gather, each lending and each message on the host in a block."""
    events: list[tuple[str, int]] = []
    original = agreement.gather_codes_and_least
    buckets = engine._parts.runtime.gathering._buckets

    def spy(bucket: Bucket, number: int, name: str) -> None:
        act = getattr(bucket, name)

        def call(**how: Any) -> None:
            if name == "serve" or bucket.state is Weights.SHARDED:
                events.append((name, number))
            act(**how)

        setattr(bucket, name, call)

    def codes(code: int, *others: Any) -> tuple[list[int], int]:
        events.append(("word", code))
        return original(code, *others)

    for number, bucket in enumerate(buckets):
        spy(bucket, number, "start_unshard")
        spy(bucket, number, "serve")
    agreement.gather_codes_and_least = codes
    try:
        yield events
    finally:
        agreement.gather_codes_and_least = original
        for bucket in buckets:
            del bucket.start_unshard, bucket.serve


def gathers_and_words(settings: dict[str, Any]) -> list[tuple[list[int], int, int]]:
    """For each update: the gathers in order, the lendings, and the messages."""
    engine = engine_of(3, blocks(), zero_optimization={**CUT, **settings})
    found = []
    for step in range(5):
        with watched(engine) as events:
            one_step(engine, step)
        order = [number for name, number in events if name == "start_unshard"]
        names = [name for name, _ in events]
        found.append((order, names.count("serve"), names.count("word")))
    engine.destroy()
    return found


DROPS = {"stage3_max_reuse_distance": 0}
# The last block's gradient comes when it was just used: there and back.
THERE_AND_BACK = [0, 1, 2, 3, 4, 3, 2, 1, 0]
# At the beginning and at the end of forward and backward, and before the update.
MEETINGS = 5


def test_a_plan_needs_no_word_for_each_gather(ranks: RankPools) -> None:
    for first, *others in ranks(2).run(gathers_and_words, DROPS):
        assert first[0] == THERE_AND_BACK
        assert first[2] == len(THERE_AND_BACK) + MEETINGS
        assert others == [(THERE_AND_BACK, 0, MEETINGS)] * 4


@pytest.mark.claims(
    "zero_optimization.stage3_max_reuse_distance", "zero_optimization.max_reuse_distance"
)
def test_what_is_used_again_soon_enough_is_kept(ranks: RankPools) -> None:
    near = {"max_reuse_distance": 2 * PADDED}
    for *_, last in ranks(2).run(gathers_and_words, near):
        assert last[0] == [0, 1, 2, 3, 4, 2, 1, 0]
    far = {"stage3_max_reuse_distance": 10**6}
    for *_, last in ranks(2).run(gathers_and_words, far):
        assert last[0] == [0, 1, 2, 3, 4]


def states_in_use(settings: dict[str, Any]) -> list[tuple[int, int]]:
    """At each use in the third update: elements on their way, and all elements gathered."""
    model = blocks()
    engine = engine_of(3, model, zero_optimization={**CUT, **settings})
    gathering = engine._parts.runtime.gathering
    found: list[tuple[int, int]] = []

    def look(*_: Any) -> None:
        states = [bucket.state for bucket in gathering._buckets]
        arriving = states.count(Weights.ARRIVING)
        found.append((arriving * PADDED, (arriving + states.count(Weights.FULL)) * PADDED))

    for step in range(2):
        one_step(engine, step)
    assert {bucket.layout.numel for bucket in gathering._buckets} == {PADDED}
    for block in model.blocks:
        block.register_forward_pre_hook(look)
    model.look = lambda: look() if gathering.phase is Phase.BACKWARD else None
    one_step(engine, 2)
    engine.destroy()
    return found


@pytest.mark.claims(
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.prefetch_bucket_size"
)
def test_weights_are_gathered_ahead_of_their_use(ranks: RankPools) -> None:
    def ahead(**settings: Any) -> list[int]:
        each = ranks(2).run(states_in_use, {**DROPS, **settings})
        assert each[0] == each[1]
        return [arriving // PADDED for arriving, _ in each[0]]

    assert ahead(stage3_prefetch_bucket_size=0) == [0] * 10
    # One bucket always may be on its way; backward begins with what forward ended with.
    assert ahead(stage3_prefetch_bucket_size=1) == [1, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    assert ahead(prefetch_bucket_size=2 * PADDED) == [2, 2, 2, 1, 0, 2, 2, 2, 1, 0]


@pytest.mark.claims(
    "zero_optimization.stage3_allgather_sequential", "zero_optimization.allgather_sequential"
)
def test_one_at_a_time_gathers_nothing_ahead(ranks: RankPools) -> None:
    for name in ("stage3_allgather_sequential", "allgather_sequential"):
        for found in ranks(2).run(states_in_use, {**DROPS, name: True}):
            assert [arriving for arriving, _ in found] == [0] * 10


@pytest.mark.claims(
    "zero_optimization.stage3_max_live_parameters", "zero_optimization.max_live_parameters"
)
def test_no_more_elements_are_gathered_than_allowed(ranks: RankPools) -> None:
    for allowed in (0, 1, 2, 3):
        name = "stage3_max_live_parameters" if allowed % 2 else "max_live_parameters"
        for found in ranks(2).run(states_in_use, {name: allowed * PADDED}):
            most = max(gathered for _, gathered in found)
            # The unit in use, and the next one ahead of its use, always are.
            assert most == (max(allowed, 2) if allowed else 1) * PADDED, found


# ---- leaving the plan --------------------------------------------------------------------------

# One row per update, one path per rank.
SAME = [(ALL, ALL)] * 2
PATHS = {
    "one rank leaves early": [*SAME, (ALL, (0, 1)), (ALL, ALL), (ALL, ALL)],
    "all leave early": [*SAME, ((0, 1), (0, 1)), ((0, 1), (0, 1)), (ALL, ALL)],
    "a layer is dropped": [*SAME, ((0, 2, 3, 4), (0, 1, 2, 3, 4)), (ALL, (0, 1, 3, 4)), (ALL, ALL)],
    "a layer is dropped everywhere": [*SAME, *[((0, 2, 4),) * 2, (ALL,) * 2, ((1, 2, 3),) * 2] * 3],
    "another order": [*SAME, ((4, 3, 2, 1, 0), ALL), (ALL, (1, 0, 2, 3, 4)), (ALL, ALL)],
    "experts": [((0, 1, 4), (0, 2, 4)), ((0, 3, 4), (0, 1, 4)), ((0, 2, 4), (0, 2, 4))] * 2,
    "one rank uses more": [((0, 1), (0, 1)), ((0, 1), (0, 1)), ((0, 1), ALL), ((0,), (0,))],
    "twice": [*SAME, (ALL, (0, 1, 1, 2, 2, 3, 4)), ((0, 0, 4, 4), ALL), (ALL, ALL)],
}
LIMITS: list[dict[str, Any]] = [
    {},
    DROPS,
    {**DROPS, "stage3_prefetch_bucket_size": 1},
    {"stage3_max_live_parameters": 3 * PADDED, "stage3_prefetch_bucket_size": 2 * PADDED},
    {"divergent_ranks": True},
    {**DROPS, "divergent_ranks": True},
]


def train_along(rows: list[tuple[Sequence[int], ...]], settings: dict[str, Any]) -> None:
    """The weights are those of plain torch, whatever the paths."""
    rank, world = comm.get_rank(), comm.get_world_size()
    plain, model = blocks(), blocks()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    engine = engine_of(3, model, zero_optimization={**CUT, **settings})
    for step, row in enumerate(rows):
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for other in range(world):
            (plain(inputs_of(step, other), row[other]).square().mean() / world).backward()
        optimizer.step()
        one_step(engine, step, row[rank])
        assert engine._parts.runtime.gathering.phase is Phase.IDLE
        gathered = [b for b in engine._parts.runtime.buckets if b.state is not Weights.SHARDED]
        assert not gathered
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    engine.destroy()


@pytest.mark.fast_cells("all leave early")
@pytest.mark.parametrize("rows", PATHS.values(), ids=PATHS.keys())
def test_a_rank_that_leaves_the_plan_hangs_nobody(rows: Any, ranks: RankPools) -> None:
    at = list(PATHS.values()).index(rows)
    for settings in (LIMITS[at % len(LIMITS)], LIMITS[(at + 3) % len(LIMITS)]):
        ranks(2).run(train_along, rows, settings)


def gathers_along(
    rows: list[tuple[Sequence[int], ...]], settings: dict[str, Any]
) -> list[tuple[list[int], int]]:
    """For each update: the gathers in order, and the messages."""
    engine = engine_of(3, blocks(), zero_optimization={**CUT, **settings})
    found = []
    for step, row in enumerate(rows):
        with watched(engine) as events:
            one_step(engine, step, row[comm.get_rank()])
        gathers = [number for name, number in events if name in ("start_unshard", "serve")]
        found.append((gathers, sum(name == "word" for name, _ in events)))
    engine.destroy()
    return found


SKIPPED = [(ALL, (0, 3, 4)), ((1, 4), ALL), ((0, 1), (2, 3))]


@pytest.mark.parametrize("settings", LIMITS[:4])
def test_what_a_rank_skips_needs_no_word(settings: dict[str, Any], ranks: RankPools) -> None:
    """A tower without pictures, a starved expert: gathers go on as planned, again and again."""
    planned, *others = ranks(2).run(gathers_along, [*SAME, *SKIPPED * 4], settings)
    for step in planned[2:]:
        assert step == planned[1]
    assert others == [planned]


def meet_inside(rows: list[tuple[Sequence[int], ...]]) -> None:
    """Ranks skip blocks between two collectives of the program's own, inside the forward."""
    model = blocks()
    engine = engine_of(3, model, zero_optimization={**CUT, **DROPS})
    for block in (0, 4):
        model.blocks[block].register_forward_hook(
            lambda *a: torch.distributed.all_reduce(a[-1].detach().clone())
        )
    for step, row in enumerate(rows):
        one_step(engine, step, row[comm.get_rank()])
    engine.destroy()


def test_ranks_may_skip_between_collectives_of_the_program(ranks: RankPools) -> None:
    rows = [*SAME, (ALL, (0, 2, 4)), ((0, 4), ALL), ((0, 1, 4), (0, 2, 3, 4))]
    ranks(2).run(meet_inside, rows)


def random_rows(seed: int, world: int, updates: int = 6) -> list[tuple[Sequence[int], ...]]:
    chance = random.Random(seed)

    def path() -> tuple[int, ...]:
        return tuple(chance.choices(ALL, k=chance.randrange(7)))

    rows: list[tuple[Sequence[int], ...]] = []
    while len(rows) < updates:
        common = path()
        rows += [(common,) * world] * chance.randrange(1, 4)
        rows.append(tuple(path() if chance.random() < 0.5 else common for _ in range(world)))
    # A path without any block has no loss to go back from.
    return [tuple(each or (0,) for each in row) for row in rows]


@pytest.mark.fast_cells("0-2")
@pytest.mark.parametrize(
    ("seed", "world"),
    [(0, 2), (1, 3), (2, 2), (3, 3), (4, 2), (5, 3)],
)
def test_any_paths_train_as_plain_torch_does(seed: int, world: int, ranks: RankPools) -> None:
    ranks(world).run(train_along, random_rows(seed, world), LIMITS[seed])


def raise_and_retry(who: Sequence[int], settings: dict[str, Any]) -> None:
    """A forward raises on some ranks under a plan; these run it again, and all go on."""
    plain = engine_of(0, blocks())
    model = blocks()
    engine = engine_of(3, model, zero_optimization={**CUT, **settings})
    for step in range(6):
        if step in (2, 4) and comm.get_rank() in who:
            model.raises_before = step
            with pytest.raises(FloatingPointError):
                engine(inputs_of(step))
            model.raises_before = None
        one_step(engine, step)
        one_step(plain, step)
    assert_close(engine.state_dict(), plain.state_dict())
    engine.destroy()
    plain.destroy()


@pytest.mark.fast_cells("one")
@pytest.mark.parametrize("who", [(1,), (0, 1)], ids=["one", "all"])
def test_a_forward_that_raises_under_a_plan(who: Sequence[int], ranks: RankPools) -> None:
    for settings in LIMITS[:2]:
        ranks(2).run(raise_and_retry, who, settings)


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise FloatingPointError("mine")


@on_ranks(2)
def test_a_backward_that_raises_under_a_plan() -> None:
    """On all ranks, in the midst of a plan: the next step is as good as any."""
    expected = engine_of(0, blocks())
    model = blocks()
    engine = engine_of(3, model, zero_optimization=CUT)
    for step in range(4):
        if step == 2:
            handle = model.blocks[2].register_forward_hook(lambda *a: Refuses.apply(a[-1]))
            with pytest.raises(FloatingPointError):
                engine.backward(engine(inputs_of(9)).square().mean())
            handle.remove()
            engine.zero_grad()
        one_step(engine, step)
        one_step(expected, step)
    assert_close(engine.state_dict(), expected.state_dict())
    engine.destroy()
    expected.destroy()


@pytest.mark.slow_cells("1-settings1-3", "3-settings4-2")
@pytest.mark.parametrize(
    ("stage", "settings", "accumulation"),
    [(0, {}, 1), (1, {}, 3), (2, {}, 2), (3, DROPS, 1), (3, {}, 2)],
)
@on_ranks(2)
def test_a_backward_that_raises_on_one_rank_is_an_error_on_all(
    stage: int, settings: dict[str, Any], accumulation: int
) -> None:
    """On one rank: the others are told at the end of that backward, and all may go on."""
    expected, model = engine_of(0, blocks()), blocks()
    engine = engine_of(
        stage,
        model,
        gradient_accumulation_steps=accumulation,
        zero_optimization={**CUT, **settings, "stage": stage},
    )
    alone = comm.get_rank() == 1
    for step in range(5):
        micros = accumulation
        if step in (0, 3):
            if accumulation > 1:
                engine.backward(engine(inputs_of(10)).square().mean())
                engine.step()
                micros -= 1
            handle = model.blocks[2].register_forward_hook(
                lambda *a: Refuses.apply(a[-1]) if alone else None
            )
            kind, told = (FloatingPointError, "mine") if alone else (LossError, "dropped on all")
            with pytest.raises(kind, match=told):
                engine.backward(engine(inputs_of(9)).square().mean())
            handle.remove()
            gradients = engine._parts.runtime.gradients
            assert all(one.state is Arrival.EMPTY for one in gradients)
            with pytest.raises(UsageError, match="has no gradients"):
                engine.step()
        for _ in range(micros):
            loss = engine(inputs_of(step)).square().mean()
            engine.backward(loss * accumulation / micros)
            engine.step()
        one_step(expected, step)
    assert engine.global_steps == 5
    assert_close(engine.state_dict(), expected.state_dict())
    engine.destroy()
    expected.destroy()


def interrupt_and_go_on(
    kind: type[BaseException], settings: dict[str, Any], is_bare: bool = False
) -> None:
    """Rank 1 leaves a forward, rank 0 runs it; all leave a backward; then all go on."""
    plain = engine_of(0, blocks())
    model = blocks()
    engine = engine_of(3, model, zero_optimization={**CUT, **settings})

    def leave(*_: Any) -> None:
        raise kind("mine")

    forward = engine.module if is_bare else engine
    for step in range(6):
        if step in (2, 4) and comm.get_rank():
            handle = model.blocks[step].register_forward_hook(leave)
            with pytest.raises(kind):
                forward(inputs_of(step))
            handle.remove()
            if is_bare and step == 2:
                # Noticed where the bare module is called next.
                model.eval()(inputs_of(step))
                model.train()
                assert engine._parts.hooks._depth == 0
        if is_bare and step == 2 and not comm.get_rank():
            model.eval()(inputs_of(step))
            model.train()
        if step == 4:
            # Before any hook of the model's own has begun.
            handle = model.register_forward_pre_hook(leave, prepend=True)
            with pytest.raises(kind):
                forward(inputs_of(step))
            handle.remove()
        one_step(engine, step)
        one_step(plain, step)
        buckets = engine._parts.runtime.buckets
        assert all(bucket.state is Weights.SHARDED for bucket in buckets)
        assert engine._parts.hooks._depth == 0
    assert_close(engine.state_dict(), plain.state_dict())
    engine.destroy()
    plain.destroy()


@pytest.mark.fast_cells("KeyboardInterrupt")
@pytest.mark.parametrize("kind", [FloatingPointError, KeyboardInterrupt])
def test_a_forward_may_be_left_at_any_moment(kind: type[BaseException], ranks: RankPools) -> None:
    for settings in LIMITS[:2]:
        ranks(2).run(interrupt_and_go_on, kind, settings)


def test_a_forward_of_the_bare_module_may_be_too(ranks: RankPools) -> None:
    """torch calls no hook for an interrupt: it is noticed at the next call."""
    for kind in (KeyboardInterrupt, FloatingPointError):
        ranks(2).run(interrupt_and_go_on, kind, {}, True)


@on_ranks(2)
def test_an_interrupted_backward_leaves_no_weights_on_their_way() -> None:
    """On all ranks, while weights are on their way ahead of their use."""
    expected = engine_of(0, blocks())
    model = blocks()
    engine = engine_of(3, model, zero_optimization={**CUT, **DROPS})
    buckets = engine._parts.runtime.gathering._buckets
    arriving = []

    def leave(_: Tensor) -> None:
        arriving.extend(b for b in buckets if b.state is Weights.ARRIVING)
        raise KeyboardInterrupt

    for step in range(5):
        if step == 3:
            outputs = engine(inputs_of(9))
            handle = model.blocks[3].weight.register_hook(leave)
            with pytest.raises(KeyboardInterrupt):
                engine.backward(outputs.square().mean())
            handle.remove()
            assert arriving
            assert not [b for b in buckets if b.state is not Weights.SHARDED]
            engine.zero_grad()
        one_step(engine, step)
        one_step(expected, step)
    assert_close(engine.state_dict(), expected.state_dict())
    engine.destroy()
    expected.destroy()


def thaw_under_a_plan(settings: dict[str, Any]) -> list[int]:
    """Blocks that are trained later: the words of each update at stage 3."""
    engines, words = [], []
    for stage in (0, 3):
        model = blocks()
        trained = [p for block in model.blocks[:3] for p in block.parameters()]
        later = [p for block in model.blocks[3:] for p in block.parameters()]
        wishes = {"optimizer": torch.optim.AdamW(trained, lr=0.01)}
        for parameter in later:
            parameter.requires_grad_(False)
        engine = engine_of(
            stage,
            model,
            wishes,
            optimizer=None,
            zero_optimization={**CUT, **settings, "stage": stage},
        )
        for step in range(7):
            if step == 3:
                for parameter in later:
                    parameter.requires_grad_(True)
                engine.optimizer.add_param_group({"params": later})
            with watched(engine) as events:
                one_step(engine, step)
            words.append([name for name, _ in events].count("word"))
        engines.append(engine)
    assert_close(engines[1].state_dict(), engines[0].state_dict())
    for engine in engines:
        engine.destroy()
    return words[7:]


def test_parameters_that_are_trained_later_get_a_plan_anew(ranks: RankPools) -> None:
    for settings in LIMITS[:2]:
        for words in ranks(2).run(thaw_under_a_plan, settings):
            assert words[2] == words[-1] == MEETINGS
            assert words[3] > MEETINGS


def evaluate_between(settings: dict[str, Any]) -> None:
    """Evaluation has a plan of its own, and may come anywhere; ranks may differ there too."""
    expected = engine_of(0, blocks())
    engine = engine_of(3, blocks(), zero_optimization={**CUT, **settings})
    for step in range(5):
        with torch.no_grad():
            path = (0, 3) if step == 3 and comm.get_rank() else ALL
            got, wanted = engine(inputs_of(step), path), expected(inputs_of(step), path)
            assert torch.allclose(got, wanted, atol=1e-6)
        loss = engine(inputs_of(step)).square().mean()
        with torch.no_grad():
            engine(inputs_of(step))
        engine.backward(loss)
        engine.step()
        one_step(expected, step)
    assert_close(engine.state_dict(), expected.state_dict())
    engine.destroy()
    expected.destroy()


def test_evaluation_has_a_plan_of_its_own(ranks: RankPools) -> None:
    for settings in LIMITS[::3]:
        ranks(2).run(evaluate_between, settings)


# ---- what is told ------------------------------------------------------------------------------


def told_along(rows: list[tuple[Sequence[int], ...]], settings: dict[str, Any]) -> list[str]:
    engine = engine_of(3, blocks(), zero_optimization={**CUT, **settings})
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("hadal")
    log.addHandler(handler)
    try:
        for step, row in enumerate(rows):
            one_step(engine, step, row[comm.get_rank()])
    finally:
        log.removeHandler(handler)
    engine.destroy()
    return lines


OTHERS = [((0, 2), ALL), (ALL, ALL), (ALL, (0, 3)), (ALL, ALL), (ALL, ALL)]


def test_a_change_of_path_is_told_once(ranks: RankPools) -> None:
    first, second = ranks(2).run(told_along, [*SAME, *OTHERS], {})
    assert second == []
    assert len(first) == 1
    assert "in forward: after blocks.0, rank 0 used blocks.2; rank 1 used blocks.1" in first[0]
    assert ranks(2).run(told_along, SAME * 3, {"log_trace_cache_warnings": True}) == [[], []]


@pytest.mark.claims("zero_optimization.log_trace_cache_warnings")
def test_each_change_of_path_is_told_where_asked_for(ranks: RankPools) -> None:
    settings = {**DROPS, "log_trace_cache_warnings": True}
    first, second = ranks(2).run(told_along, [*SAME, *OTHERS], settings)
    assert second == []
    assert sum("in forward: " in line for line in first) == 2
    assert sum("in backward: " in line for line in first) == 2
    together = [*SAME, (ALL[:2],) * 2, (ALL[:2],) * 2]
    # A backward is expected by its forward: here it surprises nobody.
    (forward,) = ranks(2).run(told_along, together, settings)[0]
    assert "in forward: after blocks.1, as planned, it used blocks.2; now it reached" in forward


def words_along(rows: list[tuple[Sequence[int], ...]], settings: dict[str, Any]) -> list[int]:
    """The words of each update."""
    engine = engine_of(3, blocks(), zero_optimization={**CUT, **settings})
    words = []
    for step, row in enumerate(rows):
        with watched(engine) as events:
            one_step(engine, step, row[comm.get_rank()])
        words.append(sum(name == "word" for name, _ in events))
    engine.destroy()
    return words


@pytest.mark.slow
def test_paths_without_a_rule_are_announced_after_a_while(ranks: RankPools) -> None:
    """Fair coins: what is expected comes true half of the time, which is too little.

    A backward follows its forward all the same, and needs no word.
    """
    toss = random.Random(3)
    coins = [toss.choice((ALL, (0, 1))) for _ in range(60)]
    announced = [MEETINGS + len(path) for path in coins]
    for words in ranks(2).run(words_along, [(path, path) for path in coins], DROPS):
        assert any(word < all_of for word, all_of in zip(words[:20], announced, strict=False))
        assert words[-12:] == announced[-12:]


SHORT, ODD = (0, 1), (0, 2, 4)
TURNS: dict[str, list[Sequence[int]]] = {
    "in turn": [ALL, SHORT],
    "two of each": [ALL, ALL, SHORT, SHORT],
    "three in turn": [ALL, SHORT, ODD],
    "now and then": [ALL, ALL, ALL, ALL, SHORT],
}


@pytest.mark.fast_cells("three in turn")
@pytest.mark.parametrize("turn", TURNS)
def test_models_that_take_turns_are_planned_for(turn: str, ranks: RankPools) -> None:
    """Once each order has been seen, no gather is announced; a rare step may cost its own."""
    paths = TURNS[turn] * 6
    rare = [len(TURNS[turn]) - 1] if turn == "now and then" else []
    for words in ranks(2).run(words_along, [(path, path) for path in paths], DROPS):
        last = words[-len(TURNS[turn]) :]
        assert [w for at, w in enumerate(last) if at not in rare] == [MEETINGS] * (
            len(last) - len(rare)
        )


@pytest.mark.fast_cells("three in turn")
@pytest.mark.parametrize("turn", TURNS)
def test_models_that_take_turns_train_as_plain_torch_does(turn: str, ranks: RankPools) -> None:
    for settings in LIMITS[:2]:
        ranks(2).run(train_along, [(path, path) for path in TURNS[turn] * 3], settings)


def test_divergence_that_is_expected_is_never_planned_for(ranks: RankPools) -> None:
    settings = {**DROPS, "divergent_ranks": True}
    for words in ranks(2).run(words_along, SAME * 2, settings):
        # No word begins a forward.
        assert words == [len(THERE_AND_BACK) + MEETINGS - 1] * 4


def refuse_divergence(rows: list[tuple[Sequence[int], ...]]) -> tuple[int, str]:
    engine = engine_of(3, blocks(), zero_optimization={**CUT, "divergent_ranks": False})
    for step, row in enumerate(rows):
        try:
            one_step(engine, step, row[comm.get_rank()])
        except MismatchError as error:
            engine.destroy()
            return step, str(error)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("before", [[], SAME], ids=["at first", "under a plan"])
def test_divergence_may_be_an_error_on_every_rank(before: Any, ranks: RankPools) -> None:
    rows = [*before, (ALL, (0, 1, 3)), (ALL, ALL)]
    for step, message in ranks(2).run(refuse_divergence, rows):
        assert step == len(before)
        assert "after blocks.1, rank 0 used blocks.2; rank 1 used blocks.3" in message
        assert "zero_optimization.divergent_ranks" in message


@on_ranks(2)
def test_all_ranks_may_change_their_path_together() -> None:
    engine = engine_of(3, blocks(), zero_optimization={**CUT, "divergent_ranks": False})
    for step, path in enumerate([ALL, ALL, (0, 1), (0, 1), ALL, ALL]):
        one_step(engine, step, path)
    engine.destroy()


# ---- keys that ask for what is always so -------------------------------------------------------


def held_by_a_graph(settings: dict[str, Any]) -> tuple[int, Tensor]:
    """Bytes of gathered weights while a graph over all of them is alive, and the new weights."""
    engine = engine_of(3, blocks(), zero_optimization={**CUT, **DROPS, **settings})
    loss = engine(inputs_of(0)).square().mean()
    nbytes = sum(b.full.untyped_storage().nbytes() for b in engine._parts.runtime.buckets)
    engine.backward(loss)
    engine.step()
    weights = torch.cat([value.flatten() for value in engine.state_dict().values()])
    engine.destroy()
    return nbytes, weights


@pytest.mark.claims("zero_optimization.memory_efficient_linear", "zero_optimization.sub_group_size")
def test_a_graph_holds_no_gathered_weight_and_updates_are_the_same(ranks: RankPools) -> None:
    settings = [{}, {"memory_efficient_linear": False}, {"sub_group_size": 7}]
    found = [ranks(2).run(held_by_a_graph, each)[0] for each in settings]
    for nbytes, weights in found:
        # What was used last is used first in backward: it stays.
        assert nbytes == PADDED * 4
        assert torch.equal(weights, found[0][1])


def sharded_names(settings: dict[str, Any]) -> list[str]:
    engine = engine_of(3, blocks(), zero_optimization={"stage": 3, **settings})
    buckets = engine._parts.runtime.gathering._buckets
    names = [slot.name for bucket in buckets for slot in bucket.layout.slots]
    engine.destroy()
    return names


@pytest.mark.fast_cells("stage3_")
@pytest.mark.claims(
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.param_persistence_threshold",
    "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.model_persistence_threshold",
)
@pytest.mark.parametrize("prefix", ["", "stage3_"])
def test_small_parameters_stay_whole_up_to_a_sum(prefix: str, ranks: RankPools) -> None:
    def sharded(parameter: int, model: int) -> list[str]:
        each = f"{prefix}param_persistence_threshold"
        together = f"{prefix}model_persistence_threshold"
        return ranks(2).run(sharded_names, {each: parameter, together: model})[0]

    weights = [f"blocks.{block}.weight" for block in ALL]
    assert sharded(0, 10**6) == [f"blocks.{b}.{n}" for b in ALL for n in ("weight", "bias")]
    assert sharded(WIDTH + 1, 10**6) == weights
    # Two biases fit; the others are sharded with their weights.
    some = sharded(WIDTH + 1, 2 * WIDTH)
    assert [name for name in some if "bias" in name] == [f"blocks.{b}.bias" for b in (2, 3, 4)]
    assert sharded(10**6, 10**6) == []
