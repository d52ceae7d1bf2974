"""A run of a bucket's values where it rests: in memory for good, or on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.faults import told_to_all
from hadal.comm.pending import Pending
from hadal.device import Event, host_empty, is_host_memory
from hadal.errors import OffloadError, ShardedAccessError
from hadal.offload.buffers import BufferPool
from hadal.offload.crossing import Crossing, crossing_of
from hadal.offload.requests import Request
from hadal.offload.runs import DiskRun, RunCut
from hadal.offload.store import DiskStore
from hadal.zero.policy import Residence, Tier


@dataclass(frozen=True, slots=True)
class Home:
    """Where the shards of one bucket rest, and the disks for what rests there."""

    residence: Residence = field(default_factory=Residence)
    weights_disk: DiskStore | None = None
    optimizer_disk: DiskStore | None = None
    weights_pool: BufferPool | None = None
    """What weights are read from the disk into."""
    sums_on_device: bool = False
    """Whether sharded gradients are summed up on the device, and leave it once an update."""
    later: Tier = Tier.DEVICE
    """Where masters and the optimizer's memory rest of what is frozen now and trained later."""

    def when_trained(self) -> Home:
        """The home of parameters that are trained from now on."""
        return replace(self, residence=replace(self.residence, optimizer=self.later))

    @property
    def reads_ahead(self) -> int:
        """How many buckets of weights may be on their way from the disk ahead of their gathers."""
        return 0 if self.weights_pool is None else self.weights_pool.count

    @property
    def disk_of_state(self) -> DiskStore | None:
        """The disk that masters and the optimizer's memory rest on, if they do."""
        return self.optimizer_disk if self.residence.optimizer is Tier.DISK else None

    def as_one(self, ranks: Ranks, what: str) -> AbstractContextManager[None]:
        """Around what a disk may refuse to one of these ranks alone: it then fails on all of them.

        No other collective is called inside. Where nothing rests on a disk, none is.
        """
        if self.weights_disk is None and self.optimizer_disk is None:
            return nullcontext()
        return told_to_all(ranks, what, OffloadError)

    def steps_on(self, device: torch.device) -> torch.device:
        """Where updates are made of what computes on `device`."""
        return torch.device("cpu") if self.lands_off(device) else device

    def lands_off(self, device: torch.device) -> bool:
        """Whether gradients leave the memory of `device`, to be summed up on the host."""
        return self.residence.optimizer is not Tier.DEVICE and not is_host_memory(device)

    def crossing(self, device: torch.device) -> Crossing | None:
        """The ways between `device` and the host; None where one memory serves both."""
        if is_host_memory(device):
            return None
        return crossing_of(
            device, pins=self.residence.pins_weights or self.residence.pins_optimizer
        )

    def parts_master(self, device: torch.device, *, is_cut: bool) -> bool:
        """Whether a master is kept apart from weights of its own dtype.

        On the disk it always is: there an update that fails can be taken back.
        """
        weights, optimizer = self.residence.weights, self.residence.optimizer
        if optimizer is Tier.DISK or (is_cut and weights is Tier.DISK):
            return True
        in_host = is_cut and weights is Tier.HOST and not is_host_memory(device)
        return in_host != self.lands_off(device)

    def rest_weights(self, name: str, values: Tensor, *, is_cut: bool) -> Resting:
        """A view of whole weights, or a shard of its own where they are cut."""
        if not is_cut:
            return Resting(name, values)
        tier, crossing = self.residence.weights, self.crossing(values.device)
        if tier is Tier.DISK:
            return Resting(name, values, self.weights_disk, self.weights_pool, crossing)
        if tier is Tier.HOST and crossing is not None:
            mine = _in_host(values, pinned=self.residence.pins_weights)
            return Resting(name, mine, crossing=crossing)
        return Resting(name, values.clone())

    def rest_master(self, name: str, values: Tensor) -> Resting:
        """Values that the optimizer updates; `values` may be kept."""
        if self.residence.optimizer is Tier.DISK:
            return Resting(name, values, self.optimizer_disk)
        if self.lands_off(values.device):
            # Not page-locked: what leaves it is cast on its way, and page-locked there.
            return Resting(name, _in_host(values, pinned=False))
        return Resting(name, values)

    def gradient_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory for the mean of gradients that leave the device; uninitialised."""
        return host_empty(numel, dtype, pinned=self.residence.pins_optimizer)


def _in_host(values: Tensor, *, pinned: bool) -> Tensor:
    return host_empty(values.numel(), values.dtype, pinned=pinned).copy_(values)


class Resting:
    """1-D values of one bucket on this rank.

    In memory they are `values`, always. On the disk they are `values` only inside `present`.
    """

    def __init__(
        self,
        name: str,
        values: Tensor,
        disk: DiskStore | None = None,
        pool: BufferPool | None = None,
        crossing: Crossing | None = None,
    ) -> None:
        self.name = name
        self._crossing = crossing
        self._busy: Event | None = None
        """What is under way with the values, in host memory."""
        self.numel = values.numel()
        self.dtype = values.dtype
        self.run: DiskRun | None = None
        self._values: Tensor | None = values
        self._pool = pool
        self._ahead: _Reading | None = None
        if disk is not None:
            self.run = DiskRun(disk, name, values.numel(), values.dtype)
            self.run.write(values)
            self._values = None

    @property
    def is_on_disk(self) -> bool:
        """Whether the values rest in a file."""
        return self.run is not None

    @property
    def comes_and_goes(self) -> bool:
        """Whether the values are in memory, as they are, inside `present` alone."""
        return self.run is not None

    @property
    def is_away(self) -> bool:
        """Whether the values are not in memory as they are."""
        return self._values is None

    @property
    def values(self) -> Tensor:
        """The values, which are in memory.

        Raises:
            ShardedAccessError: they are away.
        """
        if self._values is None:
            raise ShardedAccessError(
                f"{self.name} were read while they rest elsewhere; this is a fault of Hadal's"
                " own: please report it with the lines above"
            )
        if self._busy is not None:
            # Whoever asks may write.
            self._busy.wait_on_host()
            self._busy = None
        return self._values

    @property
    def held(self) -> list[Tensor]:
        """What it takes of memory while nobody uses it."""
        return [] if self._values is None else [self._values]

    @property
    def at_rest(self) -> Tensor | RunCut:
        """The values in memory, or where they rest on the disk."""
        if self._values is not None:
            return self.values
        assert self.run is not None  # they are away
        return RunCut(self.run)

    @contextmanager
    def present(
        self, *, reads: bool = True, writes: bool = True, commits: bool = True
    ) -> Iterator[Tensor]:
        """Have the values in memory for a while; what is written into them is kept.

        Without `reads` they begin as zeros; without `writes` nothing is kept; without `commits` it
        counts only when the run is committed. Inside another `present`, that one decides.
        """
        if self.run is None or self._values is not None:
            yield self.values
            return
        self._values = self.run.read() if reads else torch.zeros(self.numel, dtype=self.dtype)
        try:
            yield self._values
            if writes:
                self.forget_ahead()
                self.run.write_next(self._values)
                if commits:
                    self.run.commit()
        finally:
            self._values = None

    def holds(self, values: Tensor) -> bool:
        """Whether these are the values, bit for bit. The disk is read for it."""
        with self.present(writes=False) as mine:
            # Compared as words: 16-bit floats are compared one by one, four times as slow.
            other = values.to(mine.device)
            return torch.equal(mine.view(torch.int64), other.view(torch.int64))

    def replace(self, values: Tensor) -> None:
        """Take over new values for all elements."""
        if self.run is not None and self._values is None:
            self.forget_ahead()
            self.run.write(values)
        else:
            self.values.copy_(values)

    def free(self) -> None:
        """Give room on the disk back."""
        if self.run is not None:
            self.forget_ahead()
            self.run.free()

    # ---- on the way to a gather ------------------------------------------------------------------

    def fill(self, place: Tensor, gather: Callable[[], Pending]) -> Pending:
        """Put the values into `place`, and start the gather that needs them there."""
        if self._crossing is None:
            self._copy_to(place)
            return gather()
        source, reading = self._source()
        arrival = self._crossing.bring(source, place, after=self._busy)
        if reading is not None:
            reading.pool.give_back(reading.buffer, arrival.event)
        elif self._values is not None:
            self._busy = arrival.event
        pending = arrival.then(gather)
        # Alone there is nothing to wait for but the values.
        return Pending(pending.label, [arrival]) if pending.done else pending

    def _copy_to(self, place: Tensor) -> None:
        source, reading = self._source()
        try:
            place.copy_(source, non_blocking=True)
        finally:
            if reading is not None:
                reading.pool.give_back(reading.buffer)

    def _source(self) -> tuple[Tensor, _Reading | None]:
        """The values in memory, and the buffer that they lie in if they were read."""
        if self._values is not None:
            return self._values, None
        self.start_reading()
        if self._ahead is None:
            assert self.run is not None  # it is away
            return self.run.read(), None
        reading, self._ahead = self._ahead, None
        try:
            if reading.request is not None:
                reading.request.wait()
        except BaseException:
            reading.pool.give_back(reading.buffer)
            raise
        return reading.values, reading

    @property
    def lies_off(self) -> bool:
        """Whether the values lie in another memory than the device's, when they are there."""
        return self._crossing is not None

    def land(self, start: int, values: Tensor) -> None:
        """Take over new values, cast, from the device's memory for the elements from `start` on."""
        if self._crossing is None or self.run is not None:
            self.values[start : start + values.numel()].copy_(values)
            return
        assert self._values is not None  # they rest in host memory
        out = self._values[start : start + values.numel()]
        self._busy = self._crossing.land(values.to(self.dtype, copy=True), out, after=self._busy)

    def start_reading(self) -> None:
        """Begin to read the disk for the next gather, where a buffer is free."""
        if self._values is not None or self._ahead is not None or self._pool is None:
            return
        assert self.run is not None  # it is away
        if self._pool.has_free():
            buffer = self._pool.take()
            out = buffer[: self.numel * self.dtype.itemsize].view(self.dtype)
            self._ahead = _Reading(self._pool, buffer, out, self.run.start_read(0, out))

    def forget_ahead(self) -> None:
        """What is read ahead is stale, or not wanted any more; nor is it whether that failed."""
        if self._ahead is not None:
            reading, self._ahead = self._ahead, None
            if reading.request is not None:
                with suppress(OffloadError):
                    reading.request.wait()
            reading.pool.give_back(reading.buffer)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Values on their way from the disk."""

    pool: BufferPool
    buffer: Tensor
    values: Tensor
    """The part of the buffer that is filled."""
    request: Request | None
