"""`deepspeed.utils.timer`: named timers that synchronize with the device at both ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import fmean

from hadal.compat.log import log_dist
from hadal.device import current_device, synchronize
from hadal.listener import Listener, Update

_WARM_UP = 2  # updates left out of the rate


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


def _now() -> float:
    """Return seconds, once the device has finished its queued work."""
    synchronize(current_device())
    return time.perf_counter()


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Return the timer of this name, a new one if there is none."""
        return self.timers.setdefault(name, Timer(name))

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
    """Samples per second over an engine's updates, from the end of the second one."""

    def __init__(self) -> None:
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._samples = 0
        self._last = 0.0

    def end_update(self, samples: int) -> None:
        """Record an update with this many samples over all ranks."""
        now = time.perf_counter()
        self.global_step_count += 1
        if self.global_step_count > _WARM_UP:
            self._samples += samples
            self.total_elapsed_time += now - self._last
        self._last = now

    def avg_samples_per_sec(self) -> float:
        """Return the rate so far; -1 during the first updates."""
        return self._samples / self.total_elapsed_time if self._samples else -1.0

    def update_epoch_count(self) -> None:
        """Do nothing: the end of an epoch does not change the rate."""


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
