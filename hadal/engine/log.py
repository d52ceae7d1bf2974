"""Log handlers, and the level of each rank."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from typing import TextIO

from hadal.config import Config

_NAME = "hadal"


class _ErrorsOnly(logging.Filter):
    """Filter that passes errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        return record.levelno >= logging.ERROR


class _IfAlone(logging.StreamHandler[TextIO]):
    """Handler to standard error, silent if the program has its own handlers, now or later."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record above the progress bars that the program shows, if any."""
        if logging.getLogger().handlers:
            return
        self.stream = sys.stderr  # a bar of rich replaces it while it is shown
        tqdm = sys.modules.get("tqdm.std")
        bars = tqdm.tqdm.external_write_mode(sys.stderr) if tqdm is not None else nullcontext()
        with bars:
            super().emit(record)


_errors_only = _ErrorsOnly()


def hush(rank: int) -> None:
    """Let ranks other than 0 log errors only, so that each message appears once.

    The filter is on every logger of the package, so that it holds for the program's own handlers
    too: a logger's filter does not see the records of its children.
    """
    if rank == 0:
        return
    names = [name for name in logging.root.manager.loggerDict if name.startswith(f"{_NAME}.")]
    for name in (_NAME, *names):
        logging.getLogger(name).addFilter(_errors_only)


def open_log(config: Config, rank: int) -> None:
    """Set the configured level; add a handler on rank 0 if the program has none."""
    log = logging.getLogger(_NAME)
    if config.log_level:
        log.setLevel(config.log_level.upper())
    asks = (
        config.log_level
        or config.steps_per_print
        or config.dump_state
        or config.activation_checkpointing.profile
        or config.activation_checkpointing.memory_budget
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or (config.comms_logger is not None and config.comms_logger.verbose)
        or (config.checkpoint.writer is not None and config.checkpoint.writer.show_statistics)
    )
    if not asks or rank != 0:
        return
    if log.level == logging.NOTSET and log.getEffectiveLevel() > logging.INFO:
        log.setLevel(logging.INFO)  # even if `logging.basicConfig()` has set a higher level
    if not log.handlers:
        log.addHandler(_IfAlone())
