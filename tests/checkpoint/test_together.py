"""The message that ranks raise together about their faults."""

from __future__ import annotations

import pytest

from hadal.checkpoint.together import listed


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (["full"], "rank 0: full"),
        ([None, "full"], "rank 1: full"),
        (["full", "full"], "every rank: full"),
        (["full", None, "full"], "ranks 0, 2: full"),
        (["full", "gone", "full"], "ranks 0, 2: full; rank 1: gone"),
        ([None] + ["full"] * 7, "ranks 1, 2, 3, 4 and 3 more: full"),
        (list("abcdef"), "rank 0: a; rank 1: b; rank 2: c; rank 3: d; and 2 more faults"),
    ],
)
def test_equal_faults_are_reported_once(faults: list[str | None], told: str) -> None:
    assert listed(faults) == told
