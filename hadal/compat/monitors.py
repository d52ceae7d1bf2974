"""`deepspeed.monitor`: the monitors with the names and methods of DeepSpeed's."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from hadal.comm import get_rank
from hadal.config import Config, load_config
from hadal.config.monitors import Comet, CsvMonitor, TensorBoard, Wandb
from hadal.plugins.monitor.monitor import Monitor as HouseMonitor, Writer
from hadal.plugins.monitor.opening import (
    WRITERS,
    ThinnedEvents,
    expect_package,
    open_writers,
    sections_on,
)
from hadal.plugins.monitor.record import GivenScalars, events_of

Event = tuple[str, float, int]
EventsLogScheduler = ThinnedEvents

_SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet")


class Monitor(ABC):
    """One monitor. Programs derive their own from it.

    Args:
        monitor_config: the monitor's section.
    """

    @abstractmethod
    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[Any]) -> None:
        """Write (name, value, samples) each."""


class _OneMonitor(Monitor):
    """A monitor and its writer, which exists on rank 0 if the section is on."""

    section: ClassVar[str]

    def __init__(self, monitor_config: Any) -> None:
        is_written = monitor_config.enabled and get_rank() == 0
        self._hold(
            monitor_config, WRITERS[self.section](monitor_config, {}) if is_written else None
        )

    @classmethod
    def over(cls, monitor_config: Any, writer: Writer) -> _OneMonitor:
        """Return the monitor of an open writer."""
        made = cls.__new__(cls)
        made._hold(monitor_config, writer)
        return made

    def _hold(self, monitor_config: Any, writer: Any) -> None:
        super().__init__(monitor_config)
        vars(self).update(monitor_config)  # its keys are attributes, such as `output_path`
        self._writer = writer

    def write_events(self, event_list: Iterable[Any], flush: bool = True) -> None:
        """Write (name, value, samples) each."""
        if self._writer is None:
            return
        for record in GivenScalars(events_of(event_list), time.time()).records():
            self._writer.write(record)
        if flush:
            self._writer.flush()


class TensorBoardMonitor(_OneMonitor):
    """Writes an event file for TensorBoard."""

    section = "tensorboard"

    def __init__(self, tensorboard_config: TensorBoard) -> None:
        super().__init__(tensorboard_config)

    @property
    def summary_writer(self) -> Any:
        """torch's `SummaryWriter`; None on ranks other than 0, or if the section is off."""
        return None if self._writer is None else self._writer.summary_writer

    def get_summary_writer(self) -> Any:
        """Return the `summary_writer`."""
        return self.summary_writer

    def flush(self) -> None:
        """Write the buffered events."""
        if self._writer is not None:
            self._writer.flush()


class WandbMonitor(_OneMonitor):
    """Logs to a run of Weights & Biases."""

    section = "wandb"

    def __init__(self, wandb_config: Wandb) -> None:
        super().__init__(wandb_config)

    def log(
        self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        """Log values to the run, as `wandb.log` does."""
        if self._writer is not None:
            self._writer.log(data, step, commit)


class csvMonitor(_OneMonitor):
    """Writes a CSV file for each name."""

    section = "csv_monitor"

    def __init__(self, csv_config: CsvMonitor) -> None:
        super().__init__(csv_config)

    log_dir = property(lambda self: None if self._writer is None else str(self._writer.folder))
    """The directory of the files; None on ranks other than 0, or if the section is off."""

    @property
    def filenames(self) -> list[str]:
        """The paths of the files written so far."""
        return [] if self._writer is None else [str(path) for path in self._writer.paths]

    def setup_log_dir(self) -> str | None:
        """Return the directory, which exists."""
        found: str | None = self.log_dir
        return found


class CometMonitor(_OneMonitor):
    """Logs to an experiment of Comet."""

    section = "comet"

    def __init__(self, comet_config: Comet) -> None:
        super().__init__(comet_config)

    experiment = property(lambda self: None if self._writer is None else self._writer.experiment)
    """Comet's experiment; None on ranks other than 0, or if the section is off."""


class DeepSpeedMonitorConfig:
    """The monitor sections of a configuration.

    Raises:
        ConfigError: they have faults; the message lists all of them.
    """

    def __init__(self, **sections: Any) -> None:
        # The batch size is unused, but a configuration requires one.
        self._hold(load_config({"train_batch_size": 1, **sections}, allow_unbuilt=True))

    @classmethod
    def of(cls, config: Config) -> DeepSpeedMonitorConfig:
        """Return the sections of a validated configuration."""
        made = cls.__new__(cls)
        made._hold(config)
        return made

    def _hold(self, config: Config) -> None:
        self.checked = config
        self.tensorboard, self.wandb = config.tensorboard, config.wandb
        self.csv_monitor, self.comet = config.csv_monitor, config.comet

    enabled = property(lambda self: bool(sections_on(self.checked)))
    """True if any monitor is on."""


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the monitor sections of a configuration.

    Raises:
        ConfigError: they have faults; the message lists all of them.
    """
    return DeepSpeedMonitorConfig(**{k: v for k, v in param_dict.items() if k in _SECTIONS})


class MonitorMaster(Monitor):
    """All monitors of a configuration. Rank 0 writes.

    Raises:
        MonitorError: a package is missing, a folder cannot be written, or a service refuses.
    """

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        house = HouseMonitor(enabled=monitor_config.enabled)
        if house.enabled and get_rank() == 0:
            house.open(open_writers(monitor_config.checked, {}))
        self._hold(monitor_config, house)

    @classmethod
    def of(cls, config: Config, house: HouseMonitor) -> MonitorMaster:
        """Return the monitors of an engine."""
        made = cls.__new__(cls)
        made._hold(DeepSpeedMonitorConfig.of(config), house)
        return made

    def _hold(self, monitor_config: DeepSpeedMonitorConfig, house: HouseMonitor) -> None:
        super().__init__(monitor_config)
        self._house = house
        self.enabled = house.enabled
        kinds = (TensorBoardMonitor, WandbMonitor, csvMonitor, CometMonitor)
        found: dict[str, Any] = {writer.section: writer for writer in house.writers}
        self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor = (
            kind.over(getattr(monitor_config, kind.section), found[kind.section])
            if kind.section in found
            else None
            for kind in kinds
        )

    def write_events(self, event_list: Iterable[Any], flush: bool = True) -> None:
        """Write (name, value, samples) each to every monitor."""
        self._house.write_events(event_list, flush)


def check_tb_availability() -> None:
    """Raise `MissingPackageError` if TensorBoard's package is missing."""
    expect_package("tensorboard")


def check_wandb_availability() -> None:
    """Raise `MissingPackageError` if the package of Weights & Biases is missing."""
    expect_package("wandb")


def check_comet_availability() -> None:
    """Raise `MissingPackageError` if Comet's package is missing."""
    expect_package("comet")
