"""Policies of a configuration, as the frozen values that `assemble` passes to lower layers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from hadal.checkpoint.rules import Keep, Rules, StagingRules, Writing
from hadal.comm.codecs import Blockwise
from hadal.comm.start import get_local_world_size
from hadal.config import Config
from hadal.config.idle import saves_behind
from hadal.config.offload import Aio
from hadal.device import is_host_memory, total_memory
from hadal.engine.topology import Topology
from hadal.errors import ModelError, NotBuiltYetError, UsageError
from hadal.offload import BufferPool, DiskStore
from hadal.offload.tensors import DiskOverlap
from hadal.optim.on_disk import DiskSteps
from hadal.zero.bucket import Bucket
from hadal.zero.grouping import BucketPlan, LeafModules
from hadal.zero.offload import Offload
from hadal.zero.policy import (
    STAGES,
    Divergence,
    Feedback,
    Limits,
    Partition,
    Reduction,
    Tier,
    Transport,
)


class BatchSizes(NamedTuple):
    """Samples of one update. All numbers are integers: a batch that does not divide is refused."""

    micro: int
    """Samples of one rank's forward and backward."""
    accumulation: int
    """Micro-steps of one update."""
    data_parallel_size: int
    """Ranks that see different samples."""
    managed: bool = True
    """True if the engine counts micro-steps; else every `engine.step()` is an update."""

    @property
    def micro_step(self) -> int:
        """Samples of all ranks in one micro-step."""
        return self.micro * self.data_parallel_size

    @property
    def train(self) -> int:
        """Samples of all ranks in one update."""
        return self.micro_step * self.accumulation

    def ends_update(self, micro_steps: int) -> bool:
        """Return whether the micro-step that follows `micro_steps` others ends in an update."""
        return (micro_steps + 1) % self.accumulation == 0

    def consumed(self, backwards: int) -> int:
        """Return the samples of all ranks in one update of that many backwards.

        If the engine counts micro-steps, that is always the whole batch.
        """
        return self.train if self.managed else self.micro_step * backwards

    def with_train(self, train: object) -> BatchSizes:
        """Return a copy for another number of samples: only the accumulation changes.

        Raises:
            UsageError: not a multiple of the samples of one micro-step.
        """
        whole = isinstance(train, int) and not isinstance(train, bool)
        if not whole or train <= 0 or train % self.micro_step:  # type: ignore[operator]
            raise UsageError(
                f"set_train_batch_size({train!r}): expected a multiple of {self.micro_step}, which"
                f" is {self.micro} per device x {self.data_parallel_size} ranks;"
                " to change the samples of one device, initialize again"
            )
        return self._replace(accumulation=train // self.micro_step)  # type: ignore[operator]


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# On the wire a weight takes 0.508 of its bf16 bytes, and a gradient 0.266.
_CODED_WEIGHTS = Blockwise(8, 256)
_CODED_GRADIENTS = Blockwise(4, 128)


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the dtype of this name; None for None."""
    return None if name is None else _DTYPES[name]


def wire_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype of gradients on the wire; None is the dtype of their accumulation."""
    if config.sequence_parallel_size > 1:
        return dtype_named(config.seq_parallel_communication_data_type)
    return dtype_named(config.communication_data_type)


def partition_of(config: Config, ranks: int, stage: int | None, device: torch.device) -> Partition:
    """Return which states are sharded over the ranks, at the configured stage or at another one.

    A shard over one rank is whole: on one rank, every stage is stage 0, without its copies. But
    offloaded weights are still fetched and released, and gradients that leave the device need
    no memory there.
    """
    zero = config.zero_optimization
    row = STAGES[zero.stage if stage is None else stage]
    is_alone = ranks == 1 or (row.weights and zero.mics_shard_size == 1)
    if not is_alone or (row.weights and keeps_weights_off(config, device)):
        return row
    if row.gradients and lands_gradients(config, device):
        return row._replace(weights=False)
    return Partition()


def reduction_of(config: Config) -> Reduction:
    """Return how the gradients of all ranks are reduced."""
    zero = config.zero_optimization
    return Reduction(
        adds_up=config.gradient_allreduce_op == "sum",
        prescales=config.prescale_gradients,
        predivides_by=config.gradient_predivide_factor,
        sequence_parallel_size=config.sequence_parallel_size,
        inside_backward=zero.grad_hooks,
        refuses_unused=not zero.ignore_unused_parameters,
    )


def transport_of(config: Config, shards: int) -> Transport:
    """Return how weights and gradients in `shards` shards are sent."""
    zero = config.zero_optimization
    at_a_time = zero.allgather_bucket_size or Transport().refresh_numel
    if shards == 1:
        return Transport(refresh_numel=at_a_time)
    loco = zero.zeropp_loco_param
    return Transport(
        gather=_CODED_WEIGHTS if zero.zero_quantized_weights else None,
        frozen=_CODED_WEIGHTS if zero.zero_quantized_nontrainable_weights else None,
        refresh_numel=at_a_time,
        refreshes_late=bool(zero.overlap_comm),
        reduce=_CODED_GRADIENTS if zero.zero_quantized_gradients else None,
        feedback=None if loco is None else Feedback(loco.err_beta, loco.reset_T),
    )


def batch_sizes_of(config: Config, topology: Topology) -> BatchSizes:
    """Return the samples of one update."""
    return BatchSizes(
        micro=config.train_micro_batch_size_per_gpu,
        accumulation=config.gradient_accumulation_steps,
        data_parallel_size=topology.data_parallel.size,
        managed=config.managed_gradient_accumulation,
    )


def saving_of(config: Config, topology: Topology, buckets: Sequence[Bucket]) -> Rules:
    """Return how checkpoints are written and read, and which ones a save keeps.

    Raises:
        NotBuiltYetError: the files of DeepSpeed are requested of a model in parts.
    """
    section, zero, writer = config.checkpoint, config.zero_optimization, config.checkpoint.writer
    has_experts = any(bucket.ranks != topology.sharding for bucket in buckets)
    if section.deepspeed_files and (topology.model_parallel_size > 1 or has_experts):
        raise NotBuiltYetError(
            "checkpoint.deepspeed_files: DeepSpeed's files of a model in parts (tensor parallelism,"
            " a pipeline, experts) are not built yet; remove the key, and convert checkpoints with"
            " `hadal checkpoint export --format deepspeed-universal`"
        )
    return Rules(
        verifies=section.verify_checksums,
        keep=Keep(section.keep_last, section.keep_hours),
        tag_validation=section.tag_validation,
        prefers_universal=section.load_universal,
        is_node_local=section.use_node_local_storage,
        is_async=saves_behind(config),
        staging=StagingRules(
            None if section.staging.folder is None else Path(section.staging.folder),
            section.staging.size,
        ),
        writing=Writing()
        if writer is None
        else Writing(writer.io_buffer_size, writer.io_buffer_double, writer.show_statistics),
        uses_masters=zero.load_from_fp32_weights,
        stage=zero.stage,
        cuts_weights=STAGES[zero.stage].weights,
        gathers_weights=zero.stage3_gather_16bit_weights_on_model_save,
        writes_deepspeed=section.deepspeed_files,
    )


def limits_of(config: Config, shards: int = 1) -> Limits:
    """Return the limits of bucket size, persistence, prefetch and reuse.

    `shards`: the ranks over which a bucket is sharded.
    """
    zero = config.zero_optimization
    largest = zero.reduce_bucket_size
    if STAGES[zero.stage].weights:
        # Each use gathers a whole bucket.
        largest = min(largest, zero.allgather_bucket_size or largest)
        offload = zero.offload_param
        if offload is not None and offload.device == "nvme":
            # A buffer for the disk holds a rank's shard of a bucket.
            largest = max(1, min(largest, offload.buffer_size * shards))
    return Limits(
        bucket_numel=largest,
        persistence_numel=zero.stage3_param_persistence_threshold,
        persistent_total_numel=zero.stage3_model_persistence_threshold,
        live_numel=zero.stage3_max_live_parameters,
        reuse_numel=zero.stage3_max_reuse_distance,
        prefetch_numel=0 if zero.stage3_allgather_sequential else zero.stage3_prefetch_bucket_size,
        overlap=bool(zero.overlap_comm),
    )


def leaves_of(config: Config) -> LeafModules:
    """Return which modules are gathered as a whole."""
    leaf = config.zero_optimization.leaf_module
    return LeafModules(
        classes=tuple(leaf.classes),
        names=tuple(leaf.names),
        name_suffixes=tuple(leaf.name_suffixes),
        granularity_numel=config.zero_optimization.stage3_module_granularity_threshold,
    )


def divergence_of(config: Config) -> Divergence:
    """Return the policy for ranks and updates that take different paths through the model."""
    zero = config.zero_optimization
    return Divergence(
        is_expected=zero.divergent_ranks is True,
        is_tolerated=zero.divergent_ranks is not False,
        reports_each=zero.log_trace_cache_warnings,
    )


def budget_of(config: Config, device: torch.device) -> int | None:
    """Return the bytes that may be in use on a device; None if nothing limits them."""
    budget = config.activation_checkpointing.memory_budget
    if budget is None:
        return None
    return int(budget * total_memory(device).total) if budget <= 1 else int(budget)


# Maximum elements of one kind of state per read: more makes no disk faster.
_LARGEST_PART_NUMEL = 1 << 24
_WEIGHT_NBYTES = 4
# The share of a device's free memory that gradient sums may take if no key sets it.
_SHARE_OF_FREE = 1 / 8

_log = logging.getLogger(__name__)


# ---- tiers: where states are between uses --------------------------------------------------------


def tiers_of(config: Config) -> Offload:
    """Return the configured tiers, without disks."""
    zero = config.zero_optimization
    weights, optimizer = zero.offload_param, zero.offload_optimizer
    cuts_weights = STAGES[zero.stage].weights and weights is not None
    return Offload(
        weights=Tier(weights.device) if cuts_weights and weights else Tier.DEVICE,
        optimizer=Tier(optimizer.device) if optimizer else Tier.DEVICE,
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
            reads_ahead=section.pipeline_read, writes_behind=section.pipeline_write
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
        return self._tiers._replace(
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
