"""A training loader in the configuration's order must be made, or that order acts nowhere.

Tests: tests/data_efficiency/test_ordered.py
"""

from __future__ import annotations

import logging

from hadal.listener import Listener

_log = logging.getLogger(__name__)


class ExpectsLoader(Listener):
    """Warns once if training begins with batches of other loaders only.

    Args:
        path: the JSON path of the section that gives the order.
        tells: True on the rank that warns.
    """

    name = "data_efficiency.data_sampling"

    def __init__(self, path: str, *, tells: bool = True) -> None:
        self._path = path
        self._tells = tells
        self.is_made = False
        """True once a loader in this order was made."""

    def before_backward(self) -> None:
        """Warn if there is no such loader."""
        if self.is_made or not self._tells:
            return
        self._tells = False
        _log.warning(
            "%s is on, and this engine has made no training loader that follows it: it has no"
            " effect on batches of other loaders. Give training_data to initialize, or make the"
            " loader with engine.deepspeed_io(dataset); where a program makes its loader itself,"
            " as the Trainer of Hugging Face does, remove the section",
            self._path,
        )
