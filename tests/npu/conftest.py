"""Ranks on the test device; skipped where it cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import costs
import pytest
import torch
from ranks import RankPools

from npu import build


@pytest.fixture(scope="session")
def npus() -> Iterator[RankPools]:
    """`npus(world_size).run(function, *args)`: as `ranks`, on the test device."""
    if build.lacking():
        pytest.skip(build.lacking())
    try:
        with costs.aside():  # once on a machine
            build.built()
    except RuntimeError as error:
        if torch.__version__.startswith(build.WRITTEN_FOR):
            raise
        pytest.skip(f"torch {torch.__version__}: {error}")
    pools = RankPools("npu")
    yield pools
    pools.close()
