"""`deepspeed.utils.timer`: named timers that synchronize with the device at both ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from hadal.compat.log import log_dist, logger
from hadal.device import current_device, memory_use, synchronize
from hadal.listener import Listener, Update


def _now() -> float:
    """Return seconds, once the device has finished its queued work."""
    synchronize(current_device())
    return time.perf_counter()


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`."""

    class Timer:
        """A timer that is started and stopped, in milliseconds."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self._records: list[float] = []
            self._milliseconds = 0.0
            self._began = 0.0

        def start(self) -> None:
            """Start the timer."""
            self.started_ = True
            self._began = _now()

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Stop the timer; `reset` discards earlier time, `record` includes it in `mean`."""
            spent = 1000.0 * (_now() - self._began)
            if record:
                self._records.append(spent)
            self._milliseconds = spent if reset else self._milliseconds + spent
            self.started_ = False

        def add(self, milliseconds: float) -> None:
            """Add a time that another timer measured."""
            self._milliseconds += milliseconds
            self._records.append(milliseconds)

        def reset(self) -> None:
            """Discard everything."""
            self.started_ = False
            self._records.clear()
            self._milliseconds = 0.0

        def elapsed(self, reset: bool = True) -> float:
            """Return the measured time; a running timer continues."""
            was_started = self.started_
            if was_started:
                self.stop()
            measured = self._milliseconds
            if reset:
                self._milliseconds = 0.0
            if was_started:
                self.start()
            return measured

        def mean(self) -> float:
            """Return the trimmed mean of the recorded times, without a tenth at each end."""
            return trim_mean(self._records, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        """Return the timer of this name, a new one if there is none."""
        return self.timers.setdefault(name, self.Timer(name))

    def has_timer(self, name: str) -> bool:
        """Return whether there is a timer of this name."""
        return name in self.timers

    def get_timers(self) -> dict[str, Timer]:
        """Return all timers."""
        return self.timers

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """Return the mean of each existing timer, divided by `normalizer`."""
        known = [name for name in names if name in self.timers]
        means = {name: self.timers[name].mean() / normalizer for name in known}
        if reset:
            for name in known:
                self.timers[name].reset()
        return means

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool | None = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the times of those of `names` that exist."""
        known = [name for name in names if name in self.timers]
        texts = (f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in known)
        log_dist(f"time (ms) | {' | '.join(texts)}", ranks)


class ThroughputTimer:
    """Samples per second over an engine's updates, or between a program's starts and stops.

    Args:
        config: its `enabled` and `synchronized` are obeyed; None never waits for the device.
        batch_size: samples of an update on all ranks.
        start_step: updates left out of the rate.
        steps_per_output: updates from one report to the next; None reports nothing.
        monitor_memory: whether a report ends with the memory in use.
        logging_fn: called with a report; by default it is logged.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int | None = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = logging_fn or logger.info
        self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._samples = 0
        self._began = 0.0

    def start(self) -> None:
        """Begin a micro-step, or a whole update."""
        self.started = getattr(self.config, "enabled", True)
        self._began = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End it; `global_step` says that it ends an update."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        is_timed = self.global_step_count >= self.start_step
        if is_timed:
            self.total_elapsed_time += self._now() - self._began
        if global_step:
            self.global_step_count += 1
            self._samples += self.batch_size if is_timed else 0
            every = self.steps_per_output
            if report_speed and every and self.global_step_count % every == 0:
                used = f", {memory_use(current_device())}" if self.monitor_memory else ""
                rate = f"{self.avg_samples_per_sec():.2f} samples/s"
                self.logging(
                    f"epoch={self.epoch_count}/step={self.global_step_count}, {rate}{used}"
                )

    def _now(self) -> float:
        return _now() if getattr(self.config, "synchronized", False) else time.perf_counter()

    def avg_samples_per_sec(self) -> float:
        """Return the rate so far; -1 during the first updates."""
        return self._samples / self.total_elapsed_time if self._samples else -1.0

    def update_epoch_count(self) -> None:
        """Begin another epoch, whose micro-steps count from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0


# The names of an update's phases, for programs and in the log.
_TIMED = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_inner": "backward_inner",
    "bwd_allreduce": "backward_allreduce",
    "step": "step",
}


class PhaseTimers(Listener):
    """Adds the times of each update to named timers, once the device has finished it."""

    def __init__(self, timers: SynchronizedWallClockTimer) -> None:
        self._timers = timers
        self._unread: deque[Update] = deque()

    def after_update(self, update: Update) -> None:
        """Add the times that are known by now."""
        self._unread.append(update)
        while self._unread and self._unread[0].is_known:
            times = self._unread.popleft().times
            for name, phase in _TIMED.items():
                self._timers(name).add(times[phase])


class NoopTimer:
    """Timers that measure nothing, with the methods of those that do."""

    class Timer:
        """A timer that measures nothing."""

        def start(self) -> None:
            """Do nothing."""

        def reset(self) -> None:
            """Do nothing."""

        def stop(self, **kwargs: object) -> None:
            """Do nothing."""

        def elapsed(self, **kwargs: object) -> float:
            """Return 0.0."""
            return 0.0

        def mean(self) -> float:
            """Return 0.0."""
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        """Return the one timer."""
        return self.timer

    def get_timers(self) -> dict[str, NoopTimer.Timer]:
        """Return no timers."""
        return {}

    def log(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    def get_mean(self, *args: object, **kwargs: object) -> dict[str, float]:
        """Do nothing."""
        return {}


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean without this fraction of the values at each end; 0 if there are none."""
    cut = int(trim_percent * len(data))
    kept = sorted(data)[cut : len(data) - cut]
    return fmean(kept) if kept else 0.0
