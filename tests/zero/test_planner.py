"""Which gathered weights stay until backward."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hadal.zero.planner import kept_until_backward
from hadal.zero.policy import Limits

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
    """What is dropped would break a limit, next to what is used sooner and kept."""
    kept = kept_until_backward(numels, limits)
    for index, keep in enumerate(kept):
        behind = zip(numels[index + 1 :], kept[index + 1 :], strict=True)
        sooner = sum(numel for numel, stays in behind if stays)
        is_near = 2 * sum(numels[index + 1 :]) <= limits.reuse_numel
        assert keep == (is_near and sooner + numels[index] <= limits.live_numel)


def test_examples():
    def kept(live, reuse):
        return kept_until_backward([10, 10, 10, 10], Limits(live_numel=live, reuse_numel=reuse))

    assert kept(40, 60) == (True, True, True, True)
    assert kept(40, 59) == (False, True, True, True)
    assert kept(20, 60) == (False, False, True, True)
    assert kept(40, 0) == (False, False, False, True)
    assert kept(0, 60) == (False, False, False, False)
    assert kept_until_backward([], Limits()) == ()
