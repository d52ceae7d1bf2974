"""Who is heard in the log, and from which level."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from hadal.config import Config

_NAME = "hadal"


class _ErrorsOnly(logging.Filter):
    """Lets errors through."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record may pass."""
        return record.levelno >= logging.ERROR


class _IfAlone(logging.StreamHandler[TextIO]):
    """Writes to standard error unless the program has handlers of its own, now or later."""

    def __init__(self) -> None:
        super().__init__()
        self.setStream(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        if not logging.getLogger().handlers:
            super().emit(record)


_errors_only = _ErrorsOnly()


def hush(rank: int) -> None:
    """Let ranks but 0 be heard with errors only: what all of them see is told once.

    The filter stands on every logger of the house, so that it holds for handlers of the program's
    own too: a logger's filter is not asked about the records of those below it.
    """
    if rank == 0:
        return
    names = [name for name in logging.root.manager.loggerDict if name.startswith(f"{_NAME}.")]
    for name in (_NAME, *names):
        logging.getLogger(name).addFilter(_errors_only)


def open_log(config: Config, rank: int) -> None:
    """Set the level that was asked for; let rank 0 be heard where the program has no log."""
    log = logging.getLogger(_NAME)
    if config.log_level:
        log.setLevel(config.log_level.upper())
    asks = (
        config.log_level
        or config.steps_per_print
        or config.dump_state
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or (config.comms_logger is not None and config.comms_logger.verbose)
        or (config.checkpoint.writer is not None and config.checkpoint.writer.show_statistics)
    )
    if not asks or rank != 0:
        return
    if log.level == logging.NOTSET and log.getEffectiveLevel() > logging.INFO:
        log.setLevel(logging.INFO)  # also beside `logging.basicConfig()`, whose level is higher
    if not log.handlers:
        log.addHandler(_IfAlone())
