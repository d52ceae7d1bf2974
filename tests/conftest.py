"""What every test may use: ranks, and the option that runs whole products of cases."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Helper modules beside the tests (`ranks`, `contracts`) are imported by these names, here and in
# the ranks' processes, whatever import mode pytest runs in.
sys.path.insert(0, str(Path(__file__).parent))

from ranks import RankPool, RankPools

# A script's background job ignores interrupts, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine may be busy: how long an example takes says nothing about what it shows.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run every cell of the equivalence matrix, not only its pairwise cover",
    )


@pytest.fixture(autouse=True)
def _by_itself() -> Iterator[None]:
    """No test hangs on those before it: it draws the same numbers, and finds no process group."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(world_size).run(function, *args)`: processes shared by all tests."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[[int], RankPool]]:
    """`fresh_ranks(world_size)`: processes of this test's own, for tests that break them."""
    started: list[RankPool] = []

    def fresh(world_size: int) -> RankPool:
        started.append(RankPool(world_size))
        return started[-1]

    yield fresh
    for pool in started:
        pool.close()
