"""Events of torch's profiler: kernels, copies, and calls of an accelerator's driver."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from hadal.device import current_device, synchronize
from peers.overlap import Interval, Overlap, common, measured, union

# The names of kernels, and on a CPU of the ranges around the work of gloo's threads.
_COMMUNICATION = ("nccl", "rccl", "oneccl", "gloo")
# Computation on a CPU: matrix products are most of it, and contain no other range.
_CPU_COMPUTE = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product")
_TRACED = ("cuda", "xpu")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "hipModuleLaunchKernel")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister")


@dataclass(frozen=True)
class Event:
    """One event; `kind` is the trace's category (kernel, gpu_memcpy, cuda_runtime, cpu_op)."""

    name: str
    kind: str
    start_s: float
    stop_s: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


def traced(act: Callable[[], object], *, with_host: bool = False) -> list[Event]:
    """Return the events of a call, in order; those of the host's operations on request.

    Without an accelerator they are the host's operations.
    """
    device = current_device()
    there = [getattr(ProfilerActivity, device.type.upper())] if device.type in _TRACED else []
    chosen = [ProfilerActivity.CPU, *there] if with_host or not there else there
    synchronize(device)
    with profile(activities=chosen) as profiler:
        act()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return read_events(trace)


def read_events(trace: Path) -> list[Event]:
    """Return the events of a Chrome trace that have a duration, in order."""
    found = [
        Event(
            str(one["name"]),
            str(one.get("cat", "")),
            one["ts"] / 1e6,
            (one["ts"] + one["dur"]) / 1e6,
            int(one.get("args", {}).get("bytes", 0)),
        )
        for one in json.loads(trace.read_text(), strict=False)["traceEvents"]
        if one.get("ph") == "X"
    ]
    return sorted(found, key=lambda event: event.start_s)


def kernels(events: Iterable[Event]) -> list[Event]:
    """Return the kernels."""
    return [event for event in events if event.kind == "kernel"]


def copies(events: Iterable[Event], direction: str) -> list[Event]:
    """Return the copies of a direction: HtoD, DtoH or DtoD."""
    return [event for event in events if event.kind == "gpu_memcpy" and direction in event.name]


def intervals(events: Iterable[Event]) -> list[Interval]:
    """Return the times of events as disjoint intervals."""
    return union((event.start_s, event.stop_s) for event in events)


def seconds(events: Iterable[Event]) -> float:
    """Return the time during which at least one of the events runs."""
    return sum(stop - start for start, stop in intervals(events))


def share_under(events: Sequence[Event], others: Sequence[Event]) -> float:
    """Return the share of the time of `events` during which one of `others` runs."""
    return common(intervals(events), intervals(others)) / max(seconds(events), 1e-12)


def overlap_of(events: Sequence[Event]) -> Overlap:
    """Return the overlap of communication with computation: of kernels, or of CPU ranges."""
    running = kernels(events)
    communication, compute = [], []
    for event in running or events:
        name = event.name.lower()
        place = (event.start_s, event.stop_s)
        if any(word in name for word in _COMMUNICATION):
            communication.append(place)
        elif running or name.startswith(_CPU_COMPUTE):
            compute.append(place)
    return measured(communication, compute)


def idle_share(events: Sequence[Event]) -> float:
    """Return the share of the time from the first kernel to the last without any."""
    busy = kernels(events)
    if not busy:
        return 0.0
    return 1 - seconds(busy) / (max(one.stop_s for one in busy) - busy[0].start_s)


def host_calls(events: Sequence[Event]) -> Counter[str]:
    """Count waits, allocations and copies of pageable memory between first and last launch.

    Outside are those of the profiler itself.
    """
    launches = [event for event in events if event.name.startswith(_LAUNCHES)]
    if not launches:
        return Counter()
    inside = [
        event for event in events if launches[0].start_s <= event.start_s <= launches[-1].start_s
    ]
    found = Counter(event.name for event in inside if event.name in (*WAITS, *ALLOCATIONS))
    found["pageable copies"] = sum("Pageable" in event.name for event in inside)
    return +found


def launches(events: Iterable[Event]) -> int:
    """Return the number of kernels and copies."""
    return sum(event.kind in ("kernel", "gpu_memcpy", "gpu_memset") for event in events)


def by_name(events: Iterable[Event], most: int = 8) -> list[tuple[str, int, float]]:
    """Return names of kernels, how many there are and their seconds, longest first."""
    spent: dict[str, float] = {}
    count: Counter[str] = Counter()
    for event in events:
        name = event.name.removeprefix("void ").split("(")[0][:100]
        spent[name] = spent.get(name, 0.0) + event.seconds
        count[name] += 1
    longest = sorted(spent, key=lambda name: -spent[name])[:most]
    return [(name, count[name], spent[name]) for name in longest]
