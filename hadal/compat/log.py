"""The logger that programs set the level of, and speak through."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from hadal.comm import get_rank

logger = logging.getLogger("DeepSpeed")


def _open() -> None:
    """Let it speak on the standard output, from warnings on, as programs expect of it."""
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stdout))
        logger.propagate = False
        logger.setLevel(logging.WARNING)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks alone: rank 0 by default, all where -1 is among them."""
    wanted = [0] if ranks is None else ranks
    if -1 in wanted or get_rank() in wanted:
        logger.log(level, "[Rank %d] %s", get_rank(), message)


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Set a logger's level by its name, in letters of any size.

    Raises:
        ValueError: there is no such level.
    """
    (custom_logger or logger).setLevel(log_level_str.upper())


_open()
