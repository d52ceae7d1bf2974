"""Predictions hold for sequences with a rule, and are dropped for sequences without one."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings, strategies as st

from hadal.zero.paths import (
    PassKind,
    Predictor,
    Trace,
    Use,
    describe_parting,
    held_along,
    kept_until_backward,
    make_plan,
)
from hadal.zero.policy import Limits

# A path for each letter, forward and back.
FORWARDS = {x: Trace(tuple(Use(b, b + 1) for b in range(n))) for n, x in enumerate("ABCD", 1)}


def back(trace: Trace) -> Trace:
    return Trace(tuple(Use(b, at + 1) for at, b in enumerate(reversed(trace.path))))


def step(predictor: Predictor, kind: PassKind, trace: Trace) -> bool | None:
    """Report whether each prediction came true; None without a prediction."""
    expected = predictor.expected(kind)
    has_held = None if expected is None else expected.path == trace.path
    predictor.came(kind, expected if has_held else trace, has_held=has_held)
    return has_held


def play(letters: str, predictor: Predictor | None = None) -> list[tuple[bool | None, bool | None]]:
    """For each letter, how its forward and its backward were expected."""
    predictor = predictor or Predictor()
    return [
        (
            step(predictor, PassKind.FORWARD, FORWARDS[letter]),
            step(predictor, PassKind.BACKWARD, back(FORWARDS[letter])),
        )
        for letter in letters
    ]


def is_told_by_two(turn: str) -> bool:
    """Return whether two letters always determine the next one in an endless cycle."""
    line = turn * 3
    nexts: dict[str, set[str]] = {}
    for at in range(2, len(line)):
        nexts.setdefault(line[at - 2 : at], set()).add(line[at])
    return all(len(letters) == 1 for letters in nexts.values())


@given(st.text("ABCD", min_size=1, max_size=6).filter(is_told_by_two))
def test_a_turn_that_two_steps_tell_is_foreseen(turn: str) -> None:
    """After three rounds nothing surprises, and nothing ever does that was not new before."""
    seen = play(turn * 8)
    assert set(seen[3 * len(turn) :]) == {(True, True)}
    assert all(backward is not False for _, backward in seen)


@given(st.text("ABCD", max_size=40))
def test_after_anything_one_path_is_foreseen_again(letters: str) -> None:
    """Whatever came before, unless it has used up all credit; then nothing is planned."""
    predictor = Predictor()
    play(letters, predictor)
    assert play("A" * 6, predictor)[-1][0] in (True, None)
    assert play("A", predictor)[0][1] is True


@given(st.text("AB", min_size=100, max_size=200), st.integers(0, 2**32))
def test_surprises_are_few_however_the_paths_change(letters: str, seed: int) -> None:
    """Each of the few contexts pays for what it promises: three at once, or a share of a fourth."""
    seen = [forward for forward, _ in play(letters)]
    surprises, kept = seen.count(False), seen.count(True)
    contexts = 9  # of two letters, of one, those of the beginning, and the last resort
    assert surprises <= 3 * contexts + kept / 3


def test_examples() -> None:
    assert play("AA")[1] == (True, True)  # a second step is planned already
    assert [f for f, _ in play("ABABAB")] == [None, False, False, True, True, True]
    # A path that comes once costs itself and the first step behind it.
    assert [f for f, _ in play("AAAABAAAABAAAA")][4:] == [
        False,
        False,
        *[True] * 3,
        False,
        *[True] * 4,
    ]
    assert [f for f, _ in play("AAABBBBB")][3:] == [False, True, True, True, True]


def test_what_parted_is_not_learned() -> None:
    predictor = Predictor()
    play("AA", predictor)
    predictor.came(PassKind.FORWARD, None, has_held=False)
    assert predictor.expected(PassKind.FORWARD) == FORWARDS["A"]
    assert predictor.expected(PassKind.BACKWARD) is None
    predictor.forget(PassKind.FORWARD)
    assert predictor.expected(PassKind.FORWARD) is None


def test_kinds_do_not_mix() -> None:
    predictor = Predictor()
    play("AA", predictor)
    assert predictor.expected(PassKind.EVALUATION) is None
    step(predictor, PassKind.EVALUATION, FORWARDS["B"])
    assert play("A", predictor) == [(True, True)]
    assert predictor.expected(PassKind.EVALUATION) == FORWARDS["B"]


def test_memory_is_bounded() -> None:
    predictor = Predictor()
    for number in range(200):
        trace = Trace(tuple(Use(b, b + 1) for b in range(number % 97)))
        predictor.came(PassKind.FORWARD, trace, has_held=None)
    assert len(predictor._memories[PassKind.FORWARD]) <= 50


def test_paths_that_do_not_part_are_told_to_end_together() -> None:
    told = describe_parting([(0, 1), (0, 1)], ["one", "other"], ["first", "second"])
    assert told == "after second, one reached the end; other reached the end"


# Which gathered weights stay until backward


patient = settings(deadline=None)  # the machine may be busy

NUMELS = st.lists(st.integers(0, 100), max_size=12)
LIMITS = st.builds(Limits, live_numel=st.integers(0, 500), reuse_numel=st.integers(0, 1000))


@patient
@given(NUMELS, LIMITS)
def test_both_limits_are_kept(numels, limits):
    kept = kept_until_backward(numels, limits)
    assert len(kept) == len(numels)
    assert sum(numel for numel, keep in zip(numels, kept, strict=True) if keep) <= limits.live_numel
    for index, keep in enumerate(kept):
        if keep:
            assert 2 * sum(numels[index + 1 :]) <= limits.reuse_numel


@patient
@given(NUMELS, LIMITS)
def test_the_nearest_next_use_comes_first(numels, limits):
    """Each dropped weight would exceed a limit together with those used sooner and kept."""
    kept = kept_until_backward(numels, limits)
    for index, keep in enumerate(kept):
        behind = zip(numels[index + 1 :], kept[index + 1 :], strict=True)
        sooner = sum(numel for numel, stays in behind if stays)
        is_near = 2 * sum(numels[index + 1 :]) <= limits.reuse_numel
        assert keep == (is_near and sooner + numels[index] <= limits.live_numel)


def test_plans_of_examples():
    def kept(live, reuse):
        return kept_until_backward([10, 10, 10, 10], Limits(live_numel=live, reuse_numel=reuse))

    assert kept(40, 60) == (True, True, True, True)
    assert kept(40, 59) == (False, True, True, True)
    assert kept(20, 60) == (False, False, True, True)
    assert kept(40, 0) == (False, False, False, True)
    assert kept(0, 60) == (False, False, False, False)
    assert kept_until_backward([], Limits()) == ()


# ---- plans -----------------------------------------------------------------------------------


@st.composite
def traces(draw, most=14, buckets=6):
    """Uses as a model makes them: a bucket is not needed anew before its use is over."""
    count = draw(st.integers(0, most))
    uses: list[Use] = []
    until: dict[int, int] = {}
    for index in range(count):
        free = [bucket for bucket in range(buckets) if until.get(bucket, 0) <= index]
        if not free:
            break
        bucket = draw(st.sampled_from(free))
        until[bucket] = draw(st.integers(index + 1, count))
        uses.append(Use(bucket, until[bucket]))
    return [Use(use.bucket, min(use.until, len(uses))) for use in uses]


SIZES = st.lists(st.integers(1, 20), min_size=6, max_size=6)
PLAN_LIMITS = st.builds(
    Limits,
    live_numel=st.integers(0, 150),
    reuse_numel=st.integers(0, 150),
    prefetch_numel=st.integers(0, 60),
)
HELD = st.frozensets(st.integers(0, 5))


NESTED = [Use(0, 1), Use(1, 4), Use(2, 3), Use(3, 4)]


@pytest.mark.slow
@settings(deadline=None, max_examples=2000)
@given(traces(), SIZES, PLAN_LIMITS, HELD, traces())
@example(NESTED, [1] * 6, Limits(live_numel=3, reuse_numel=0, prefetch_numel=2), frozenset(), [])
def test_a_plan_is_true_to_every_use_and_limit(uses, sizes, limits, held, following):
    made = make_plan(uses, sizes, limits, held, following)
    assert made == make_plan(uses, sizes, limits, held, following)
    assert set(made.held) <= held
    assert [use.bucket for use in made.uses] == [use.bucket for use in uses]
    gathered, in_use = set(made.held), set()
    ahead: list[int] = []
    done_at: dict[int, list[int]] = {}
    issued = most = 0

    def end(position):
        for index in done_at.get(position, []):
            bucket = uses[index].bucket
            in_use.remove(bucket)
            if not made.keeps[index]:
                gathered.remove(bucket)

    for position, use in enumerate(uses):
        end(position)
        for bucket in made.gathers[issued : made.started[position]]:
            assert bucket not in gathered, "gathered while already gathered"
            assert bucket not in ahead
            ahead.append(bucket)
        issued = made.started[position]
        if use.bucket in ahead:
            assert ahead.pop(0) == use.bucket, "gathers start in the order of the uses"
            gathered.add(use.bucket)
        assert use.bucket in gathered, "absent at use"
        assert use.bucket not in in_use
        in_use.add(use.bucket)
        done_at.setdefault(use.until, []).append(position)
        on_the_way = sum(sizes[bucket] for bucket in ahead)
        later = uses[position + 1 :]
        ends = {next(use.until for use in later if use.bucket == bucket) for bucket in ahead}
        is_one_unit = limits.live_numel > 0 and len(ends) == 1
        assert on_the_way <= limits.prefetch_numel or is_one_unit
        assert limits.prefetch_numel or not ahead
        live = sum(sizes[bucket] for bucket in gathered)
        used = sum(sizes[bucket] for bucket in in_use)
        most = max(most, live + on_the_way)
        assert live <= limits.live_numel or live == used
        assert live + on_the_way <= limits.live_numel or not ahead or is_one_unit
    end(len(uses))
    assert max(held_along(made, sizes), default=0) == most
    assert issued == len(made.gathers)
    assert not ahead
    assert not in_use
    assert gathered == made.kept_at_end
    coming = {use.bucket for use in following}
    assert made.kept_at_end <= coming


@pytest.mark.slow
@settings(deadline=None, max_examples=500)
@given(traces(), SIZES, PLAN_LIMITS)
def test_what_is_kept_is_used_again_within_the_distance(uses, sizes, limits):
    made = make_plan(uses, sizes, limits)
    for index, (use, keep) in enumerate(zip(uses, made.keeps, strict=True)):
        if keep:
            later = range(index + 1, len(uses))
            again = next(other for other in later if uses[other].bucket == use.bucket)
            between = sum(sizes[each.bucket] for each in uses[use.until : again])
            assert between <= limits.reuse_numel


def in_turn(*buckets):
    return [Use(bucket, at + 1) for at, bucket in enumerate(buckets)]


def test_the_next_buckets_are_gathered_ahead():
    sizes = [10] * 6

    def started(prefetch, live=1000):
        limits = Limits(prefetch_numel=prefetch, live_numel=live, reuse_numel=0)
        return make_plan(in_turn(0, 1, 2, 3, 4, 5), sizes, limits).started

    assert started(0) == (1, 2, 3, 4, 5, 6)
    assert started(1) == (2, 3, 4, 5, 6, 6)
    assert started(20) == (3, 4, 5, 6, 6, 6)
    assert started(1000) == (6, 6, 6, 6, 6, 6)
    assert started(20, live=20) == (2, 3, 4, 5, 6, 6)
    assert started(20, live=1) == (2, 3, 4, 5, 6, 6)
    assert started(20, live=0) == started(0)


@pytest.mark.parametrize("buckets_of_block", [1, 2, 3])
def test_the_next_unit_is_gathered_ahead_whatever_its_size(buckets_of_block):
    """As the blocks of models from 30 to 70 billion parameters, whose largest bucket is 5e8."""
    uses = [
        Use(number, (number // buckets_of_block + 1) * buckets_of_block)
        for number in range(80 * buckets_of_block)
    ]
    sizes = [480_000_000] * len(uses)
    made = make_plan(uses, sizes, Limits())
    begun_at = [
        next(at for at, begun in enumerate(made.started) if begun > one) for one in range(len(uses))
    ]
    ahead = [at < one - one % buckets_of_block for one, at in enumerate(begun_at)]
    assert sum(ahead) == len(uses) - buckets_of_block


def test_what_backward_uses_first_is_kept():
    forward, backward = in_turn(0, 1, 2, 3), in_turn(3, 2, 1, 0)
    limits = Limits(prefetch_numel=10, live_numel=30, reuse_numel=1000)
    sizes = [10] * 4
    made = make_plan(forward, sizes, limits, following=backward)
    assert made.kept_at_end == {2, 3}
    after = make_plan(backward, sizes, limits, held=made.kept_at_end)
    assert after.gathers == (1, 0)
    assert after.kept_at_end == frozenset()


def test_a_large_plan_is_made_soon():
    """A thousand uses, forward and back, with room to keep half of them."""
    sizes = [7] * 1000
    forward, backward = in_turn(*range(1000)), in_turn(*reversed(range(1000)))
    start = time.process_time()
    make_plan(forward, sizes, Limits(live_numel=3500, prefetch_numel=70), following=backward)
    assert time.process_time() - start < 3
