"""Captures the library's log while a test runs on a rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def is_of_this_machine(record: logging.LogRecord) -> bool:
    """Return True for a warning that only some processors get."""
    return "emulates them" in record.msg


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect the library's messages of at least this level."""
    messages: list[str] = []

    class _Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not is_of_this_machine(record):
                messages.append(record.getMessage())

    log, collector = logging.getLogger("hadal"), _Collector(level)
    log.addHandler(collector)
    try:
        yield messages
    finally:
        log.removeHandler(collector)
