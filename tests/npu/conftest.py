"""Ranks on the test device; skipped where it cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import costs
import pytest
import torch
from ranks import RankPools

from npu import build


@pytest.fixture(scope="session")
def device() -> None:
    """The test device is compiled."""
    if build.lacking():
        pytest.skip(build.lacking())
    try:
        with costs.aside():  # once on a machine
            build.built()
    except RuntimeError as error:
        if torch.__version__.startswith(build.WRITTEN_FOR):
            raise
        pytest.skip(f"torch {torch.__version__}: {error}")


@pytest.fixture(scope="session")
def npus(device: None) -> Iterator[RankPools]:
    """`npus(world_size).run(function, *args)`: as `ranks`, on the test device."""
    pools = RankPools("npu:hccl")
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def sharing_npus(device: None) -> Iterator[RankPools]:
    """The same, where all ranks share one device (`staged.py`)."""
    pools = RankPools("npu:staged")
    yield pools
    pools.close()
