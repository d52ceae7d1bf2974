"""Measured memory of a step, and the choice of modules to recompute within a budget.

A step is measured while every module is recomputed: by the allocator, or per operation. Each
recomputed call begins a part of backward. The peak of each part, and the bytes of its activations,
determine the peak of any choice: stored activations add to all parts before their own backward, and
inputs offloaded to the host no longer count there.
"""

from __future__ import annotations

import time
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hadal.device import (
    allocated_host_nbytes,
    memory_in_use,
    peak_memory,
    reset_peak_memory,
    synchronize,
)

_MIB = 2**20


class ModuleChoice(Enum):
    """The treatment of a module's activations."""

    STORED = "stored"
    RECOMPUTED = "recomputed"
    OFFLOADED = "recomputed, input on the host"


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """One recomputed call of a measured step."""

    module: str
    stored_nbytes: int
    """Bytes that its activations would take until its backward, in addition to its input."""
    input_nbytes: int
    """Bytes of its inputs that could be on the host."""
    seconds: float
    """Duration of the recomputation."""
    peak: int
    """Peak bytes from its recomputation to the next one, or to the end of backward."""
    place: int = 0
    """Its position in forward."""
    before: int = 0
    """Peak bytes from the end of the call before it in forward to its own beginning."""
    forward: int = 0
    """Peak bytes in its forward."""
    forward_storing: int = 0
    """The same if it had stored its activations, as its recomputation does."""


@dataclass(frozen=True, slots=True)
class MeasuredBackward:
    """One forward and backward, with every module recomputed."""

    forward_peak: int
    """Peak bytes from the end of the last call's forward to the first recomputation."""
    calls: tuple[MeasuredCall, ...]
    """In the order of their recomputation."""

    def peak(self, choices: Mapping[str, ModuleChoice]) -> int:
        """Return the peak bytes with these choices."""
        stored = [c.stored_nbytes * (choices[c.module] is ModuleChoice.STORED) for c in self.calls]
        absent = [
            c.input_nbytes * (choices[c.module] is ModuleChoice.OFFLOADED) for c in self.calls
        ]
        # Calls that wait for their own backward; the next input to be used is back already.
        peaks = [self.forward_peak + sum(stored) - sum(absent)]
        earlier = 0
        for call in sorted(self.calls, key=lambda one: one.place):
            is_stored = choices[call.module] is ModuleChoice.STORED
            forward = call.forward_storing if is_stored else call.forward
            peaks.append(earlier + max(call.before, forward))
            earlier += call.stored_nbytes if is_stored else 0
            earlier -= call.input_nbytes * (choices[call.module] is ModuleChoice.OFFLOADED)
        for place, call in enumerate(self.calls):
            waiting = sum(stored[place + 1 :]) - sum(absent[place + 2 :])
            peaks.append(call.peak + waiting)
        return max(peaks)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One update on one rank, with every module recomputed."""

    backwards: tuple[MeasuredBackward, ...]
    update_peak: int
    """Peak bytes from the end of the last backward to the end of the update."""

    def peak(self, choices: Mapping[str, ModuleChoice]) -> int:
        """Return the peak bytes of an update with these choices."""
        return max(self.update_peak, *(one.peak(choices) for one in self.backwards))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The choice for each module, by full name, and the resulting peak bytes."""

    choices: Mapping[str, ModuleChoice]
    peak: int
    budget: int
    least: int
    """Peak bytes if every module is recomputed, its input on the device."""
    most: int
    """Peak bytes if none is."""

    @property
    def fits(self) -> bool:
        """True if the peak is within the budget."""
        return self.peak <= self.budget


def choose(
    steps: Sequence[MeasuredStep], modules: Sequence[str], budget: int, *, offloads: bool
) -> Verdict:
    """Return the choice that recomputes least within a budget.

    Modules whose recomputation takes the most time per byte saved are stored first; among equals,
    the last module is, as its activations live the shortest. If recomputing all modules does not
    suffice, inputs are offloaded to the host, starting with the first module, which waits longest.

    Args:
        steps: the measured step of each rank; the largest peak counts.
        modules: full names, in the order of forward.
        budget: bytes.
        offloads: True if inputs may be moved to the host.
    """

    def peak(choices: Mapping[str, ModuleChoice]) -> int:
        return max(step.peak(choices) for step in steps)

    choices = dict.fromkeys(modules, ModuleChoice.RECOMPUTED)
    least, most = peak(choices), peak(dict.fromkeys(modules, ModuleChoice.STORED))
    if least > budget:
        for name in modules if offloads else ():
            if peak(choices) <= budget:
                break
            choices[name] = ModuleChoice.OFFLOADED
        return Verdict(choices, peak(choices), budget, least, most)
    costs = costs_of(steps)
    alike: dict[int, list[float]] = {}
    for seconds, nbytes, _ in costs.values():
        alike.setdefault(nbytes, []).append(seconds)

    def worth(name: str) -> tuple[float, int]:
        _, nbytes, _ = costs.get(name, (0.0, 0, 0))
        # Blocks of the same size take the same time: differences are measurement noise.
        return fmean(alike.get(nbytes, [0.0])) / max(nbytes, 1), modules.index(name)

    for name in sorted(modules, key=worth, reverse=True):
        wider = {**choices, name: ModuleChoice.STORED}
        if peak(wider) <= budget:
            choices = wider
    return Verdict(choices, peak(choices), budget, least, most)


def costs_of(steps: Iterable[MeasuredStep]) -> dict[str, tuple[float, int, int]]:
    """Return each module's seconds, activation bytes and input bytes: the maximum over ranks."""
    found: dict[str, tuple[float, int, int]] = {}
    for step in steps:
        for backward in step.backwards:
            mine: dict[str, tuple[float, int, int]] = {}
            for call in backward.calls:
                seconds, stored, inputs = mine.get(call.module, (0.0, 0, 0))
                mine[call.module] = (
                    seconds + call.seconds,
                    stored + call.stored_nbytes,
                    inputs + call.input_nbytes,
                )
            for name, cost in mine.items():
                before = found.get(name, (0.0, 0, 0))
                found[name] = (
                    max(before[0], cost[0]),
                    max(before[1], cost[1]),
                    max(before[2], cost[2]),
                )
    return found


def table(steps: Sequence[MeasuredStep], verdict: Verdict) -> Iterator[str]:
    """Yield the lines of a table: the cost of each module, and the choice."""
    costs = costs_of(steps)
    width = max(len(name) for name in verdict.choices)
    yield f"{'module':<{width}}  activations MiB  input MiB  recomputation ms  choice"
    for name, choice in verdict.choices.items():
        seconds, stored, inputs = costs.get(name, (0.0, 0, 0))
        yield (
            f"{name:<{width}}  {stored / _MIB:15.1f}  {inputs / _MIB:9.1f}"
            f"  {seconds * 1000:16.2f}  {choice.value}"
        )
    yield (
        f"peak: {verdict.peak / _MIB:,.1f} MiB of {verdict.budget / _MIB:,.1f} MiB"
        f" (all recomputed {verdict.least / _MIB:,.1f}, all stored {verdict.most / _MIB:,.1f})"
    )
    if not verdict.fits:
        yield (
            "no choice fits into activation_checkpointing.memory_budget: raise it to at least"
            f" {verdict.peak}, or reduce the micro-batch"
        )


class Meter(Protocol):
    """Memory in use on a device, and its peak since the last reading."""

    def start(self) -> None:
        """Begin a phase of the step."""

    def stop(self) -> None:
        """End it."""

    def in_use(self) -> int:
        """Return the bytes in use now."""

    def take_peak(self) -> int:
        """Return the peak bytes since the last call."""


class AllocatorMeter:
    """The figures of an accelerator's allocator, whose peak is reset at each reading."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Begin a phase of the step."""

    def stop(self) -> None:
        """End it."""

    def in_use(self) -> int:
        """Return the bytes in use now."""
        return memory_in_use(self._device)

    def take_peak(self) -> int:
        """Return the peak bytes since the last call."""
        found = peak_memory(self._device)
        reset_peak_memory(self._device)
        return found


class HostMeter(TorchDispatchMode):
    """The bytes that the process has allocated; between two readings, those of tensors.

    The C library reports no peak. An operation's results count until their storage is freed; its
    internal temporaries are not counted. Operations are slower during the measurement.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = self._peak = 0
        self._known: set[int] = set()
        self._is_running = False

    def start(self) -> None:
        """Begin a phase of the step."""
        self._is_running = True
        self.__enter__()  # type: ignore[no-untyped-call]
        self._now = allocated_host_nbytes()
        self._peak = max(self._peak, self._now)

    def stop(self) -> None:
        """End it."""
        if self._is_running:
            self._is_running = False
            self._peak = max(self._peak, allocated_host_nbytes())
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def in_use(self) -> int:
        """Return the bytes in use now."""
        return allocated_host_nbytes()

    def take_peak(self) -> int:
        """Return the peak bytes since the last call."""
        found = self._peak
        self._now = self._peak = allocated_host_nbytes()
        return max(found, self._now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the storages that it created."""
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and _key(leaf) not in given:
                self._count(leaf)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._known.add(key)
        self._now += nbytes
        self._peak = max(self._peak, self._now)
        weakref.finalize(storage, self._forget, key, nbytes).atexit = False

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def meter_of(device: torch.device) -> Meter:
    """Return the meter of a device."""
    return HostMeter() if device.type == "cpu" else AllocatorMeter(device)


class CallMeter:
    """The recomputed calls of one forward and backward, measured one by one."""

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self._meter = meter
        self._device = device
        self._forward_peak: int | None = None
        self._open: tuple[MeasuredCall, int] | None = None
        self._calls: list[MeasuredCall] = []
        self._begun = 0

    def around(self, module: str, inputs: Sequence[Tensor]) -> CallContexts:
        """Return the contexts of one call's forward and recomputation."""
        nbytes = sum(one.untyped_storage().nbytes() for one in inputs if one.requires_grad)
        self._begun += 1
        measured = MeasuredForward(self, module, nbytes, self._begun)
        return measured, Recomputing(self, measured)

    def look(self) -> tuple[int, int]:
        """Return the peak bytes since the last reading, and the bytes in use."""
        synchronize(self._device, "the measurement of a recomputed block")
        return self._meter.take_peak(), self._meter.in_use()

    def begin(self) -> tuple[int, float]:
        """Begin a recomputation: a part of backward ends here."""
        peak, now = self.look()
        self._end_part(peak)
        return now, time.perf_counter()

    def end(self, call: MeasuredForward, begun: tuple[int, float]) -> None:
        """End the recomputation."""
        peak, now = self.look()
        measured = MeasuredCall(
            call.module,
            max(0, now - begun[0]),
            call.inputs,
            time.perf_counter() - begun[1],
            peak,
            call.place,
            call.before,
            call.peak,
            call.in_use + peak - begun[0],
        )
        self._open = measured, peak

    def _end_part(self, peak: int) -> None:
        """End the part of forward or backward since the last recomputation began."""
        if self._open is not None:
            measured, in_recomputation = self._open
            self._calls.append(replace(measured, peak=max(in_recomputation, peak)))
            self._open = None
        elif self._forward_peak is None:
            self._forward_peak = peak

    def result(self) -> MeasuredBackward:
        """Return the measurement, at the end of the backward."""
        self._end_part(self._meter.take_peak())
        return MeasuredBackward(self._forward_peak or 0, tuple(self._calls))


class MeasuredForward:
    """The context of one measured call's forward."""

    def __init__(self, calls: CallMeter, module: str, inputs: int, place: int) -> None:
        self._calls = calls
        self.module = module
        self.inputs = inputs
        self.place = place
        self.before = self.in_use = self.peak = 0

    def __enter__(self) -> None:
        self.before, self.in_use = self._calls.look()

    def __exit__(self, *_: object) -> None:
        self.peak = self._calls.look()[0]


class Recomputing:
    """The context of one measured recomputation."""

    def __init__(self, calls: CallMeter, forward: MeasuredForward) -> None:
        self._calls = calls
        self._forward = forward
        self._begun = (0, 0.0)

    def __enter__(self) -> None:
        self._begun = self._calls.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if trace is not None:
            # torch stops a recomputation by an exception, which keeps the block's local variables
            # alive.
            traceback.clear_frames(trace)
        self._calls.end(self._forward, self._begun)


CallContexts = tuple[MeasuredForward, Recomputing]
