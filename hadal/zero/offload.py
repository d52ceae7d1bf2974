"""Storage of a bucket's shards between uses: in device or host memory, on a disk, or encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.codecs import Codec
from hadal.comm.faults import raised_on_all
from hadal.comm.pending import Pending
from hadal.device import Event, host_empty, is_host_memory, waiting_for
from hadal.errors import OffloadError, ShardedAccessError
from hadal.offload.buffers import BufferPool
from hadal.offload.crossing import Crossing, crossing_of
from hadal.offload.requests import IoRequest
from hadal.offload.store import DiskStore
from hadal.offload.tensors import DiskTensor, StoredSlice
from hadal.zero.policy import Tier

# The number of values encoded or decoded at a time: a multiple of any codec's block.
_BLOCK_NUMEL = 1 << 20


class EncodedTensor:
    """1-D values of untrained parameters, stored in encoded form."""

    def __init__(self, values: Tensor, codec: Codec) -> None:
        self.numel = values.numel()
        self.dtype = values.dtype
        self._device = values.device
        self._codec = codec
        self._blocks = list(pairwise([*range(0, self.numel, _BLOCK_NUMEL), self.numel]))
        self.wires = [
            torch.empty(codec.wire_bytes(stop - start), dtype=torch.uint8, device=values.device)
            for start, stop in self._blocks
        ]
        self.write(values)

    def write(self, values: Tensor) -> None:
        """Encode new values for all elements."""
        for (start, stop), wire in zip(self._blocks, self.wires, strict=True):
            self._codec.encode(values[start:stop].to(self._device), wire)

    def copy_to(self, out: Tensor) -> None:
        """Decode all values into `out`, on its device."""
        for (start, stop), wire in zip(self._blocks, self.wires, strict=True):
            self._codec.decode(wire.to(out.device, non_blocking=True), out[start:stop])

    def read(self) -> Tensor:
        """Return all values, decoded."""
        values = torch.empty(self.numel, dtype=self.dtype, device=self._device)
        self.copy_to(values)
        return values

    def start_read(self, first: int, out: Tensor) -> None:
        """Fill `out` with the values from `first` on."""
        last = first + out.numel()
        for (start, stop), wire in zip(self._blocks, self.wires, strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                block = torch.empty(stop - start, dtype=self.dtype, device=self._device)
                self._codec.decode(wire, block)
                out[low - first : high - first].copy_(block[low - start : high - start])


class _ReadAhead:
    """A read from the disk into a buffer of a pool, ahead of its use."""

    def __init__(self, source: DiskTensor, pool: BufferPool) -> None:
        self._source = source
        self._pool = pool
        self._buffer: Tensor | None = None
        self._request: IoRequest | None = None

    def start(self) -> None:
        """Begin to read if a buffer is free."""
        if self._buffer is None and self._pool.has_free():
            self._buffer = self._pool.take()
            self._request = self._source.start_read(0, self._values_in(self._buffer))

    def take(self) -> tuple[Tensor, Callable[[Event | None], None]] | None:
        """Wait for the values; None if no buffer is free.

        The second result gives the buffer back: call it with the event after which it may be
        reused.
        """
        self.start()
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return None
        try:
            if self._request is not None:
                self._request.wait()
        except BaseException:
            self._pool.give_back(buffer)
            raise
        return self._values_in(buffer), lambda after: self._pool.give_back(buffer, after)

    def drop(self) -> None:
        """Drop the data read, which is stale or not needed any more."""
        with suppress(OffloadError):  # a failure does not matter then
            found = self.take() if self._buffer is not None else None
            if found is not None:
                found[1](None)

    def _values_in(self, buffer: Tensor) -> Tensor:
        source = self._source
        return buffer[: source.numel * source.dtype.itemsize].view(source.dtype)


class Stored:
    """1-D values of one bucket on this rank, as they are stored between uses.

    Without a `backing` they are always in memory, as `values`. With one (a disk or encoded bytes,
    which already contain them) they are in memory only inside `present`.

    Args:
        name: their name in errors.
        values: the values, which are kept if there is no backing.
        backing: the source from which they are loaded.
        pool: buffers to read a disk into before a gather needs the values.
        crossing: the copies to the device, if the values are stored in other memory.
    """

    def __init__(
        self,
        name: str,
        values: Tensor,
        backing: DiskTensor | EncodedTensor | None = None,
        pool: BufferPool | None = None,
        crossing: Crossing | None = None,
    ) -> None:
        self.name = name
        self.numel = values.numel()
        self.dtype = values.dtype
        self._values = values if backing is None else None
        self._backing = backing
        self._crossing = crossing
        self._ahead = None
        if pool is not None and isinstance(backing, DiskTensor):
            self._ahead = _ReadAhead(backing, pool)
        self._busy: Event | None = None
        """The end of the copies between the values in host memory and the device."""

    @property
    def on_disk(self) -> DiskTensor | None:
        """The tensor on the disk; None if the values are stored elsewhere."""
        return self._backing if isinstance(self._backing, DiskTensor) else None

    @property
    def loads_on_use(self) -> bool:
        """Return True if the values are in memory only inside `present`."""
        return self._backing is not None

    @property
    def is_present(self) -> bool:
        """Return True if the values are in memory now."""
        return self._values is not None

    @property
    def is_offloaded(self) -> bool:
        """Return True if the values, once loaded, are in other memory than the device's."""
        return self._crossing is not None

    @property
    def values(self) -> Tensor:
        """The values, which must be in memory.

        Raises:
            ShardedAccessError: they are not in memory.
        """
        if self._values is None:
            raise ShardedAccessError(
                f"{self.name} were used while they were not in memory; this is a bug in Hadal:"
                " please report it with the lines above"
            )
        if self._busy is not None:
            # The caller may write.
            self._busy.wait_on_host()
            self._busy = None
        return self._values

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that hold the values between uses."""
        if self._values is not None:
            return [self._values]
        return self._backing.wires if isinstance(self._backing, EncodedTensor) else []

    @property
    def source(self) -> Tensor | StoredSlice:
        """The values in memory, or an object that reads them in parts."""
        if self._values is not None:
            return self.values
        assert self._backing is not None  # they are not loaded
        return StoredSlice(self._backing)

    @contextmanager
    def present(
        self, *, reads: bool = True, writes: bool = True, commits: bool = True
    ) -> Iterator[Tensor]:
        """Load the values for the block, and keep what it writes into them.

        Without `reads` they start as zeros; without `writes` nothing is kept; without `commits`
        writes to a disk take effect only when its tensor is committed. Of nested calls the
        outermost decides.
        """
        if self._backing is None or self._values is not None:
            yield self.values
            return
        if reads:
            self._values = self._backing.read()
        else:
            self._values = torch.zeros(self.numel, dtype=self.dtype)
        try:
            yield self._values
            if writes:
                self._write(self._values, commits=commits)
        finally:
            self._values = None

    def holds(self, values: Tensor) -> bool:
        """Return True if the values equal these bit for bit; may read a disk."""
        with self.present(writes=False) as mine:
            # Compared as words, because comparing 16-bit floats takes four times as long.
            other = values.to(mine.device)
            with waiting_for(self.name, mine.device):
                return torch.equal(mine.view(torch.int64), other.view(torch.int64))

    def replace(self, values: Tensor) -> None:
        """Replace all values."""
        if self._values is None:
            self._write(values)
        else:
            self.values.copy_(values)

    def _write(self, values: Tensor, *, commits: bool = True) -> None:
        self.forget_ahead()
        assert self._backing is not None  # values in memory are written in place
        if isinstance(self._backing, EncodedTensor):
            self._backing.write(values)
            return
        self._backing.write_next(values)
        if commits:
            self._backing.commit()

    def free(self) -> None:
        """Free the space on the disk."""
        if isinstance(self._backing, DiskTensor):
            self.forget_ahead()
            self._backing.free()

    # ---- for a gather ----------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Begin to read the disk for the next gather, if a buffer is free."""
        if self._ahead is not None and self._values is None:
            self._ahead.start()

    def forget_ahead(self) -> None:
        """Drop data that was read ahead."""
        if self._ahead is not None:
            self._ahead.drop()

    def fill(self, out: Tensor, gather: Callable[[], Pending]) -> Pending:
        """Copy the values into `out`, on the device, and start the gather that needs them."""
        if self._values is None and isinstance(self._backing, EncodedTensor):
            self._backing.copy_to(out)
            return gather()
        source, give_back = self._values, None
        if source is None and self._ahead is not None:
            source, give_back = self._ahead.take() or (None, None)
        if source is None:
            assert self._backing is not None  # they are not loaded
            source = self._backing.read()
        if self._crossing is None:
            out.copy_(source, non_blocking=True)
            if give_back is not None:
                give_back(None)
            return gather()
        arrival = self._crossing.bring(source, out, after=self._busy)
        if give_back is not None:
            give_back(arrival.event)
        elif self._values is not None:
            self._busy = arrival.event
        pending = arrival.then(gather)
        # A single rank only waits for the values.
        return Pending(pending.label, [arrival]) if pending.done else pending

    def land(self, start: int, values: Tensor) -> None:
        """Cast and write new values from the device to the elements from `start` on."""
        if self._crossing is None or self._backing is not None:
            self.values[start : start + values.numel()].copy_(values)
            return
        assert self._values is not None  # they are in host memory
        out = self._values[start : start + values.numel()]
        self._busy = self._crossing.land(values.to(self.dtype, copy=True), out, after=self._busy)


class Offload(NamedTuple):
    """The tiers of one bucket's shards (ZeRO-Offload, Ren 2021; ZeRO-Infinity, Rajbhandari 2021).

    By default everything is on the device.
    """

    weights: Tier = Tier.DEVICE
    """Weights that are sharded between uses."""
    optimizer: Tier = Tier.DEVICE
    """Masters and optimizer state. If they are off the device, the host makes the update."""
    pins_weights: bool = False
    """True: host memory for weights is pinned."""
    pins_optimizer: bool = False
    """True: host memory for gradients and optimizer state is pinned."""
    sums_on_device: bool = False
    """True: sharded gradients are summed on the device, and leave it once per update."""
    optimizer_later: Tier = Tier.DEVICE
    """The tier of masters and state for parameters that are frozen now and trained later."""
    weights_disk: DiskStore | None = None
    weights_pool: BufferPool | None = None
    """Buffers to read weights from the disk into."""
    optimizer_disk: DiskStore | None = None

    def when_trained(self) -> Offload:
        """Return the settings for parameters that are trained from now on."""
        return self._replace(optimizer=self.optimizer_later)

    @property
    def reads_ahead(self) -> int:
        """The number of buckets whose weights may be read from the disk ahead of their gathers."""
        return 0 if self.weights_pool is None else self.weights_pool.count

    @property
    def disk_of_state(self) -> DiskStore | None:
        """The disk that stores masters and optimizer state, if one does."""
        return self.optimizer_disk if self.optimizer is Tier.DISK else None

    def as_one(self, ranks: Ranks, what: str) -> AbstractContextManager[None]:
        """Return a context in which a disk error on one of these ranks is raised on all.

        No other collective may be called in it. Without a disk it calls none.
        """
        if self.weights_disk is None and self.optimizer_disk is None:
            return nullcontext()
        return raised_on_all(ranks, what, OffloadError)

    def steps_on(self, device: torch.device) -> torch.device:
        """Return the device that makes the updates for buckets on `device`."""
        return torch.device("cpu") if self.lands_off(device) else device

    def lands_off(self, device: torch.device) -> bool:
        """Return True if gradients are moved from `device` to the host for the update."""
        return self.optimizer is not Tier.DEVICE and not is_host_memory(device)

    def crossing(self, device: torch.device) -> Crossing | None:
        """Return the crossing between `device` and the host; None if they share their memory."""
        if is_host_memory(device):
            return None
        return crossing_of(device, pins=self.pins_weights or self.pins_optimizer)

    def parts_master(self, device: torch.device, *, is_cut: bool) -> bool:
        """Return True if a master is kept separately from weights of the same dtype.

        On the disk it always is, so that a failed update can be undone.
        """
        if self.optimizer is Tier.DISK or (is_cut and self.weights is Tier.DISK):
            return True
        in_host = is_cut and self.weights is Tier.HOST and not is_host_memory(device)
        return in_host != self.lands_off(device)

    def store_weights(
        self, name: str, values: Tensor, *, is_cut: bool, encodes: Codec | None
    ) -> Stored:
        """Store my shard, or whole weights; `values` may be kept, and `encodes` is for memory."""
        if not is_cut:
            return Stored(name, values)
        crossing = self.crossing(values.device)
        if self.weights is Tier.DISK:
            assert self.weights_disk is not None  # it is their tier
            on_disk = DiskTensor.of(self.weights_disk, name, values)
            return Stored(name, values, on_disk, self.weights_pool, crossing)
        if self.weights is Tier.HOST and crossing is not None:
            values = _in_host(values, pinned=self.pins_weights)
        else:
            crossing = None
        if encodes is not None:
            return Stored(name, values, EncodedTensor(values, encodes))
        return Stored(name, values, crossing=crossing)

    def store_master(self, name: str, values: Tensor) -> Stored:
        """Store values that the optimizer updates; `values` may be kept."""
        if self.optimizer is Tier.DISK:
            assert self.optimizer_disk is not None  # it is their tier
            return Stored(name, values, DiskTensor.of(self.optimizer_disk, name, values))
        if self.lands_off(values.device):
            # Not pinned: new weights are cast into pinned staging buffers to be sent.
            values = _in_host(values, pinned=False)
        return Stored(name, values)

    def gradient_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised host memory for the mean of gradients that leave the device."""
        return host_empty(numel, dtype, pinned=self.pins_optimizer)


def _in_host(values: Tensor, *, pinned: bool) -> Tensor:
    return host_empty(values.numel(), values.dtype, pinned=pinned).copy_(values)
