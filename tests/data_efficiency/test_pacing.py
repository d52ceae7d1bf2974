"""Schedules of a difficulty: DeepSpeed's values, and the state of a custom one."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hadal.errors import UsageError
from hadal.plugins.data_efficiency.pacing import Pacer, PaceRule, difficulty_at

LINEAR = PaceRule("fixed_linear", 8, 1024, total=1000, multiple=8)
VALUES = [
    (LINEAR, {1: 8, 10: 16, 100: 104, 500: 512, 777: 792, 1000: 1024, 1500: 1024}),
    (
        PaceRule("fixed_root", 8, 1024, total=1000, multiple=8, degree=2),
        {1: 40, 10: 104, 100: 328, 250: 512, 500: 720, 777: 896, 1000: 1024},
    ),
    (
        PaceRule("fixed_root", 1, 100, total=1000, degree=3),
        {1: 10, 125: 50, 500: 79, 1000: 100},
    ),
    # More than the last multiple: the maximum, which is none.
    (
        PaceRule("fixed_linear", 8, 1020, total=1000, multiple=8),
        {1: 8, 999: 1016, 1000: 1016, 1100: 1020},
    ),
    # Never 0, though 8 is rounded down to a multiple of 16.
    (
        PaceRule("fixed_linear", 8, 1024, total=1000, multiple=16),
        {1: 16, 10: 16, 100: 96},
    ),
    (
        PaceRule("fixed_discrete", 1, 3, levels=(1, 2, 3), ends=(5, 10)),
        {1: 1, 5: 1, 6: 2, 10: 2, 11: 3, 99: 3},
    ),
    # A level that reaches the maximum is the last one.
    (PaceRule("fixed_discrete", 1, 3, levels=(1, 3, 2), ends=(5, 10)), {5: 1, 6: 3, 11: 3}),
    (PaceRule("fixed_linear", 64, 64, total=10, multiple=48), {1: 64, 20: 64}),
]


@pytest.mark.parametrize(("rule", "values"), VALUES)
@pytest.mark.claims(
    "curriculum_learning.schedule_config.total_curriculum_step",
    "curriculum_learning.schedule_config.difficulty_step",
    "curriculum_learning.schedule_config.root_degree",
    "curriculum_learning.schedule_config.difficulty",
    "curriculum_learning.schedule_config.max_step",
)
def test_values_are_those_of_deepspeed(rule, values):
    assert {step: difficulty_at(rule, step) for step in values} == values
    pacer = Pacer(rule, "x")
    assert [pacer.at(step) for step in values] == list(values.values())


@given(
    first=st.integers(1, 500),
    more=st.integers(0, 500),
    total=st.integers(1, 300),
    multiple=st.integers(1, 64),
    degree=st.sampled_from([1.0, 2.0, 3.0, 0.5]),
)
def test_a_difficulty_rises_from_its_floor_to_its_maximum(first, more, total, multiple, degree):
    rule = PaceRule("fixed_root", first, first + more, total, multiple, degree)
    values = [difficulty_at(rule, step) for step in range(1, total + 2)]
    assert values == sorted(values)
    assert 0 < values[0] <= values[-1] <= rule.last
    assert all(value % multiple == 0 or value in (rule.first, rule.last) for value in values)


def test_a_custom_schedule_is_asked_until_it_reaches_the_maximum():
    asked = []
    pacer = Pacer(PaceRule("custom", 8, 24), "x.y")
    pacer.set_custom(lambda step: asked.append(step) or 8 * step)
    assert [pacer.at(step) for step in range(1, 6)] == [8, 16, 24, 24, 24]
    assert asked == [1, 2, 3]


def test_a_custom_schedule_reports_its_fault():
    pacer = Pacer(PaceRule("custom", 8, 24), "x.y")
    with pytest.raises(UsageError, match=r"x\.y\.schedule_type .* call hadal.*set_custom"):
        pacer.at(1)
    with pytest.raises(UsageError, match=r"expected a function of the step for x\.y, got dict"):
        pacer.set_custom({})
    pacer.set_custom(lambda step: 0.5 * step)
    with pytest.raises(UsageError, match=r"x\.y: .* returned 1.5 for step 3; expected an integer"):
        pacer.at(3)
    lengths = Pacer(PaceRule("custom", 8, 24), "x.y", least=1)
    lengths.set_custom(lambda step: 0)
    with pytest.raises(UsageError, match=r"x\.y: .* returned 0 for step 3; expected 1 or more"):
        lengths.at(3)
    with pytest.raises(UsageError, match=r'schedule_type is "fixed_linear"; set it to "custom"'):
        Pacer(LINEAR, "x").set_custom(lambda step: step)
