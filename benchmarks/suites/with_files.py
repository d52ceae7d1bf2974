"""A plugin of pytest: the engines of tests also save DeepSpeed's files."""

from __future__ import annotations

from functools import wraps
from typing import Any

import deepspeed

initialize = deepspeed.initialize


@wraps(initialize)
def with_files(*args: Any, **named: Any) -> Any:
    """Add the key that a user adds to the configuration."""
    named["config_params"]["checkpoint"] = {"deepspeed_files": True}
    return initialize(*args, **named)


deepspeed.initialize = with_files
