"""`comet`: an experiment of Comet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadal.config.monitors import Comet
from hadal.plugins.monitor.packages import imported
from hadal.plugins.monitor.record import ScalarRecord


class ThinnedEvents:
    """Decides which values of an event are sent: the first, then one per interval of samples."""

    def __init__(self, samples_log_interval: int) -> None:
        self._interval = samples_log_interval
        self._last: dict[str, int] = {}

    def needs_logging(self, name: str, samples: int) -> bool:
        """Return True if the value of `name` at `samples` is to be sent; then it counts as sent."""
        last = self._last.get(name)
        if last is not None and samples - last < self._interval:
            return False
        self._last[name] = samples
        return True


class CometWriter:
    """Logs to an experiment, with the samples as its step."""

    section = "comet"

    def __init__(self, config: Comet, run: Mapping[str, Any]) -> None:
        """Start or continue an experiment; the run's description is among its other values.

        Raises:
            MissingPackageError: comet_ml is not installed.
        """
        comet = imported(self.section)
        self.experiment: Any = comet.start(
            api_key=config.api_key,
            workspace=config.workspace,
            project_name=config.project,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
        if config.experiment_name is not None:
            self.experiment.set_name(config.experiment_name)
        if run:
            self.experiment.log_asset_data(dict(run), name="run.json")
        self.samples_log_interval = config.samples_log_interval
        self._thinned = ThinnedEvents(config.samples_log_interval)

    def write(self, record: ScalarRecord) -> None:
        """Log the values that are due."""
        due = {
            name: value
            for name, value in record.values.items()
            if self._thinned.needs_logging(name, record.samples)
        }
        if due:
            self.experiment.log_metrics(due, step=record.samples)

    def flush(self) -> None:
        """Do nothing: Comet's own thread sends."""

    def close(self) -> None:
        """End the experiment: send the remaining values, or write them to the disk."""
        self.experiment.end()
