"""Copies between a device's memory and the host's, beside the device's own work."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from hadal.device import Event, SideStream
from hadal.offload.buffers import aligned

Result = TypeVar("Result")

# Gradients of so many buckets may be on their way to the host: while one leaves, the next one is
# made. The device's own work waits for the one before these, so that its memory is bounded.
_LANDINGS = 2
# Where new weights are cast, and from where they leave: while some leave, others are filled.
_STAGED_NBYTES = 1 << 23
_STAGES = 4


class Crossing:
    """The two ways between one device's memory and the host's.

    Copies of one way follow each other; those of the two ways go on at the same time. What a copy
    reads or writes on the device is kept until it is over.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._pins = pins
        self._leaving = SideStream(device)
        self._coming = SideStream(device)
        self._landings: deque[tuple[Event, Tensor]] = deque()
        self._stages: deque[tuple[Event, Tensor]] = deque()

    def land(self, values: Tensor, out: Tensor, *, after: Event | None = None) -> Event:
        """Begin to bring `values` to the host, once the device has made them.

        Args:
            values: in the device's memory, 1-D; nobody changes them before the event.
            out: in host memory, of the same length and dtype.
            after: of what is still under way with `out`.

        Returns:
            The event from which on `out` can be read.
        """
        self._let_go()
        while len(self._landings) >= _LANDINGS:
            earliest, _ = self._landings.popleft()
            earliest.wait_on_device()
        self._begin(self._leaving, values, out, after)
        event = self._leaving.event()
        self._landings.append((event, values))
        return event

    def _let_go(self) -> None:
        """Let go of what has left the device."""
        while self._landings and self._landings[0][0].is_over:
            self._landings.popleft()

    def move_out(self, values: Tensor, out: Tensor, *, after: Event | None = None) -> Event:
        """Begin to bring `values` to the host; the device gets their memory when they are there.

        Args:
            values: bytes in the device's memory, as many as their storage has. It is empty at once.
            out: in host memory, of the same length and dtype.
            after: of what is still under way with `out`.

        Returns:
            The event from which on `out` can be read.
        """
        self._begin(self._leaving, values, out, after)
        self._leaving.free(values)
        return self._leaving.event()

    def bring(self, values: Tensor, out: Tensor, *, after: Event | None = None) -> Upload:
        """Begin to bring `values` from host memory, where nobody changes them before the event.

        `after`: of what is still under way with `values`. What the device does with `out` must
        follow the arrival.
        """
        self._begin(self._coming, values, out, after)
        return Upload(self._coming, self._coming.event(), (values, out))

    @staticmethod
    def _begin(way: SideStream, values: Tensor, out: Tensor, after: Event | None) -> None:
        """Let a way copy, after what the device was given so far and what is under way with it."""
        way.follow_device()
        if after is not None:
            way.follow(after)
        way.copy(out, values)

    def begin_sending(self) -> None:
        """Let new weights follow all that the device was given so far (see `send`)."""
        self._let_go()
        self._coming.follow_device()

    def send(self, values: Tensor, out: Tensor) -> None:
        """Send `values` (1-D, in host memory) to `out` on the device, cast to its dtype.

        What the device is given between `begin_sending` and here must not read `out`; what it is
        given behind `send` finds the new values.
        """
        step = _STAGED_NBYTES // out.dtype.itemsize
        for start in range(0, values.numel(), step):
            part = out[start : start + step]
            event, stage = self._next_stage()
            staged = stage[: part.numel() * out.dtype.itemsize].view(out.dtype)
            staged.copy_(values[start : start + step])
            self._coming.copy(part, staged)
            event = self._coming.event()
            event.wait_on_device()
            self._stages.append((event, stage))

    def _next_stage(self) -> tuple[Event, Tensor]:
        """A stage that nothing leaves any more."""
        if len(self._stages) < _STAGES:
            return Event(), aligned(_STAGED_NBYTES, pinned=self._pins)
        event, stage = self._stages.popleft()
        event.wait_on_host()
        return event, stage


class Upload:
    """Values on their way to the device."""

    def __init__(self, stream: SideStream, event: Event, held: tuple[Tensor, ...]) -> None:
        self.event = event
        self._stream = stream
        self._held = held

    def then(self, start: Callable[[], Result]) -> Result:
        """Start work of the device that waits for the values, and not for its other work."""
        with self._stream.current():
            return start()

    def wait(self) -> None:
        """Let the device's own work wait for them."""
        self.event.wait_on_device()


_crossings: weakref.WeakValueDictionary[tuple[torch.device, bool], Crossing]
_crossings = weakref.WeakValueDictionary()


def crossing_of(device: torch.device, *, pins: bool) -> Crossing:
    """The crossing of a device, one for all who use it; `pins`: through page-locked memory."""
    found = _crossings.get((device, pins))
    if found is None:
        found = _crossings[device, pins] = Crossing(device, pins=pins)
    return found
