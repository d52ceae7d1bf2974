"""The dynamic loss scale, compared with recorded runs of DeepSpeed 0.19."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hadal.errors import HadalError, LossScaleError
from hadal.optim.norm import ScaleRule, first_scale, next_scale


def trace(rule: ScaleRule, letters: str) -> tuple[list[float], list[int]]:
    """Return scale and tolerance after each update; O is an overflow, a dot a clean update."""
    state = first_scale(rule)
    scales, spares = [], []
    for number, letter in enumerate(letters.replace(" ", "")):
        assert state.iteration == number
        state = next_scale(state, letter == "O", rule)
        scales.append(state.scale)
        spares.append(state.spare)
    return scales, spares


def dynamic(initial: float, window: int, hysteresis: int, minimum: float, **more) -> ScaleRule:
    return ScaleRule(initial, True, window, minimum, hysteresis, **more)


def test_hysteresis_does_not_refill_after_a_halving():
    scales, spares = trace(dynamic(1024, 3, 2, 1), "OO..OO.....O....")
    assert scales == [
        *(1024, 512, 512, 512, 256, 128, 128, 128, 128),
        *(256, 256, 256, 256, 256, 256, 512),
    ]
    assert spares == [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 2]


def test_consecutive_hysteresis_refills_at_every_clean_update():
    rule = dynamic(1024, 3, 2, 1, consecutive_hysteresis=True)
    scales, spares = trace(rule, "O.OO.O..")
    assert scales == [1024, 1024, 1024, 512, 512, 512, 512, 512]
    assert spares == [1, 2, 1, 1, 2, 1, 2, 2]


@pytest.mark.parametrize(
    ("rule", "scales"), [(dynamic(4, 3, 1, 1), [2, 1]), (dynamic(8, 3, 1, 3), [4, 3])]
)
def test_an_overflow_at_the_floor_is_an_error(rule, scales):
    assert trace(rule, "OO")[0] == scales
    with pytest.raises(
        LossScaleError, match=f"floor of the loss scale .{scales[-1]}, update 2"
    ) as e:
        trace(rule, "OOO")
    assert isinstance(e.value, HadalError)
    assert isinstance(e.value, ArithmeticError)


@pytest.mark.parametrize(
    ("rule", "letters", "scales"),
    [
        (dynamic(4, 2, 2, 1), "........", [4, 4, 8, 8, 16, 16, 32, 32]),
        (dynamic(4, 1, 1, 1), ".....O...", [4, 8, 16, 32, 64, 32, 32, 64, 128]),
    ],
)
def test_the_first_doubling_needs_one_clean_update_more(rule, letters, scales):
    assert trace(rule, letters)[0] == scales


def test_without_zero_every_overflow_halves_and_the_floor_holds():
    rule = dynamic(1024, 3, 1, 256, ends_at_floor=False)
    assert trace(rule, "OO..OO.....O")[0] == [
        *(512, 256, 256, 256, 256, 256, 256, 256, 256, 512, 512, 256),
    ]


def test_a_ceiling_is_not_passed():
    assert trace(dynamic(4, 1, 1, 1, maximum=20), ".....")[0] == [4, 8, 16, 20, 20]


def test_the_error_at_the_floor_names_the_remedy():
    with pytest.raises(LossScaleError, match="train in bf16, lower the learning rate"):
        trace(dynamic(1, 3, 1, 1), "O")


def test_a_hysteresis_of_zero_never_halves():
    scales, _ = trace(dynamic(64, 3, 0, 1), "OOOOOOOO")
    assert scales == [64] * 8


@given(st.text("O.", max_size=40), st.floats(1, 1e6))
def test_a_static_scale_never_changes(letters, scale):
    rule = ScaleRule(scale, minimum=scale)
    state = first_scale(rule)
    for letter in letters:
        assert next_scale(state, letter == "O", rule) == state


@given(st.text("O.", max_size=60), st.integers(1, 4))
def test_without_zero_nothing_ends_training(letters, window):
    rule = dynamic(256, window, 1, 16, ends_at_floor=False, maximum=1024)
    state = first_scale(rule)
    for letter in letters:
        before = state
        state = next_scale(state, letter == "O", rule)
        expected = max(16, before.scale / 2) if letter == "O" else None
        assert state.scale == expected or letter == "."
        assert state.scale in (before.scale, expected, min(1024, before.scale * 2))
        assert (state.scale <= before.scale) or letter == "."


@given(
    st.text("O.", max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_the_scale_stays_a_power_of_two_above_its_floor(letters, window, hysteresis, consecutive):
    rule = dynamic(256, window, hysteresis, 1, consecutive_hysteresis=consecutive)
    state = first_scale(rule)
    for letter in letters:
        before = state
        try:
            state = next_scale(state, letter == "O", rule)
        except LossScaleError:
            assert before.scale == rule.minimum
            return
        assert state.scale >= rule.minimum
        assert state.scale / before.scale in ((0.5, 1) if letter == "O" else (1, 2))
        assert 1 <= state.spare <= hysteresis
