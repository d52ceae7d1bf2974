"""`wandb`: a run of Weights & Biases."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hadal.config.monitors import Wandb
from hadal.plugins.monitor.packages import imported
from hadal.plugins.monitor.record import ScalarRecord

_log = logging.getLogger(__name__)


class WandbWriter:
    """Logs to a run, with the samples as its step.

    A run that the program has started is used and left open. If the service cannot be reached,
    the run is written to the disk (`wandb sync` sends it later).
    """

    section = "wandb"

    def __init__(self, config: Wandb, run: Mapping[str, Any]) -> None:
        """Start a run, or use the program's; the run's description becomes its configuration.

        Raises:
            MissingPackageError: wandb is not installed.
        """
        self._wandb = imported(self.section)
        self._is_own = self._wandb.run is None
        wishes: dict[str, Any] = {
            "project": config.project,
            "group": config.group,
            "entity": config.team,
            "config": {"hadal": dict(run)} if run else None,
            "resume": "allow",
        }
        try:
            self.run: Any = self._wandb.init(**wishes)
        except self._wandb.errors.AuthenticationError:
            raise
        except self._wandb.errors.CommError as error:
            _log.warning(
                "wandb: the service cannot be reached (%s); the run is written to the disk, and"
                " `wandb sync` sends it later",
                error,
            )
            self.run = self._wandb.init(**wishes, mode="offline")

    def write(self, record: ScalarRecord) -> None:
        """Log all values in one call."""
        self.log(record.values, record.samples)

    def log(
        self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        """Log values to the run, as `wandb.log`."""
        self.run.log(dict(data), step=step, commit=commit)

    def flush(self) -> None:
        """Do nothing: the service's own process writes."""

    def close(self) -> None:
        """Finish the run, unless the program has started it."""
        if self._is_own:
            self.run.finish()
