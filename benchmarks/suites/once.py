"""A plugin of pytest: each test once, with its first parameters; files of many over ranks not."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from typing import Any

RANKED = 1

# A rank is forked from a process that has imported these already.
multiprocessing.set_forkserver_preload(["torch", "unit.simple_model"])
os.environ["PYTHONPATH"] = os.pathsep.join((os.path.abspath("tests"), os.environ["PYTHONPATH"]))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the first of the tests that differ in parameters, in files of few tests over ranks."""
    first = {test.nodeid.partition("[")[0]: test for test in reversed(items)}
    ranked = Counter(test.path for test in first.values() if hasattr(test.cls, "is_dist_test"))
    kept = [test for test in items if test in first.values() and ranked[test.path] <= RANKED]
    config.hook.pytest_deselected(items=[test for test in items if test not in kept])
    items[:] = kept
