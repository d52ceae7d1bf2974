"""A run of weights that rests as what a codec makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hadal.comm.codecs.codec import Codec
from hadal.offload.runs import RunCut
from hadal.zero.resting import Resting

# Values that are coded, and decoded, at a time: of a multiple of any block.
_PART_NUMEL = 1 << 20


class CodedRun:
    """1-D values as a few wires, of which any stretch can be read."""

    def __init__(self, values: Tensor, codec: Codec) -> None:
        self.numel = values.numel()
        self.dtype = values.dtype
        self.device = values.device
        self._codec = codec
        self.wires = [
            torch.empty(codec.wire_bytes(stop - start), dtype=torch.uint8, device=values.device)
            for start, stop in self._parts()
        ]
        self.write(values)

    def _parts(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.numel, _PART_NUMEL):
            yield start, min(start + _PART_NUMEL, self.numel)

    def write(self, values: Tensor) -> None:
        """Take over new values for all elements."""
        for (start, stop), wire in zip(self._parts(), self.wires, strict=True):
            self._codec.encode(values[start:stop].to(self.device), wire)

    def copy_to(self, place: Tensor) -> None:
        """Put all values into `place`, decoded where that is."""
        for (start, stop), wire in zip(self._parts(), self.wires, strict=True):
            self._codec.decode(wire.to(place.device, non_blocking=True), place[start:stop])

    def read(self) -> Tensor:
        """All values."""
        values = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.copy_to(values)
        return values

    def start_read(self, first: int, out: Tensor) -> None:
        """Fill `out` with the values from `first` on."""
        last = first + out.numel()
        for (start, stop), wire in zip(self._parts(), self.wires, strict=True):
            if start < last and first < stop:
                part = torch.empty(stop - start, dtype=self.dtype, device=self.device)
                self._codec.decode(wire, part)
                low, high = max(start, first), min(stop, last)
                out[low - first : high - first].copy_(part[low - start : high - start])


class CodedResting(Resting):
    """Weights that are not trained, held as fewer bytes; `values` are there inside `present`."""

    def __init__(self, name: str, values: Tensor, codec: Codec) -> None:
        super().__init__(name, values)
        self._values = None
        self._coded = CodedRun(values, codec)

    @property
    def comes_and_goes(self) -> bool:
        """Whether the values are in memory, as they are, inside `present` alone."""
        return True

    @property
    def held(self) -> list[Tensor]:
        """What it takes of memory."""
        return self._coded.wires

    @property
    def at_rest(self) -> Tensor | RunCut:
        """The values in memory, or what reads them part by part."""
        return RunCut(self._coded) if self._values is None else self._values

    @contextmanager
    def present(
        self, *, reads: bool = True, writes: bool = True, commits: bool = True
    ) -> Iterator[Tensor]:
        """Have the values in memory for a while; what is written into them is kept, coded."""
        if self._values is not None:
            yield self._values
            return
        self._values = self._coded.read()
        try:
            yield self._values
            if writes:
                self._coded.write(self._values)
        finally:
            self._values = None

    def replace(self, values: Tensor) -> None:
        """Take over new values for all elements."""
        if self._values is None:
            self._coded.write(values)
        else:
            self._values.copy_(values)

    def _copy_to(self, place: Tensor) -> None:
        if self._values is None:
            self._coded.copy_to(place)
        else:
            place.copy_(self._values)
