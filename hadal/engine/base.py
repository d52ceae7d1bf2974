"""Read access to an engine: its parts, its counters, and the findings of the last update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from hadal.config import Config
from hadal.data.loader import Reading, ShardedLoader
from hadal.data.reading import Collate
from hadal.engine.listeners import options_of
from hadal.engine.parts import Parts
from hadal.engine.session import Session
from hadal.engine.topology import Topology
from hadal.errors import UsageError
from hadal.optim.step import OptimizerStepper
from hadal.order import Order
from hadal.plugins.monitor.monitor import Monitor


class EngineBase(nn.Module):
    """Engine's parts, counters and findings, as users read them."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.model
        self._parts = parts
        self._session = Session(parts)

    # ---- components ------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; its param groups hold this rank's flat slices of the master weights."""
        return self._session.optimizer

    @property
    def stepper(self) -> OptimizerStepper | None:
        """The stepper of the optimizer; None until there is something to train with."""
        return self._session.training.stepper if self._session.training else None

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule, if there is one."""
        return self._session.training.schedule if self._session.training else None

    @property
    def training_dataloader(self) -> ShardedLoader | None:
        """The loader over `training_data`, or else the first training loader of `deepspeed_io`."""
        return self._session.loader

    def deepspeed_io(  # noqa: PLR0913 - the first arguments are DeepSpeed's
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Iterable[Any] | Order | None = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> ShardedLoader:
        """Make a loader over a data set, sharded over the ranks.

        If the engine has no training loader yet, the first one of route "train" becomes it:
        checkpoints save its position in the data.

        Args:
            dataset: a data set with length and items, or an `IterableDataset`.
            batch_size: samples of one batch on one rank; by default those of a micro-step.
            route: "train" shuffles anew each epoch; "eval" and "predict" keep the order.
            pin_memory: pin batches in host memory if there is an accelerator.
            data_sampler: this rank's samples in order, or an `Order` (`hadal.order`), in
                place of the sharded one.
            collate_fn: makes a batch of samples; by default the one given to `initialize`.
            num_local_io_workers: worker processes of this rank that read ahead; None: no
                workers. (DeepSpeed starts two for each device if None is given.)
            prefetch_factor: batches that each worker reads ahead; None: torch's default.
            persistent_workers: keep the workers from one epoch to the next.
            worker_init_fn: called in each worker with its number, before it reads.

        Raises:
            UsageError: no such route, or the arguments do not make a loader.
        """
        if route not in ("train", "eval", "predict"):
            raise UsageError(
                f'deepspeed_io(route={route!r}): expected "train", "eval" or "predict"'
            )
        reading = Reading(
            collate_fn=collate_fn,
            workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
            shuffle=route == "train",
            sampler=data_sampler,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            worker_init_fn=worker_init_fn,
        )
        loading = self._parts.loading
        if route == "train" and self._session.loader is None:
            loader = loading.training_loader(dataset, reading, batch_size)
        else:
            loader = loading.loader(dataset, batch_size, reading)
        if route == "train" and self._session.loader is None:
            self._session.loader = loader
        return loader

    @property
    def config(self) -> Config:
        """The effective configuration."""
        return self._parts.config

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._parts.device

    # ---- counters --------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """Micro-steps so far."""
        return self._session.counters.micro_steps

    @property
    def global_steps(self) -> int:
        """Boundaries reached so far, skipped updates included."""
        return self._session.counters.global_steps

    @property
    def global_samples(self) -> int:
        """Samples that all ranks have consumed."""
        return self._session.counters.global_samples

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because gradients were not finite."""
        self._session.learn_of_skip()
        return self._session.counters.skipped_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one rank in one micro-step."""
        return self._session.batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps of one update."""
        return self._session.batches.accumulation

    def train_batch_size(self) -> int:
        """Return the samples of all ranks in one update."""
        return self._session.batches.train

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of one update by changing its micro-steps alone.

        Raises:
            UsageError: not a multiple of the samples of one micro-step on all ranks, or called in
                the middle of an update.
        """
        batches = self._session.batches.with_train(train_batch_size)
        if any(one.name == "dynamic_batching" for one in self._session.listeners):
            raise UsageError(
                "set_train_batch_size: dynamic_batching makes packs for the train_batch_size of the"
                " configuration; change it there, and initialize again"
            )
        if self._session.is_inside_accumulation or self._session.cycle.backwards:
            raise UsageError("set_train_batch_size was called inside an accumulation; step first")
        self._session.batches = batches
        self._session.begin_accumulation()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-step ends in an update.

        If the caller owns the boundary (`managed_gradient_accumulation` false), that is true
        only while `step` makes the update: it is not known before.
        """
        return self._session.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next backwards and `step` end an update; None counts again.

        Raises:
            UsageError: `managed_gradient_accumulation` is false: every `step` is an update.
        """
        if not self._session.batches.managed:
            raise UsageError(
                "set_gradient_accumulation_boundary was called, but managed_gradient_accumulation"
                " is false: every engine.step() is an update. Leave one of the two out."
            )
        self._session.cycle.boundary = is_boundary

    # ---- results of the last update --------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the last update's gradients before clipping.

        None before the first update, and if `compute_grad_norm` is false; infinity if the
        update was skipped because they overflowed.
        """
        self._session.learn_of_skip()
        return self._session.cycle.last.norm

    @property
    def clip_coefficient(self) -> float:
        """The factor that clipped the last update's gradients; 1.0 if they were not clipped."""
        self._session.learn_of_skip()
        return self._session.cycle.last.clip

    @property
    def overflow(self) -> bool:
        """True if the last update was skipped because gradients were not finite."""
        self._session.learn_of_skip()
        return self._session.cycle.last.overflow

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward (1.0 if nothing is fp16)."""
        return self._session.scale.scale

    @property
    def gradient_factor(self) -> float:
        """The factor in the gradients that wait for an update."""
        return self._session.gradient_factor

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each param group."""
        return [float(rate) for rate in options_of(self._session.optimizer).rates]

    def get_mom(self) -> list[Any]:
        """Return the current betas, or momentum, of each param group; 0.0 if it has neither."""
        return list(options_of(self._session.optimizer).momenta)

    def wall_clock_times(self) -> dict[str, float]:
        """Return the last update's milliseconds on this rank; {} without `wall_clock_breakdown`.

        An accelerator times its own work, without a wait: these are the times of the last update
        that it has finished.

        `forward` and `backward` are summed over the micro-steps; `backward` is `backward_inner`
        plus `backward_allreduce`, the work on and the wait for reductions; `step` is the update.
        """
        return dict(self._parts.clocks.last)

    def state_nbytes(self) -> dict[str, int]:
        """Return the bytes of this rank's model states by kind, on the device and on the host.

        Optimizer state counts once it exists. State on a disk is not counted.
        """
        found = {"weights": 0, "masters": 0, "gradients": 0, "optimizer state": 0}
        for bucket in self._parts.runtime.buckets:
            partition, precision = bucket.partition, bucket.precision
            start, stop = bucket.span
            numel = {False: bucket.layout.numel, True: stop - start}
            found["weights"] += numel[partition.weights] * precision.compute.itemsize
            if bucket.trainable:
                found["gradients"] += numel[partition.gradients] * precision.accumulate.itemsize
                if precision.keeps_master:
                    found["masters"] += numel[True] * precision.master.itemsize
        optimizer = self._session.optimizer
        for state in optimizer.state.values() if optimizer else ():
            values = state.values()
            found["optimizer state"] += sum(v.nbytes for v in values if isinstance(v, Tensor))
        return found

    @property
    def monitor(self) -> Monitor:
        """The monitors of the configuration, for a program's own scalars.

        `engine.monitor.write_events([("Eval/loss", loss, engine.global_samples)])` writes them;
        `enabled` is true if any monitor is on. Ranks other than 0 write nothing.
        """
        return self._parts.monitor

    # ---- who takes part --------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The ranks in which this one does each kind of shared work."""
        return self._parts.topology
