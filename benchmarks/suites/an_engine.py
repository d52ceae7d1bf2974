"""A plugin of pytest: dlrover's test of its checkpointer meets an engine instead of its mock."""

from __future__ import annotations

from typing import Any

import deepspeed


def engine(model: Any, optimizer: Any) -> Any:
    """Return an engine of one rank."""
    config = {"train_batch_size": 1, "checkpoint": {"deepspeed_files": True}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put the engine into the place of the mock."""
    for test in items:
        test.module.MockDeepSpeedEngine = engine
