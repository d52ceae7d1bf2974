"""The table of monitors, which section opens which writer, and the run that they describe.

The writers to services (`tensorboard`, `wandb` and `comet`) use packages of theirs.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hadal import __version__
from hadal.config import Config
from hadal.config.monitors import Comet, TensorBoard, Wandb
from hadal.device import current_device, total_memory
from hadal.device.inventory import built_with, devices
from hadal.errors import MonitorError, needed
from hadal.plugins.monitor.files import CsvWriter, JsonlWriter
from hadal.plugins.monitor.monitor import Writer
from hadal.plugins.monitor.record import ScalarRecord

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""The package that a section needs."""


def imported(section: str, module: str = "") -> Any:
    """Return a module of the package that a section needs; by default the package's own.

    Raises:
        MissingPackageError: it cannot be imported.
    """
    user, instead = f"{section}.enabled is true, which", f"set {section}.enabled to false"
    return needed(module or _PACKAGES[section], user, instead=instead)


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


FORMAT = 1
# Their versions are part of the description if the program has imported them.
_LIBRARIES = ("transformers", "accelerate", "lightning", "trl", "peft", "diffusers", "datasets")


def describe_run(
    config: Config, model: nn.Module, ranks: dict[str, int], hosts: Sequence[str]
) -> dict[str, Any]:
    """Return the description as plain JSON values, without secrets.

    Args:
        config: the effective configuration.
        model: the trained model, or this rank's part of it.
        ranks: the number of ranks, and of each kind of parallelism.
        hosts: each rank's host.
    """
    origins = {path: origin for path, origin in config.origins.items() if origin != "default"}
    return {
        "format": FORMAT,
        "time": time.time(),
        "world_size": ranks["world"],
        "ranks": ranks,
        "hosts": Counter(hosts),
        "command": shlex.join(sys.orig_argv),
        "directory": os.getcwd(),
        "commit": _commit(),
        "model": _model(model),
        "versions": {
            "hadal": __version__,
            "torch": str(torch.__version__),
            "built_for": built_with(),
            "python": platform.python_version(),
            **{
                name: str(getattr(sys.modules[name], "__version__", "of unknown version"))
                for name in _LIBRARIES
                if name in sys.modules
            },
        },
        "machine": _machine(),
        "config": config.as_public_dict(),
        "origins": origins,
    }


def _commit() -> str | None:
    """Return the commit of the program's repository, with `-dirty` if files have changed since.

    None if the program is in none, or git is missing or takes too long.
    """
    program = Path(sys.argv[0]) if sys.argv else Path()
    folder = program.parent if program.is_file() else Path()
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        run = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


def _model(model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__,
        "tensors": len(parameters),
        "parameters": sum(one.numel() for one in parameters),
        "trained": sum(one.numel() for one in parameters if one.requires_grad),
    }


def _machine() -> dict[str, Any]:
    device = current_device()
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "device": device.type,
        "device_memory": total_memory(device).total,
        "devices": devices(),
    }


WRITERS: Mapping[str, Callable[[Any, Mapping[str, Any]], Writer]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "csv_monitor": CsvWriter,
    "comet": CometWriter,
    "jsonl_monitor": JsonlWriter,
}
"""Factories by section, in order of writing. Each takes the section and a description of the run,
which may be empty."""


def sections_on(config: Config) -> tuple[str, ...]:
    """Return the monitors that a configuration enables.

    Return none while the autotuner measures: scalars of experiments would mix with training's.
    """
    if config.autotuning.enabled:
        return ()
    return tuple(name for name in WRITERS if getattr(config, name).enabled)


def expect_packages(config: Config) -> None:
    """Import the packages that the monitors of a configuration need.

    Raises:
        MissingPackageError: one cannot be imported.
    """
    for name in sections_on(config):
        expect_package(name)


def open_writers(config: Config, run: Mapping[str, Any]) -> tuple[Writer, ...]:
    """Open the monitors of a configuration; `run` is the description that they store.

    Raises:
        MonitorError: a directory cannot be written, or a service refuses.
    """
    return tuple(_opened(name, getattr(config, name), run) for name in sections_on(config))


def _opened(name: str, section: Any, run: Mapping[str, Any]) -> Writer:
    try:
        return WRITERS[name](section, run)
    except MonitorError:
        raise
    except OSError as error:
        path = getattr(section, "output_path", None)
        if path is None:
            raise MonitorError(f"{name} cannot be started: {error}") from error
        raise MonitorError(
            f"{name} cannot write: {error}; set {name}.output_path to a directory that rank 0"
            f" can write to (it is {path!r})"
        ) from error
    except Exception as error:  # any exception of a service's package
        raise MonitorError(
            f"{name} cannot be started: {type(error).__name__}: {error}; fix that, or set"
            f" {name}.enabled to false"
        ) from error
