"""A stand-in for a device whose copies are made as late as they may be.

Nothing that is started on a stream here happens before somebody waits for it. So whoever reads
before he has waited finds NaN or what was there before, and whoever changes what is still to be
copied sends the wrong values: each missing wait shows in the numbers, at every run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hadal import comm
from hadal.engine import tiers
from hadal.offload import crossing
from hadal.zero import offload

_HOST, _DEVICE = "leaving", "coming"


class _Copy(NamedTuple):
    out: Tensor
    values: Tensor


@dataclass(frozen=True)
class Event:
    """The point behind the first `count` entries of a stream."""

    stream: Stream
    count: int

    @property
    def is_over(self) -> bool:
        return self.stream.shown >= self.count

    def wait_on_host(self) -> None:
        waits["host"] += 1
        self.stream.run_to(self.count)
        self.stream.show(self.count)

    def wait_on_device(self) -> None:
        waits["device"] += 1
        self.stream.run_to(self.count)

    def hold(self, stream: Stream) -> None:
        stream.queue.append(self)


class Stream:
    """The started work, in order. The host sees arriving values after a wait of its own."""

    def __init__(self, device: torch.device) -> None:
        self.queue: list[_Copy | Event | None] = []
        self.done = self.shown = 0
        self.unseen: dict[int, tuple[Tensor, Tensor]] = {}
        self.reading: dict[int, tuple[Tensor, Tensor]] = {}
        # A crossing makes the way to the host first.
        self.way = (_HOST, _DEVICE)[len(streams) % 2]
        streams.append(self)

    def follow_device(self) -> None:
        """Work for this stand-in's device is done at once."""

    def follow(self, event: Event) -> None:
        event.hold(self)

    def copy(self, out: Tensor, values: Tensor) -> None:
        assert out.shape == values.shape and out.dtype == values.dtype
        sources = [one.values for one in _waiting()]
        sources += [one for stream in streams for one, _ in stream.reading.values()]
        if not any(_overlap(one, out) for one in sources):
            out.fill_(math.nan if out.is_floating_point() else 0xA5)
        copies[self.way] += 1
        self.queue.append(_Copy(out, values))

    def free(self, values: Tensor) -> None:
        """Keep pending copies separate, as a device does."""
        kept = values.clone()
        for place, entry in enumerate(self.queue):
            if isinstance(entry, _Copy) and entry.values is values:
                self.queue[place] = _Copy(entry.out, kept)
        values.untyped_storage().resize_(0)

    def event(self) -> Event:
        return Event(self, len(self.queue))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Do a CPU's work at once, and therefore all earlier work."""
        if comm.get_world_size() > 1:  # alone there is no collective to be given
            self.run_to(len(self.queue))
        yield

    def run_to(self, count: int) -> None:
        while self.done < count:
            entry = self.queue[self.done]
            self.done += 1
            if isinstance(entry, Event):
                entry.stream.run_to(entry.count)
                continue
            self.queue[self.done - 1] = None  # lets go of its memory
            assert entry is not None
            values = self.seen_by_device(entry.values)
            if self.way == _HOST:
                self.unseen[self.done - 1] = entry.out, values.clone()
            else:
                entry.out.copy_(values)
                # The device may read it at any time until the host has waited.
                self.reading[self.done - 1] = entry.values, values.clone()

    def seen_by_device(self, values: Tensor) -> Tensor:
        """Host memory as the device sees it, with arrived values that the host has not seen."""
        arrived = [
            one for stream in streams for one in stream.unseen.values() if _overlap(one[0], values)
        ]
        found = values.clone() if arrived else values
        for out, late in arrived:
            offset = (out.data_ptr() - values.data_ptr()) // values.itemsize
            first, last = max(offset, 0), min(offset + out.numel(), values.numel())
            found[first:last] = late[first - offset : last - offset]
        return found

    def show(self, count: int) -> None:
        """The host has waited for the first `count` entries, and so for all that they follow."""
        first, self.shown = self.shown, max(count, self.shown)
        for place in range(first, count):
            entry = self.queue[place]
            if isinstance(entry, Event):
                entry.stream.show(entry.count)
            elif place in self.unseen:
                out, values = self.unseen.pop(place)
                out.copy_(values)
            elif place in self.reading:
                _expect_alike(*self.reading.pop(place))


streams: list[Stream] = []
waits: Counter[str] = Counter()
copies: Counter[str] = Counter()


def _expect_alike(source: Tensor, as_read: Tensor) -> None:
    if source.untyped_storage().nbytes():
        same = torch.equal(source.view(torch.uint8), as_read.view(torch.uint8))
        assert same, "host memory was changed while the device might still read it"


def _waiting() -> Iterator[_Copy]:
    for stream in streams:
        yield from (one for one in stream.queue[stream.done :] if isinstance(one, _Copy))


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


@contextmanager
def device() -> Iterator[None]:
    """Treat the host's memory as another one than the device's, and copy late between them."""
    before = offload.is_host_memory, crossing.side_stream
    offload.is_host_memory = tiers.is_host_memory = lambda device: False
    crossing.side_stream = lambda lane, device: Stream(device)  # type: ignore[assignment]
    streams.clear()
    crossing._crossings.clear()
    waits.clear()
    copies.clear()
    try:
        yield
        for stream in streams:
            for source, as_read in stream.reading.values():
                _expect_alike(source, as_read)
    finally:
        offload.is_host_memory, crossing.side_stream = before
        tiers.is_host_memory = offload.is_host_memory
        crossing._crossings.clear()
