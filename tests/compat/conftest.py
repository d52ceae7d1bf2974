"""Fixtures of the tests in this folder."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import RankPool

# Helper modules of this directory are imported by name, in the ranks' processes too.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def clients() -> Iterator[RankPool]:
    """Two processes in which programs written for DeepSpeed run: `clients.run(function, *args)`."""
    pool = RankPool(2)
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what runs a library that is not installed."""
    for item in items:
        for mark in item.iter_markers("runs"):
            missing = [name for name in mark.args if importlib.util.find_spec(name) is None]
            if missing:
                reason = f"not installed: {', '.join(missing)}"
                item.add_marker(pytest.mark.skip(reason=reason))
