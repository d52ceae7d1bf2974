"""Offloading: the tier that stores a bucket's shards between uses (device, host or disk)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.codecs.codec import Codec
from hadal.comm.faults import raised_on_all
from hadal.device import host_empty, is_host_memory
from hadal.errors import OffloadError
from hadal.offload.buffers import BufferPool
from hadal.offload.crossing import Crossing, crossing_of
from hadal.offload.store import DiskStore
from hadal.offload.tensors import DiskTensor
from hadal.zero.policy import Tier
from hadal.zero.stored import EncodedTensor, Stored


@dataclass(frozen=True, slots=True)
class Offload:
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
        return replace(self, optimizer=self.optimizer_later)

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
