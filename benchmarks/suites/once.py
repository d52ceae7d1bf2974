"""A plugin of pytest for DeepSpeed's tests: each once, with its first parameters; none hangs."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from contextlib import suppress
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

# A rank is forked from a process that has imported these already.
multiprocessing.set_forkserver_preload(["torch", "unit.simple_model", __name__])
os.environ["PYTHONPATH"] = os.pathsep.join((os.path.abspath("tests"), os.environ["PYTHONPATH"]))


def pytest_sessionstart(session: Any) -> None:
    """Compile DeepSpeed's operations before the time of a test begins; Hadal has none."""
    from deepspeed.accelerator import get_accelerator

    if hasattr(session.config, "workerinput"):
        return  # the process that starts the workers has done it
    for builder in ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"):
        operations = get_accelerator().create_op_builder(builder)
        if operations is not None:
            with suppress(NotImplementedError):
                operations.load()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the first of the tests that differ in parameters."""
    first = {test.nodeid.partition("[")[0]: test for test in reversed(items)}
    kept = [test for test in items if test in first.values()]
    config.hook.pytest_deselected(items=[test for test in items if test not in kept])
    items[:] = kept
    if "unit.common" in sys.modules:
        sys.modules["unit.common"].DistributedExec._close_pool = _end_ranks
        # It is called when ranks hang, and would end the other tests of the file.
        pytest.exit = lambda reason, returncode: pytest.fail(reason)


def _wait_for_compiler(self: FileBaton) -> None:
    """Wait for another process that compiles; a rank that was ended leaves its lock behind."""
    end = time.monotonic() + 10  # all is compiled before the first test
    while os.path.exists(self.lock_file_path) and time.monotonic() < end:
        time.sleep(0.1)
    with suppress(FileNotFoundError):
        os.remove(self.lock_file_path)


FileBaton.wait = _wait_for_compiler  # type: ignore[method-assign]


def _end_ranks(self: Any, pool: Any, num_procs: int, force: bool = False) -> None:
    """End a test's ranks; DeepSpeed's own function waits for ranks that hang."""
    if force or not self.reuse_dist_env:
        pool.terminate()
        pool.join()
