"""The table of monitors: which section opens which writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hadal.config import Config
from hadal.errors import MonitorError
from hadal.plugins.monitor.comet import CometWriter
from hadal.plugins.monitor.csv_monitor import CsvWriter
from hadal.plugins.monitor.jsonl_monitor import JsonlWriter
from hadal.plugins.monitor.packages import expect_package
from hadal.plugins.monitor.tensorboard import TensorBoardWriter
from hadal.plugins.monitor.wandb import WandbWriter
from hadal.plugins.monitor.writer import Writer

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
