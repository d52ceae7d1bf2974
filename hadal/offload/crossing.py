"""Copies between a device and the host that overlap with the device's own work."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from hadal.device import Event, SideStream, StreamPurpose, Upload, keep_for_current, side_stream
from hadal.offload.buffers import aligned

# The gradients of this many buckets may be copied to the host at a time: while one is copied, the
# next is computed. The device's own work waits for earlier ones, so its memory is bounded.
_LANDINGS = 2
# Staging buffers into which new weights are cast: while some are copied, others are filled.
_STAGED_NBYTES = 1 << 23
_STAGES = 4


class Crossing:
    """The copies between one device and the host, in both directions.

    Copies of one direction run in order; those of both directions run at the same time. Device
    memory that a copy reads or writes is kept until the copy is over.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self.device, self._pins = device, pins
        self._leaving = side_stream(StreamPurpose.LEAVING, device)
        self._coming = side_stream(StreamPurpose.COMING, device)
        self._landings: deque[tuple[Event, Tensor]] = deque()
        self._stages: deque[tuple[Event, Tensor]] = deque()

    def land(self, values: Tensor, out: Tensor, *, after: Event | None = None) -> Event:
        """Start copying `values` to the host, once the device has computed them.

        Args:
            values: in device memory; they must not change until the event.
            out: in host memory, of the same shape and dtype.
            after: the event of earlier work that still uses `out`.

        Returns:
            The event after which `out` can be read.
        """
        self._let_go()
        while len(self._landings) >= _LANDINGS:
            earliest, landed = self._landings.popleft()
            earliest.wait_on_device()
            keep_for_current(landed)
        self._begin(self._leaving, values, out, after)
        event = self._leaving.event()
        self._landings.append((event, values))
        return event

    def _let_go(self) -> None:
        """Drop references to values whose copies to the host are over."""
        while self._landings and self._landings[0][0].is_over:
            self._landings.popleft()

    def move_out(self, values: Tensor, out: Tensor, *, after: Event | None = None) -> Event:
        """Start copying `values` to the host; their device memory is freed after the copy.

        Args:
            values: bytes in device memory, all of their storage, which is emptied at once.
            out: in host memory, of the same length and dtype.
            after: the event of earlier work that still uses `out`.

        Returns:
            The event after which `out` can be read.
        """
        self._begin(self._leaving, values, out, after)
        self._leaving.free(values)
        return self._leaving.event()

    def bring(self, values: Tensor, out: Tensor, *, after: Event | None = None) -> Upload:
        """Start copying `values` from host memory; they must not change until the event.

        `after` is the event of earlier work that still writes `values`. The device must use `out`
        only after the copy.
        """
        self._begin(self._coming, values, out, after)
        return Upload(self._coming, values, out)

    @staticmethod
    def _begin(way: SideStream, values: Tensor, out: Tensor, after: Event | None) -> None:
        """Copy on a side stream, after the device's work so far and `after`."""
        way.follow_device()
        if after is not None:
            way.follow(after)
        way.copy(out, values)

    def begin_sending(self) -> None:
        """Make new weights wait for all of the device's work so far (see `send`)."""
        self._let_go()
        self._coming.follow_device()

    def send(self, values: Tensor, out: Tensor) -> None:
        """Copy `values` (1-D, in host memory) to `out` on the device, cast to its dtype.

        Work queued between `begin_sending` and this call must not read `out`; work queued after
        `send` sees the new values.
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
        """Return a staging buffer that no copy is using any more."""
        if len(self._stages) < _STAGES:
            return Event(), aligned(_STAGED_NBYTES, pinned=self._pins)
        event, stage = self._stages.popleft()
        event.wait_on_host()
        return event, stage


_crossings: weakref.WeakValueDictionary[tuple[torch.device, bool], Crossing]
_crossings = weakref.WeakValueDictionary()


def crossing_of(device: torch.device, *, pins: bool) -> Crossing:
    """Return the crossing of a device, shared by all users; `pins` selects pinned buffers."""
    found = _crossings.get((device, pins))
    if found is None:
        found = _crossings[device, pins] = Crossing(device, pins=pins)
    return found
