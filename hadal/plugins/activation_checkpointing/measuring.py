"""Memory in use and its peaks during a measured step: from the allocator, or per operation."""

from __future__ import annotations

import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import replace
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
from hadal.plugins.activation_checkpointing.budget import MeasuredBackward, MeasuredCall


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
