"""`tensorboard`, `wandb` and `comet`: writers to services, through packages of theirs."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hadal.config.monitors import Comet, TensorBoard, Wandb
from hadal.errors import MissingPackageError
from hadal.plugins.monitor.record import ScalarRecord

# section -> (the module, the package that pip installs)
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "comet_ml"),
}


def imported(section: str, module: str = "") -> Any:
    """Return a module of the package that a section needs; by default the package's own.

    Raises:
        MissingPackageError: it cannot be imported.
    """
    name, installed = _PACKAGES[section]
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        raise MissingPackageError(
            f"{section}.enabled is true, but {name} cannot be imported ({error}). Install it with"
            f" `pip install {installed}`, or set {section}.enabled to false"
        ) from error


def expect_package(section: str) -> None:
    """Import the package that a section needs, if it needs one.

    Raises:
        MissingPackageError: it cannot be imported.
    """
    if section in _PACKAGES:
        imported(section)


# TensorBoard's own thread writes and flushes the file at this interval; calls would block if its
# queue were full.
_FLUSH_S = 1
_QUEUE = 1024


class TensorBoardWriter:
    """Writes an event file: one scalar for each name, with the samples as its step."""

    section = "tensorboard"

    def __init__(self, config: TensorBoard, run: Mapping[str, Any]) -> None:
        """Create the directory and the event file; its text "run" describes the run.

        Raises:
            MissingPackageError: tensorboard is not installed.
            OSError: the file cannot be written.
        """
        imported(self.section)
        from torch.utils.tensorboard import SummaryWriter

        summary = imported(self.section, "tensorboard.compat.proto.summary_pb2")
        self._summary = summary.Summary
        folder = Path(config.output_path) / config.job_name
        self.summary_writer: Any = SummaryWriter(str(folder), max_queue=_QUEUE, flush_secs=_FLUSH_S)
        if run:
            told = json.dumps(run, indent=1, default=str)
            self.summary_writer.add_text("run", f"```json\n{told}\n```")

    def write(self, record: ScalarRecord) -> None:
        """Add one event with all values."""
        value = self._summary.Value
        found = record.values.items()
        summary = self._summary(value=[value(tag=tag, simple_value=one) for tag, one in found])
        self.summary_writer.file_writer.add_summary(summary, record.samples, record.time)

    def flush(self) -> None:
        """Flush the events that TensorBoard's thread has not written."""
        self.summary_writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self.summary_writer.close()


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
