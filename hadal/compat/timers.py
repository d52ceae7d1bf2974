"""`deepspeed.utils.timer`: named clocks that wait for the device at both ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import fmean

from hadal.compat.log import log_dist
from hadal.device import current_device, synchronize
from hadal.listener import Listener, Update

_WARM_UP = 2  # updates that are not counted into a rate


class Timer:
    """A clock that is started and stopped; times are milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._records: list[float] = []
        self._milliseconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        """Let it run."""
        self.started_ = True
        self._began = _now()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop it; `reset` forgets what was before, `record` counts what was measured in `mean`."""
        spent = 1000.0 * (_now() - self._began)
        if record:
            self._records.append(spent)
        self._milliseconds = spent if reset else self._milliseconds + spent
        self.started_ = False

    def add(self, milliseconds: float) -> None:
        """Count what another clock has measured."""
        self._milliseconds += milliseconds
        self._records.append(milliseconds)

    def reset(self) -> None:
        """Forget everything."""
        self.started_ = False
        self._records.clear()
        self._milliseconds = 0.0

    def elapsed(self, reset: bool = True) -> float:
        """What it has measured; it goes on if it was running."""
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
        """The mean of what was recorded, without the outer tenth at both ends."""
        return trim_mean(self._records, 0.1)


def _now() -> float:
    """Seconds, when the device has finished its work so far."""
    synchronize(current_device())
    return time.perf_counter()


class SynchronizedWallClockTimer:
    """Clocks by name: `timers("forward").start()`."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The clock of this name, a new one where there is none."""
        return self.timers.setdefault(name, Timer(name))

    def has_timer(self, name: str) -> bool:
        """Whether there is one of this name."""
        return name in self.timers

    def get_timers(self) -> dict[str, Timer]:
        """All of them."""
        return self.timers

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """The mean of each that there is, divided by `normalizer`."""
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
        """Log what those of `names` have measured that there are."""
        known = [name for name in names if name in self.timers]
        told = (f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in known)
        log_dist(f"time (ms) | {' | '.join(told)}", ranks)


class ThroughputTimer:
    """Samples per second over the updates of an engine, from the second one's end on."""

    def __init__(self) -> None:
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._samples = 0
        self._last = 0.0

    def end_update(self, samples: int) -> None:
        """An update with so many samples of all ranks is over."""
        now = time.perf_counter()
        self.global_step_count += 1
        if self.global_step_count > _WARM_UP:
            self._samples += samples
            self.total_elapsed_time += now - self._last
        self._last = now

    def avg_samples_per_sec(self) -> float:
        """The rate so far; -1 while the first updates warm up."""
        return self._samples / self.total_elapsed_time if self._samples else -1.0

    def update_epoch_count(self) -> None:
        """Nothing: an epoch's end changes no rate."""


class SilentMonitor:
    """Where scalars would go if monitors were built: a configuration that has one is refused."""

    enabled = False

    def write_events(self, event_list: Sequence[object], flush: bool = True) -> None:
        """Write nothing."""


# What programs call the phases of an update, and what the log does.
_TIMED = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_inner": "backward_inner",
    "bwd_allreduce": "backward_allreduce",
    "step": "step",
}


class PhaseTimers(Listener):
    """Adds the times of each update to clocks by name, once the device has finished it."""

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
    """Clocks that measure nothing, under the methods of those that do."""

    class Timer:
        """One of them."""

        def start(self) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def stop(self, **kwargs: object) -> None:
            """Nothing."""

        def elapsed(self, **kwargs: object) -> float:
            """Nothing: 0.0."""
            return 0.0

        def mean(self) -> float:
            """Nothing: 0.0."""
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        """The one clock."""
        return self.timer

    def get_timers(self) -> dict[str, NoopTimer.Timer]:
        """None."""
        return {}

    def log(self, *args: object, **kwargs: object) -> None:
        """Nothing."""

    def get_mean(self, *args: object, **kwargs: object) -> dict[str, float]:
        """Nothing."""
        return {}


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without so large a share of the values at each end; 0 of none."""
    cut = int(trim_percent * len(data))
    kept = sorted(data)[cut : len(data) - cut]
    return fmean(kept) if kept else 0.0
