"""Time and memory of each phase of an update, and samples per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hadal.device import MemoryUse, Stamp, memory_use, reset_peak_memory, synchronize
from hadal.listener import Forward, Listener, Update

PHASES = ("forward", "backward", "reduce", "step")
# The first updates also allocate memory and compile, so their times do not represent the others.
_WARM_UP_UPDATES = 2


class Stopwatch:
    """Timer of a phase by events on the device: nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starts: list[Stamp] = []
        self._stops: list[Stamp] = []

    def start(self) -> None:
        """Record the start of the phase on the device."""
        self._starts.append(Stamp(self._device))

    def stop(self) -> None:
        """Record the end of the phase on the device."""
        self._stops.append(Stamp(self._device))

    def take(self) -> list[tuple[Stamp, Stamp]]:
        """Return start and stop of each run since the last call."""
        spans = list(zip(self._starts, self._stops, strict=True))
        self._starts, self._stops = [], []
        return spans


class MemoryGauge:
    """Memory in use before and after the last run of a phase, and the device's peak in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before = self.after = MemoryUse(0, 0, 0)

    def start(self) -> None:
        """Reset the peak, and read the memory in use."""
        reset_peak_memory(self._device)
        self.before = memory_use(self._device)

    def stop(self) -> None:
        """Read the memory in use."""
        self.after = memory_use(self._device)


class Lap:
    """Phases of one update, as events on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.spans: dict[str, list[tuple[Stamp, Stamp]]] = {}
        """Spans by phase, once the update is over."""

    @property
    def is_reached(self) -> bool:
        """True if the device has reached all stamps."""
        return all(
            stamp.is_reached for each in self.spans.values() for span in each for stamp in span
        )

    def milliseconds(self) -> Mapping[str, float]:
        """Return milliseconds by event name. Waits for the device."""
        if not self.is_reached:
            synchronize(self._device)
        spent = {
            name: 1000.0 * sum(stop.seconds_since(start) for start, stop in each)
            for name, each in self.spans.items()
        }
        return {
            "forward": spent["forward"],
            "backward": spent["backward"],
            "backward_inner": spent["backward"] - spent["reduce"],
            "backward_allreduce": spent["reduce"],
            "step": spent["step"],
        }


class Reducing:
    """Context around reductions, which may nest. Outside a backward they count as one."""

    def __init__(self, watches: Mapping[str, Stopwatch], running: set[str]) -> None:
        self._watches = watches
        self._running = running
        self._begun: list[set[str]] = []

    def __enter__(self) -> None:
        begun = {"backward", "reduce"} - self._running
        self._begun.append(begun)
        self._running |= begun
        for name in begun:
            self._watches[name].start()

    def __exit__(self, *raised: object) -> None:
        begun = self._begun.pop()
        for name in begun & self._running:
            self._watches[name].stop()
        self._running -= begun


class Clocks(Listener):
    """Timer of an update's phases, which also reads memory around them.

    `forward`, `backward` (with its reductions), `reduce` (the part of backward in which this rank
    starts reductions and waits for them) and `step` (the update itself). Reductions outside any
    backward, because none was known to be the last, count as backward too.
    """

    def __init__(self, device: torch.device, *, times: bool, memory: bool) -> None:
        self._watches = {name: Stopwatch(device) for name in PHASES} if times else {}
        around = ("forward", "backward", "step")
        self.memory = {name: MemoryGauge(device) for name in around} if memory else {}
        self.measures = times or memory
        self._running: set[str] = set()
        self.reducing = Reducing(self._watches, self._running) if times else None
        """Context for reductions."""
        self.lap = Lap(device) if times else None
        """The update under way; None if nothing is timed."""
        self._device = device
        self._unread: deque[Lap] = deque()
        self._last: Mapping[str, float] = {}
        self._totals: dict[str, float] = {}
        self._updates = 0

    # ---- phases --------------------------------------------------------------------------------

    def before_forward(self, forward: Forward) -> None:
        """Start `forward`."""
        self._start("forward")

    def after_forward(self, output: Any) -> None:
        """Stop `forward`."""
        self._stop("forward")

    def before_backward(self) -> None:
        """Start `backward`."""
        self._start("backward")

    def after_backward(self, loss: Tensor | None) -> None:
        """Stop `backward`."""
        self._stop("backward")

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        """Start `step`."""
        self._start("step")

    def after_update(self, update: Update) -> None:
        """Stop `step`, and start the next update's times at zero."""
        self._stop("step")
        if self.lap is not None:
            self.lap.spans = {name: watch.take() for name, watch in self._watches.items()}
            self._unread.append(self.lap)
            self.lap = Lap(self._device)
            self._read()

    def on_error(self, error: BaseException) -> None:
        """Stop every running phase."""
        for name in tuple(self._running):
            self._stop(name)

    def _start(self, name: str) -> None:
        self._running.add(name)
        if name in self.memory:
            self.memory[name].start()
        if name in self._watches:
            self._watches[name].start()

    def _stop(self, name: str) -> None:
        if name in self._running:
            self._running.remove(name)
            if name in self._watches:
                self._watches[name].stop()
            if name in self.memory:
                self.memory[name].stop()

    # ---- results -------------------------------------------------------------------------------

    @property
    def last(self) -> Mapping[str, float]:
        """Milliseconds by event name, of the last update that the device has finished.

        Empty before there is one, and if nothing is timed.
        """
        self._read()
        return self._last

    def _read(self) -> None:
        """Read the times of all updates whose stamps the device has reached."""
        while self._unread and self._unread[0].is_reached:
            self._last = self._unread.popleft().milliseconds()
            for name, value in self._last.items():
                self._totals[name] = self._totals.get(name, 0.0) + value
            self._updates += 1

    def take_means(self) -> dict[str, float]:
        """Return the mean milliseconds by event name of the updates read since the last call."""
        self._read()
        means = {name: total / self._updates for name, total in self._totals.items()}
        self._totals, self._updates = {}, 0
        return means


class Throughput:
    """Samples per second between two readings, counted from boundary to boundary.

    The clock is read after the warm-up and when a rate is requested, never in between: measuring
    costs nothing. The first two updates are not counted.
    """

    def __init__(self, device: torch.device, *, synchronized: bool) -> None:
        self._device = device
        self._synchronized = synchronized
        self._updates = 0
        self._samples = 0
        self._began = 0.0

    def end_update(self, samples: int) -> None:
        """Count an update of `samples` samples on all ranks."""
        self._updates += 1
        if self._updates < _WARM_UP_UPDATES:
            return
        if self._updates == _WARM_UP_UPDATES:
            self._began = self._now()
        else:
            self._samples += samples

    def take_rate(self) -> float | None:
        """Return samples per second since the last call; None while warming up."""
        if not self._samples:
            return None
        now = self._now()
        rate = self._samples / (now - self._began)
        self._began, self._samples = now, 0
        return rate

    def _now(self) -> float:
        if self._synchronized:
            synchronize(self._device)
        return time.perf_counter()
