"""Every stream of the library beside a device's current one, and what follows what in them.

Memory is allocated in the current stream, in which all other work runs. A collective runs in a
stream of its communicator, which follows the stream that starts it; the one that waits follows it.
Communicators are made in `hadal/comm/ranks.py`: one of each group of ranks, and a twin at stage 3,
so that gathers of weights, started ahead, do not stand behind reductions of gradients.

The host runs ahead of an accelerator: a collective that never ends is first noticed when the host
reads a value, or waits for a stream or an event. All such waits in the library go through
`read_on_host`, `start_reading`, `Event.wait_on_host` or `synchronize`, with a name that a watchdog
reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_WITHOUT_STREAMS = ("cpu", "mps")

# ---- waits of the host ---------------------------------------------------------------------------

# The watcher of waits, if any; `hadal.comm` sets it, because this folder does not import that one.
_watch: list[Callable[[str], AbstractContextManager[object]]] = [nullcontext]


def watch_waits(watch: Callable[[str], AbstractContextManager[object]]) -> None:
    """Enter `watch(what)` around each later wait of the host for an accelerator."""
    _watch[:] = [watch]


def waiting_for(what: str, device: torch.device | None = None) -> AbstractContextManager[object]:
    """Return a context around a wait of the host for an accelerator; `what` names the values.

    If the device is given, and a CPU, nothing is watched.
    """
    return nullcontext() if device is not None and device.type == "cpu" else _watch[0](what)


def synchronize(device: torch.device, what: str = "all work queued on the device") -> None:
    """Wait for all work queued on `device`; return at once on a CPU."""
    if device.type != "cpu":
        with waiting_for(what):
            torch.accelerator.synchronize(device)


# ---- streams and events --------------------------------------------------------------------------


def has_streams(device: torch.device) -> bool:
    """Return True if a device can run several streams of work at the same time."""
    return device.type not in _WITHOUT_STREAMS


def is_capturing(device: torch.device) -> bool:
    """Return True if this thread captures a graph of the device's work.

    A capture cannot use events of other work, nor may its thread ask for an event; torch finishes
    all earlier work before. The threads of `device_thread` are exempted.
    """
    if not has_streams(device):
        return False
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def has_passed(event: torch.Event | None) -> bool:
    """Return True if the device has passed an event, or this thread is in a capture behind it."""
    return event is None or is_capturing(event.device) or bool(event.query())


class Event:
    """A point in a stream.

    On a device without streams, everything before it is finished when it is created.
    """

    def __init__(
        self, event: torch.Event | None = None, device: torch.device | None = None
    ) -> None:
        self._event = event
        self._device = device

    @classmethod
    def on(cls, device: torch.device) -> Event:
        """Return the point after all work queued on a device."""
        if not has_streams(device):
            return cls()
        return cls(torch.accelerator.current_stream(device).record_event(), device)

    @property
    def is_over(self) -> bool:
        """True if everything before it is finished."""
        return has_passed(self._event)

    def wait_on_host(self, what: str = "copies between the device and the host") -> None:
        """Wait for it on the host: host memory may then be read, written and reused."""
        if self._event is not None and not has_passed(self._event):
            with waiting_for(what):
                self._event.synchronize()

    def wait_on_device(self) -> None:
        """Make the device's later work wait for it. The host does not wait."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)


def keep_for_current(values: Tensor) -> None:
    """Prevent reuse of a tensor's memory before the current stream's work so far is finished.

    Freed memory may be reused at once in the stream that it was allocated in, which is another one
    where a program runs parts of its model in several.
    """
    if has_streams(values.device):
        values.record_stream(torch.accelerator.current_stream(values.device))


class StreamPurpose(Enum):
    """The purpose of a side stream: who follows whom, and who keeps the memory."""

    REFRESH = auto()
    """Waits for gathers of new weights at stages 1 and 2, so that the step does not. Readers follow
    each bucket's event (`Refresh`); a bucket that is freed before is kept for it."""
    RELAY = auto()
    """Waits for a first collective to start a second one, so that the device does not. Whoever
    waits for the second follows both; until then its `Pending` holds their memory."""
    LEAVING = auto()
    """Copies to the host (`Crossing`) after the device's work so far. The host waits for each one's
    event; `Crossing` holds the device's memory until then, or frees it behind the copy."""
    COMING = auto()
    """Copies from the host, beside those to it, as a link has both directions. The device follows
    each one's event; `Upload` and the stages of `Crossing` hold both memories until then."""
    INPUTS_LEAVING = auto()
    """The same for inputs of recomputed blocks, which wait for no gradients: in a stream of their
    own, since copies of a stream run in order. A loan of host memory ends behind the last copy."""
    INPUTS_COMING = auto()
    """The same, one recomputed block ahead of its backward, which follows (`Upload`)."""
    REPORT = auto()
    """Sums of reported values over the ranks, so that the device waits for no other rank; they are
    copied to pinned memory here, and the host reads them later (`HostCopy`)."""


@cache
def side_stream(purpose: StreamPurpose, device: torch.device) -> SideStream:
    """Return a device's only stream for a purpose."""
    return SideStream(device)


class SideStream:
    """A stream of a device in addition to its current one.

    The caller keeps the tensors that are used here until a later event is over, or until the device
    waits for one, because freed memory may be reused at once. On a CPU, and on a device without
    streams, all work is done immediately.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type in _WITHOUT_STREAMS else torch.Stream(device)

    def follow_device(self) -> None:
        """Make later work of this stream wait for the device's work so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def follow(self, event: Event) -> None:
        """Make later work of this stream wait for an event of another stream."""
        if self._stream is not None and event._event is not None:
            self._stream.wait_event(event._event)

    def copy(self, out: Tensor, values: Tensor) -> None:
        """Copy `values` into `out` of the same dtype; with unpinned host memory the host waits."""
        with self.current():
            out.copy_(values, non_blocking=self._stream is not None)

    def keep(self, values: Tensor) -> None:
        """Prevent reuse of a tensor's memory before all work started so far is finished."""
        if self._stream is not None:
            values.record_stream(self._stream)

    def free(self, values: Tensor) -> None:
        """Free a tensor's memory on the device once all work started so far is finished.

        The tensor is empty at once; resizing its storage again allocates other memory.
        """
        self.keep(values)
        values.untyped_storage().resize_(0)

    def event(self) -> Event:
        """Return the point after all work started so far."""
        if self._stream is None:
            return Event()
        return Event(self._stream.record_event(), self._device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current stream in a block, for collectives too."""
        if self._stream is None:
            yield
            return
        with self._stream:
            yield


class Upload:
    """A copy from host memory (`values`) to the device (`out`), just started on a side stream.

    The memory of `out` is not reused before the copy is over, even if nobody waits for it: after an
    exception, or if the graph that needed it is freed before its backward.
    """

    def __init__(self, stream: SideStream, values: Tensor, out: Tensor) -> None:
        self._stream = stream
        self._values, self._out = values, out
        self._has_follower = False
        self.event = stream.event()

    def then(self, start: Callable[[], Result]) -> Result:
        """Start work on the device that waits for the values, but not for the device's own work."""
        self._has_follower = True
        with self._stream.current():
            return start()

    def wait(self) -> Tensor:
        """Make the device's own work wait for the values; return them."""
        self._has_follower = True
        self.event.wait_on_device()
        return self._out

    def __del__(self) -> None:
        if not self._has_follower:
            self._stream.keep(self._out)


# ---- small tensors to and from the host, and times -----------------------------------------------


def read_on_host(tensor: Tensor, what: str) -> Tensor:
    """Return the values of a tensor in host memory, waiting for them.

    On an accelerator the host waits for everything queued before; `what` names the values ("the
    norm of the gradients") in the report of a wait that takes too long. A tensor in host memory is
    returned unchanged.
    """
    if tensor.device.type == "cpu":
        return tensor.detach()
    with waiting_for(what):
        return tensor.detach().cpu()


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor of the host on a device, without a wait of the host.

    torch keeps the pinned copy until the device has read it.
    """
    if device.type in _WITHOUT_STREAMS:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor's values to host memory that is under way."""

    __slots__ = ("_event", "_values", "_what")

    def __init__(self, values: Tensor, event: Event, what: str) -> None:
        self._values = values
        self._event = event
        self._what = what

    @property
    def is_over(self) -> bool:
        """True if the values have arrived, so that `values` does not wait."""
        return self._event.is_over

    def values(self) -> Tensor:
        """Return the values in host memory, as they were when the copy was started."""
        self._event.wait_on_host(self._what)
        return self._values


def start_reading(tensor: Tensor, what: str) -> HostCopy:
    """Start copying a small tensor to pinned host memory, after the work queued on its device.

    The host does not wait, and later changes of the tensor have no effect. `what` names the values
    in the report of a wait that takes too long.
    """
    if tensor.device.type in _WITHOUT_STREAMS:
        return HostCopy(read_on_host(tensor, what).clone(), Event(), what)
    values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    values.copy_(tensor.detach(), non_blocking=True)
    return HostCopy(values, Event.on(tensor.device), what)


class Stamp:
    """A point in time on a CPU; on an accelerator, a point in the work of the current stream.

    Neither recording nor reading it waits for the accelerator.
    """

    __slots__ = ("_event", "_seconds")

    def __init__(self, device: torch.device) -> None:
        self._seconds = 0.0
        self._event: Any = None
        if device.type == "cpu":
            self._seconds = time.perf_counter()
        else:
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()

    @property
    def is_reached(self) -> bool:
        """True if the device has reached it."""
        return has_passed(self._event)

    def seconds_since(self, earlier: Stamp) -> float:
        """Return the seconds between two points of one device that have been reached."""
        if self._event is None:
            return self._seconds - earlier._seconds
        return float(earlier._event.elapsed_time(self._event)) / 1000.0
