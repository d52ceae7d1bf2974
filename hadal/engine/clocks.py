"""How long each phase of an update takes, what memory it needs, and how many samples a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol

import torch

from hadal.device import MemoryUse, Stamp, memory_use, reset_peak_memory, synchronize

PHASES = ("forward", "backward", "reduce", "step")
# What the first updates do besides training (take memory, compile) says nothing about the others.
_WARM_UP_UPDATES = 2


class Gauge(Protocol):
    """Something that is read at the beginning and at the end of a phase."""

    def start(self) -> None:
        """The phase begins."""

    def stop(self) -> None:
        """The phase ends."""


class Stopwatch:
    """Times a phase by stamps in the device's work: nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starts: list[Stamp] = []
        self._stops: list[Stamp] = []

    def start(self) -> None:
        """The phase begins where the device's work so far ends."""
        self._starts.append(Stamp(self._device))

    def stop(self) -> None:
        """It ends where the device's work so far ends."""
        self._stops.append(Stamp(self._device))

    def take(self) -> list[tuple[Stamp, Stamp]]:
        """The two ends of each time since the last call."""
        spans = list(zip(self._starts, self._stops, strict=True))
        self._starts, self._stops = [], []
        return spans


class MemoryGauge:
    """What memory was in use around the last run of a phase, and the device's peak in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before = self.after = MemoryUse(0, 0, 0)

    def start(self) -> None:
        """Forget earlier peaks."""
        reset_peak_memory(self._device)
        self.before = memory_use(self._device)

    def stop(self) -> None:
        """Read what is in use now."""
        self.after = memory_use(self._device)


class Phase:
    """A context that reads gauges at its two ends."""

    def __init__(self, gauges: Sequence[Gauge]) -> None:
        self._gauges = gauges

    def __enter__(self) -> None:
        for gauge in self._gauges:
            gauge.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for gauge in reversed(self._gauges):
            gauge.stop()


class Lap:
    """The phases of one update, as stamps in the device's work."""

    def __init__(
        self, device: torch.device, spans: Mapping[str, Sequence[tuple[Stamp, Stamp]]]
    ) -> None:
        self._device = device
        self._spans = spans

    @property
    def is_reached(self) -> bool:
        """Whether the device has come to all stamps."""
        return all(
            stamp.is_reached for each in self._spans.values() for span in each for stamp in span
        )

    def milliseconds(self) -> Mapping[str, float]:
        """Milliseconds by event name. Waits for the device."""
        if not self.is_reached:
            synchronize(self._device)
        spent = {
            name: 1000.0 * sum(stop.seconds_since(start) for start, stop in each)
            for name, each in self._spans.items()
        }
        return {
            "forward": spent["forward"],
            "backward": spent["backward"],
            "backward_inner": spent["backward"] - spent["reduce"],
            "backward_allreduce": spent["reduce"],
            "step": spent["step"],
        }


class Clocks:
    """The phases of an update. Where nothing is measured they are contexts that do nothing.

    `forward`, `backward` (with its reductions), `reduce` (the part of backward in which this rank
    starts reductions and waits for them) and `step` (the update itself) are contexts. `counter` is
    one more gauge around forward and backward.
    """

    def __init__(
        self, device: torch.device, *, times: bool, memory: bool, counter: Gauge | None = None
    ) -> None:
        self._watches = {name: Stopwatch(device) for name in PHASES} if times else {}
        around = ("forward", "backward", "step")
        self.memory = {name: MemoryGauge(device) for name in around} if memory else {}
        self.forward = self._phase("forward", counter)
        self.backward = self._phase("backward", counter)
        self.reduce = self._phase("reduce")
        self.step = self._phase("step")
        self.late_reduce = self._late_reduce()
        self.listeners: list[Callable[[Mapping[str, float]], None]] = []
        """Called with the milliseconds of each update, once the device has reached its end."""
        self.lap: Lap | None = None
        """The last update; None where nothing is timed."""
        self._device = device
        self._unread: deque[Lap] = deque()
        self._last: Mapping[str, float] = {}
        self._totals: dict[str, float] = {}
        self._updates = 0

    def _phase(self, name: str, *others: Gauge | None) -> AbstractContextManager[Any]:
        gauges: list[Gauge] = [other for other in others if other is not None]
        gauges += [gauges[name] for gauges in (self._watches, self.memory) if name in gauges]
        return Phase(gauges) if gauges else nullcontext()

    def _late_reduce(self) -> AbstractContextManager[Any]:
        """Reductions that no backward made, because none was known to be the last: its time too."""
        if not self._watches:
            return nullcontext()
        return Phase([self._watches["backward"], self._watches["reduce"]])

    @property
    def last(self) -> Mapping[str, float]:
        """Milliseconds by event name, of the last update that the device has finished.

        Empty before there is one, and where nothing is timed.
        """
        self._read()
        return self._last

    def wait(self) -> None:
        """Wait for the device: `last` is that of the last update then."""
        synchronize(self._device)
        self._read()

    def end_update(self) -> None:
        """An update is over: the next one's times begin at nothing."""
        if self._watches:
            spans = {name: watch.take() for name, watch in self._watches.items()}
            self.lap = Lap(self._device, spans)
            self._unread.append(self.lap)
            self._read()

    def _read(self) -> None:
        """Read the times of all updates whose stamps the device has reached."""
        while self._unread and self._unread[0].is_reached:
            self._last = self._unread.popleft().milliseconds()
            for name, value in self._last.items():
                self._totals[name] = self._totals.get(name, 0.0) + value
            self._updates += 1
            for listener in self.listeners:
                listener(self._last)

    def take_means(self) -> dict[str, float]:
        """The mean milliseconds of the updates read since the last call, by event name."""
        self._read()
        means = {name: total / self._updates for name, total in self._totals.items()}
        self._totals, self._updates = {}, 0
        return means


class Throughput:
    """Samples per second between two readings, counted from boundary to boundary.

    The clock is looked at when a rate is asked for and behind the warm-up, never in between: what
    is measured costs nothing. The first two updates are not counted.
    """

    def __init__(self, device: torch.device, *, synchronized: bool) -> None:
        self._device = device
        self._synchronized = synchronized
        self._updates = 0
        self._samples = 0
        self._began = 0.0

    def end_update(self, samples: int) -> None:
        """An update with so many samples of all ranks is over."""
        self._updates += 1
        if self._updates < _WARM_UP_UPDATES:
            return
        if self._updates == _WARM_UP_UPDATES:
            self._began = self._now()
        else:
            self._samples += samples

    def take_rate(self) -> float | None:
        """The samples per second since the last call; None while warming up."""
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
