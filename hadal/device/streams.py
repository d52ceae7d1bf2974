"""What a device does beside its own work: copies between its memory and the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hadal.device.waits import waiting_for

WITHOUT_STREAMS = ("cpu", "mps")


def has_streams(device: torch.device) -> bool:
    """Whether a device goes on beside what it was given in another order."""
    return device.type not in WITHOUT_STREAMS


def is_capturing(device: torch.device) -> bool:
    """Whether a graph of the device's work is being captured: events from outside have no place.

    Torch lets all that was started before a capture come to its end.
    """
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


class Event:
    """A point in the order of a stream.

    Where a device has none, everything before it is over when it is made.
    """

    def __init__(
        self, event: torch.Event | None = None, device: torch.device | None = None
    ) -> None:
        self._event = event
        self._device = device

    @property
    def is_over(self) -> bool:
        """Whether everything before it is done."""
        return self._event is None or bool(self._event.query())

    def wait_on_host(self, what: str = "copies between the device and the host") -> None:
        """Wait until it is over: host memory may be read, written and given to others then."""
        if self._event is not None and not self._event.query():
            with waiting_for(what):
                self._event.synchronize()

    def wait_on_device(self) -> None:
        """Let what the device is given from now on wait for it. This process goes on."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def hold(self, stream: torch.Stream) -> None:
        """Let what a stream is given from now on wait for it."""
        if self._event is not None:
            stream.wait_event(self._event)


class SideStream:
    """Work of a device in an order of its own, beside what it is given otherwise.

    Whoever starts something here keeps its tensors until an event behind it is over, or until the
    device has been told to wait for one: memory that is let go of may be given to others at once.
    On a CPU, and on a device without streams, everything is done when it is started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type in WITHOUT_STREAMS else torch.Stream(device)

    def follow_device(self) -> None:
        """Begin nothing more before the device has done all that it was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def follow(self, event: Event) -> None:
        """Begin nothing more before an event of another stream is over."""
        if self._stream is not None:
            event.hold(self._stream)

    def copy(self, out: Tensor, values: Tensor) -> None:
        """Copy `values` into `out`, of one dtype; host memory must be page-locked not to wait."""
        with self.current():
            out.copy_(values, non_blocking=self._stream is not None)

    def keep(self, values: Tensor) -> None:
        """Let a tensor's memory be nobody else's before all that was started so far is over."""
        if self._stream is not None:
            values.record_stream(self._stream)

    def free(self, values: Tensor) -> None:
        """Give a tensor's memory back to the device when all that was started so far is over.

        The tensor is empty at once; whoever gives its storage room again gets other memory.
        """
        self.keep(values)
        values.untyped_storage().resize_(0)

    def event(self) -> Event:
        """The point behind all that was started so far."""
        if self._stream is None:
            return Event()
        return Event(self._stream.record_event(), self._device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """What the device is given inside takes its place in this order, collectives too."""
        if self._stream is None:
            yield
            return
        with self._stream:
            yield
