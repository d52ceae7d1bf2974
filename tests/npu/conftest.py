"""Ranks on the test device; skipped where it cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import RankPools

from npu import build


@pytest.fixture(scope="session")
def npus() -> Iterator[RankPools]:
    """`npus(world_size).run(function, *args)`: as `ranks`, on the test device."""
    if build.lacking():
        pytest.skip(build.lacking())
    build.built()
    pools = RankPools("npu")
    yield pools
    pools.close()
