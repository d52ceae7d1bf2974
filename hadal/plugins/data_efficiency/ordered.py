"""Warns if no training loader follows the order that the configuration sets."""

from __future__ import annotations

import logging

from hadal.listener import Listener

_log = logging.getLogger(__name__)


class ExpectsLoader(Listener):
    """Warns once if training begins with only batches of other loaders.

    Args:
        path: the JSON path of the section that sets the order.
        tells: True on the rank that warns.
    """

    name = "data_efficiency.data_sampling"

    def __init__(self, path: str, *, tells: bool = True) -> None:
        self._path = path
        self._tells = tells
        self.is_made = False
        """True once a loader in this order was created."""

    def before_backward(self) -> None:
        """Warn if there is no such loader."""
        if self.is_made or not self._tells:
            return
        self._tells = False
        _log.warning(
            "%s is on, but this engine has created no training loader that follows it: it has no"
            " effect on batches of other loaders. Pass training_data to initialize, or create the"
            " loader with engine.deepspeed_io(dataset); if a program creates its own loader, as"
            " the Trainer of Hugging Face does, remove the section",
            self._path,
        )
