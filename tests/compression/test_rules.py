"""Bits over the updates, as DeepSpeed counts them."""

from __future__ import annotations

import pytest

from hadal.plugins.compression.layers import WeightRule


def rule(start=8, target=4, period=2, offset=0, change=None, in_forward=False) -> WeightRule:
    return WeightRule(start, target, period, offset, 1, True, False, in_forward, change)


@pytest.mark.parametrize(
    ("made", "bits"),
    [
        (rule(), [8, 8, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 5, 5, 5, 5, 4, 4]),
        (rule(period=0), [8, 7, 6, 5, 4, 4]),
        (rule(4, 1, 1), [4, 3, 2, 2, 1, 1]),
        (rule(1, 1, 0), [1, 1]),
        (rule(offset=2), [None, None, 8, 8, 7]),
        (rule(in_forward=True, offset=1), [None, 4, 4]),
    ],
)
def test_bits_fall_as_in_deepspeed(made, bits):
    found = [made.at(updates) for updates in range(len(bits))]
    assert [one and one.bits for one in found] == bits


def test_a_blend_begins_again_with_each_bit():
    made = rule(8, 7, 2, change=0.25)
    blends = [made.at(updates) for updates in range(7)]
    assert [(one.bits, one.full) for one in blends] == [
        *[(8, 1.0), (8, 0.75), (7, 1.0), (7, 0.75), (7, 0.5), (7, 0.25), (7, 0.0)]
    ]


@pytest.mark.parametrize("change", [None, 0.3, 0.001])
@pytest.mark.parametrize("in_forward", [False, True])
def test_nothing_changes_once_it_is_settled(change, in_forward):
    made = rule(6, 3, 3, offset=5, change=change, in_forward=in_forward)
    assert made.at(made.settled()) == made.at(made.settled() + 9999)
    assert made.at(made.settled()).bits == 3


def test_a_period_grows_by_its_slowdown_too():
    made = rule(8, 4, 2)
    # 7 bits at 2, and then the period is 4 * 2 = 8, 16 * 1 = 16, and 32.
    found = [made.at(updates, (2,)).bits for updates in range(40)]
    assert [found.index(bits) for bits in (7, 6, 5, 4)] == [2, 8, 16, 32]
    found = [made.at(updates, (1, 5)).bits for updates in range(90)]
    assert [found.index(bits) for bits in (7, 6, 5, 4)] == [2, 4, 40, 80]
    assert made.settled((1, 5)) == 80
    assert rule(4, 1, 0).at(3, (5, 5)).bits == 1
