"""Predictions hold for sequences with a rule, and are dropped for sequences without one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hadal.zero.paths import Predictor, describe_parting
from hadal.zero.planner import Kind, Trace, Use

# A path for each letter, forward and back.
FORWARDS = {x: Trace(tuple(Use(b, b + 1) for b in range(n))) for n, x in enumerate("ABCD", 1)}


def back(trace: Trace) -> Trace:
    return Trace(tuple(Use(b, at + 1) for at, b in enumerate(reversed(trace.path))))


def step(predictor: Predictor, kind: Kind, trace: Trace) -> bool | None:
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
            step(predictor, Kind.FORWARD, FORWARDS[letter]),
            step(predictor, Kind.BACKWARD, back(FORWARDS[letter])),
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
    predictor.came(Kind.FORWARD, None, has_held=False)
    assert predictor.expected(Kind.FORWARD) == FORWARDS["A"]
    assert predictor.expected(Kind.BACKWARD) is None
    predictor.forget(Kind.FORWARD)
    assert predictor.expected(Kind.FORWARD) is None


def test_kinds_do_not_mix() -> None:
    predictor = Predictor()
    play("AA", predictor)
    assert predictor.expected(Kind.EVALUATION) is None
    step(predictor, Kind.EVALUATION, FORWARDS["B"])
    assert play("A", predictor) == [(True, True)]
    assert predictor.expected(Kind.EVALUATION) == FORWARDS["B"]


def test_memory_is_bounded() -> None:
    predictor = Predictor()
    for number in range(200):
        trace = Trace(tuple(Use(b, b + 1) for b in range(number % 97)))
        predictor.came(Kind.FORWARD, trace, has_held=None)
    assert len(predictor._memories[Kind.FORWARD]) <= 50


def test_paths_that_do_not_part_are_told_to_end_together() -> None:
    told = describe_parting([(0, 1), (0, 1)], ["one", "other"], ["first", "second"])
    assert told == "after second, one reached the end; other reached the end"
