"""Fixtures of all tests: ranks; options that select tests; limits of tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest
from hypothesis import settings

# Helper modules of the tests (`ranks`, `contracts`) are imported by these names, here and in
# the ranks' processes, in any import mode of pytest.
sys.path.insert(0, str(Path(__file__).parent))

import costs
from cases import is_in_part, mark_slow_cells
from ranks import RankPool, RankPools

# Tests start many processes that import the same modules: each is compiled once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Several workers share the cores: a second thread would mostly spin, waiting for its turn.
os.environ["OMP_NUM_THREADS"] = "1"

# A script's background job ignores interrupts, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine may be busy: how long an example takes says nothing about what it shows.
settings.register_profile("house", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=10)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run every cell of the equivalence matrix, not only its pairwise cover",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="run what needs no other processes, and the equivalence matrix on two ranks",
    )
    parser.addoption("--part", help="run one part of the tests: 1/3, 2/3, 3/3 together run all")


# Folders where tests start programs, and those of the whole repository.
_WITH_PROGRAMS = {"cli", "compat", "launcher", "npu", "tests"}
_OF_RANKS = {"ranks", "fresh_ranks", "npus", "sharing_npus", "gpus"}
_STARTING = {"subprocess", "forks", "ranks"}
# Packages whose import alone takes seconds.
_LARGE = ("transformers", "torch.distributed.checkpoint", "comet_ml")


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples of each property in a quick run."""
    if config.getoption("--quick"):
        settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out of a quick run what takes long to import: folders of programs, large packages.

    Returns:
        True to leave a path out; None to leave the decision to pytest.
    """
    if not config.getoption("--quick"):
        return None
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        text = collection_path.read_text()
        return True if any(name in text for name in _LARGE) else None
    return True if collection_path.name in _WITH_PROGRAMS - {"tests"} else None


def _is_quick(item: pytest.Item) -> bool:
    # Importing the compiler alone takes each process seconds.
    if "compile" in item.name or "flex" in item.name:
        return False
    if _OF_RANKS.isdisjoint(getattr(item, "fixturenames", ())):
        return item.path.parent.name not in _WITH_PROGRAMS and not _takes_long(item)
    return item.path.name == "test_equivalence.py" and "-w2-" in item.name


def _takes_long(item: pytest.Item) -> bool:
    """Return True if a test or one of its fixtures starts processes or imports a large package, as
    far as its own file shows."""
    assert isinstance(item, pytest.Function)
    fixtures = [one[-1].func for one in item._fixtureinfo.name2fixturedefs.values()]
    waiting, seen = [item.function, *fixtures], set()
    while waiting:
        code, names = waiting.pop().__code__, vars(item.module)
        inner = [code, *(each for each in code.co_consts if isinstance(each, CodeType))]
        if any(name in each.co_consts for each in inner for name in ("peft", *_LARGE)):
            return True
        for name in {name for each in inner for name in each.co_names} - seen:
            seen.add(name)
            found = names.get(name)
            is_module = isinstance(found, ModuleType)
            if (found.__name__ if is_module else getattr(found, "__module__", "")) in _STARTING:
                return True
            if isinstance(found, FunctionType) and found.__module__ == item.module.__name__:
                waiting.append(found)
    return False


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow_cells(items, are_all_there="::" not in "".join(config.args))
    if config.getoption("--quick"):
        _keep(items, _is_quick, config)
    if part := config.getoption("--part"):
        _keep(items, lambda item: is_in_part(item.nodeid, part), config)


def _keep(
    items: list[pytest.Item], condition: Callable[[pytest.Item], bool], config: pytest.Config
) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not condition(item)])
    items[:] = filter(condition, items)


_frozen_modules = 0


def _freeze() -> None:
    """Make collections of garbage pass over what lives to the end: collected tests and modules."""
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


def pytest_collection_finish() -> None:
    _freeze()


_SPENT = "processor seconds"
_BEFORE = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEFORE] = costs.seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that makes `make test` long for everybody."""
    report = yield
    if report.when == "call":
        spent = costs.seconds() - item.stash[_BEFORE]
        report.user_properties.append((_SPENT, spent))
        if spent > costs.LIMIT_S and report.passed and not item.get_closest_marker("slow"):
            report.outcome = "failed"
            report.longrepr = costs.COMPLAINT.format(spent, costs.LIMIT_S)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    spent = {
        report.nodeid: dict(report.user_properties).get(_SPENT, 0.0)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
    }
    for line in costs.summary(spent):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _by_itself() -> Iterator[None]:
    """No test hangs on those before it: it draws the same numbers, and finds no process group."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if len(sys.modules) >= _frozen_modules + 50:
        _freeze()
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


@pytest.fixture(scope="session")
def gpus() -> Iterator[RankPools]:
    """`gpus(world_size).run(function, *args)`: as `ranks`, all on the first GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    pools = RankPools("cuda:staged")
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
