"""Storage of a model's shards between uses, bucket by bucket, and the disks for them."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from hadal.comm.start import get_local_world_size
from hadal.config import Config
from hadal.config.offload import Aio
from hadal.device import is_host_memory, total_memory
from hadal.errors import ModelError
from hadal.offload import BufferPool, DiskStore
from hadal.offload.walk import DiskOverlap
from hadal.optim.on_disk import DiskSteps
from hadal.zero.grouping import BucketPlan
from hadal.zero.offload import Offload
from hadal.zero.policy import STAGES, Tier

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}
# Maximum elements of one kind of state per read: more makes no disk faster.
_LARGEST_PART_NUMEL = 1 << 24
_WEIGHT_NBYTES = 4
# The share of a device's free memory that gradient sums may take if no key sets it.
_SHARE_OF_FREE = 1 / 8

_log = logging.getLogger(__name__)


def tiers_of(config: Config) -> Offload:
    """Return the configured tiers, without disks."""
    zero = config.zero_optimization
    weights, optimizer = zero.offload_param, zero.offload_optimizer
    cuts_weights = STAGES[zero.stage].weights and weights is not None
    return Offload(
        weights=_TIERS[weights.device] if cuts_weights and weights else Tier.DEVICE,
        optimizer=_TIERS[optimizer.device] if optimizer else Tier.DEVICE,
        pins_weights=bool(weights and weights.pin_memory),
        pins_optimizer=bool(optimizer and optimizer.pin_memory),
    )


def keeps_weights_off(config: Config, device: torch.device) -> bool:
    """Return whether weights leave the device's memory between uses."""
    tier = tiers_of(config).weights
    return tier is Tier.DISK or (tier is Tier.HOST and not is_host_memory(device))


def lands_gradients(config: Config, device: torch.device) -> bool:
    """Return whether gradients leave the device's memory for updates on the host."""
    return tiers_of(config).optimizer is not Tier.DEVICE and not is_host_memory(device)


def disk_steps_of(config: Config) -> DiskSteps:
    """Return how updates read and write state on the disk."""
    zero = config.zero_optimization
    section = zero.offload_optimizer
    if section is None:
        return DiskSteps()
    return DiskSteps(
        numel=min(zero.sub_group_size, _LARGEST_PART_NUMEL),
        buffer_count=section.buffer_count,
        overlap=DiskOverlap(
            reads_ahead=section.pipeline_read,
            writes_behind=section.pipeline_write,
        ),
        pins=section.pin_memory,
        clears_first=not section.fast_init,
    )


def weight_buffers_of(config: Config) -> tuple[int, int]:
    """Return the number of buffers for weights read from disk, and the bytes of one."""
    section = config.zero_optimization.offload_param
    return (
        (0, 0) if section is None else (section.buffer_count, section.buffer_size * _WEIGHT_NBYTES)
    )


def warn_of_one_thread(config: Config, device: torch.device) -> None:
    """Warn if the host updates a device's weights in one thread, with cores to spare."""
    if tiers_of(config).optimizer is Tier.DEVICE or is_host_memory(device):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = (cores or 1) // (get_local_world_size() or 1)
    if torch.get_num_threads() == 1 < threads:
        _log.warning(
            "zero_optimization.offload_optimizer: the host updates the weights in 1 thread"
            " (torchrun sets OMP_NUM_THREADS=1); start with `hadal run`, or set"
            " OMP_NUM_THREADS=%d, this rank's share of the cores",
            threads,
        )


class Offloading:
    """Choice of each bucket's storage; owns the disks.

    Weights are kept in host memory up to `max_in_cpu` elements on this rank, the rest on the
    disk. With a `ratio` below 1 some buckets are updated on the device.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._tiers = tiers_of(config)
        self._stores: dict[Path, DiskStore] = {}
        self._pool: BufferPool | None = None
        self._in_memory = 0
        self._on_host = 0
        self._seen = 0
        self._summed_nbytes = 0

    def open_disks(self) -> None:
        """Open every disk that may be needed, before ranks wait for each other.

        Raises:
            OffloadError: the configured directory cannot be written.
        """
        zero = self._config.zero_optimization
        for tier, section in (
            (self._tiers.weights, zero.offload_param),
            (self._tiers.optimizer, zero.offload_optimizer),
        ):
            if tier is Tier.DISK and section is not None:
                self._store(section.nvme_path)

    def of(self, plan: BucketPlan, shards: int, accumulate: torch.dtype) -> Offload:
        """Return the storage of a bucket in `shards` shards.

        `accumulate`: the dtype in which its gradients are summed over micro-steps.

        Raises:
            ModelError: its shard is larger than a buffer for the disk.
        """
        weights = self._weights_tier(plan, shards)
        later = self._optimizer_tier(plan)
        optimizer = later if plan.trainable else Tier.DEVICE
        if weights is later is Tier.DEVICE:
            return Offload()
        zero = self._config.zero_optimization
        on_disk = zero.offload_optimizer
        return replace(
            self._tiers,
            weights=weights,
            optimizer=optimizer,
            weights_disk=self._weights_store() if weights is Tier.DISK else None,
            optimizer_disk=self._store(on_disk.nvme_path if on_disk else None)
            if later is Tier.DISK
            else None,
            weights_pool=self._pool if weights is Tier.DISK else None,
            sums_on_device=self._sums_on_device(-(-plan.numel // shards) * accumulate.itemsize),
            optimizer_later=later,
        )

    def _sums_on_device(self, nbytes: int) -> bool:
        """Return whether the device keeps the sum of a bucket's gradients, of `nbytes`."""
        section = self._config.zero_optimization.offload_optimizer
        if section is None or section.accumulate_on is not None:
            return section is not None and section.accumulate_on == "device"
        room = total_memory(self._device).free * _SHARE_OF_FREE
        if self._summed_nbytes + nbytes > room:
            return False
        self._summed_nbytes += nbytes
        return True

    def _weights_tier(self, plan: BucketPlan, shards: int) -> Tier:
        tier, section = self._tiers.weights, self._config.zero_optimization.offload_param
        if tier is Tier.DEVICE or section is None or not plan.partition.weights:
            return Tier.DEVICE
        if tier is Tier.HOST:
            return tier
        numel = -(-plan.numel // shards)
        if self._in_memory + numel <= section.max_in_cpu:
            self._in_memory += numel
            return Tier.HOST
        if numel > section.buffer_size:
            raise ModelError(
                f"the shard of {plan.name} ({plan.members[0].name}, ...) has {numel} elements, but"
                " zero_optimization.offload_param.buffer_size is"
                f" {section.buffer_size}; raise it to {numel} at least"
            )
        return tier

    def _optimizer_tier(self, plan: BucketPlan) -> Tier:
        tier, section = self._tiers.optimizer, self._config.zero_optimization.offload_optimizer
        if tier is Tier.DEVICE or section is None:
            return Tier.DEVICE
        if not plan.trainable:
            # A later param group may train it: `ratio` counts only parameters trained at first.
            return tier if section.ratio == 1 else Tier.DEVICE
        numel = plan.numel
        self._seen += numel
        if section.ratio < 1 and self._on_host + numel > section.ratio * self._seen:
            return Tier.DEVICE
        self._on_host += numel
        return tier

    def _weights_store(self) -> DiskStore:
        section = self._config.zero_optimization.offload_param
        assert section is not None  # weights are on the disk only if it is set
        if self._pool is None:
            count, nbytes = weight_buffers_of(self._config)
            self._pool = BufferPool(count, nbytes, pinned=section.pin_memory)
        return self._store(section.nvme_path)

    def _store(self, nvme_path: str | None) -> DiskStore:
        assert nvme_path is not None  # the rules have looked
        path = Path(nvme_path)
        if path not in self._stores:
            section = self._config.aio or Aio()
            self._stores[path] = DiskStore(path, section)
        return self._stores[path]

    def close(self) -> None:
        """Remove all files of each disk, even if another disk fails."""
        with ExitStack() as closing:
            for store in self._stores.values():
                closing.callback(store.close)
            if self._pool is not None:
                closing.callback(self._pool.close)
