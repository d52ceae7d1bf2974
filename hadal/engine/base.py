"""What every part of an engine stands on: its state, what it is made of, and what it tells."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from hadal.checkpoint.background import Saver
from hadal.checkpoint.live import COUNTERS, Live
from hadal.config import Config
from hadal.device import Event
from hadal.engine.collector import hold_collector
from hadal.engine.direct import DirectBackward
from hadal.engine.listeners import Listeners, options_of
from hadal.engine.loader import Reading, ShardedLoader
from hadal.engine.newcomers import Newcomers
from hadal.engine.parts import Counters, Cycle, Finding, Parts, Training
from hadal.engine.reading import Collate
from hadal.engine.topology import Topology
from hadal.engine.undecided import Undecided
from hadal.errors import UsageError
from hadal.optim.loss_scale import ScaleState, first_scale
from hadal.optim.step import Stepper
from hadal.zero import place


class Away(NamedTuple):
    """Memory of the device that was given back for a while."""

    whole: Tensor
    """All of a storage, as bytes."""
    contents: Tensor
    """What was in it, in host memory."""
    event: Event
    """From which on it is there."""
    pinned: bool
    """Whether the host memory is page-locked."""


class EngineBase(nn.Module):
    """The state of an engine, and what it tells of itself."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.model
        self._parts = parts
        self._training: Training | None = None
        self._loader = parts.loader
        self._listeners = Listeners(parts.listeners)
        self._batches = parts.batches
        self._scale: ScaleState = first_scale(parts.scale_rule)
        self._counters = Counters()
        self._cycle = Cycle()
        self._undecided: Undecided | None = None
        """The last update, until the host knows whether the device has skipped it."""
        self._skipped: Undecided | None = None
        """The last update, if the device has skipped it and that is not reported yet."""
        self._collector = hold_collector(self) if parts.holds_collector else None
        self._newcomers = Newcomers(parts.model, parts.runtime.bucket_of)
        self._saver = Saver(parts.world)
        self._is_compiled = False
        self._moved: list[Away] = []
        self._host_memory: list[tuple[Tensor, Event]] = []
        """Page-locked memory for the next time, from these events on."""
        self._direct = DirectBackward(self._begun_direct, parts.runtime)
        place.attend(parts.runtime, self)
        if parts.training is not None:
            self._train_with(parts.training)

    def _train_with(self, training: Training) -> None:
        """Have an optimizer from now on; it is stepped by `engine.step` alone."""
        self._training = training
        engine, rank = weakref.ref(self), self._parts.ranks.rank

        def refuse(*_: Any) -> None:
            found = engine()
            if found is not None and not found._cycle.stepping:
                raise UsageError(
                    f"rank {rank}: optimizer.step() was called by hand, which trains nothing: the"
                    " gradients and the weights are the engine's. Call engine.backward(loss) and"
                    " engine.step(), which steps the optimizer and the schedule"
                )

        training.optimizer.register_step_pre_hook(refuse)

    def _begun_direct(self) -> AbstractContextManager[None]:
        """Around a backward that the caller has started on a tensor."""
        raise NotImplementedError

    def _expect_alive(self) -> None:
        self._direct.end_left()
        if self._cycle.destroyed:
            raise UsageError("this engine was destroyed; use its module, or initialize anew")
        self._parts.runtime.expect_here()
        self._parts.hooks.end_left_over()

    @torch.no_grad()
    def _whole_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What `state_dict` gives, under the module's own names."""
        self._expect_alive()
        runtime = self._parts.runtime
        with runtime.whole(runtime.buckets):
            state = self.module.state_dict(*args, **kwargs)
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }

    def _live(self) -> Live:
        self._learn_of_skip()
        scalars = {COUNTERS: asdict(self._counters), "scale": list(self._scale)}
        return self._parts.live(self._training, self._loader, scalars, self._listeners)

    # ---- what it is made of ----------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; its param groups hold this rank's flat cuts of the master weights."""
        return self._training.optimizer if self._training else None

    @property
    def stepper(self) -> Stepper | None:
        """What steps the optimizer; None until there is something to train with."""
        return self._training.stepper if self._training else None

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule, if there is one."""
        return self._training.schedule if self._training else None

    @property
    def training_dataloader(self) -> ShardedLoader | None:
        """The loader over `training_data`, or else the first that `deepspeed_io` made to train."""
        return self._loader

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Iterable[Any] | None = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> ShardedLoader:
        """Make a loader over a data set, sharded over the ranks.

        Where the engine has no training loader yet, the first one of route "train" becomes it:
        checkpoints hold its place in the data.

        Args:
            dataset: a data set with length and items, or an `IterableDataset`.
            batch_size: samples of one batch on one rank; by default those of a micro-step.
            route: "train" shuffles, each epoch anew; "eval" and "predict" keep the order.
            pin_memory: pin batches in host memory where there is an accelerator.
            data_sampler: the order of this rank's samples, in place of the sharded one.
            collate_fn: makes a batch of samples; by default the one given to `initialize`.
            num_local_io_workers: processes of this rank that read ahead; None: none, it reads
                itself. (DeepSpeed takes two for each device where None is given.)

        Raises:
            UsageError: no such route, or what is given does not make a loader.
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
        )
        loader = self._parts.loading.loader(dataset, batch_size, reading)
        if route == "train" and self._loader is None:
            self._loader = loader
        return loader

    @property
    def config(self) -> Config:
        """The effective configuration."""
        return self._parts.config

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._parts.device

    # ---- counters --------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """Micro-steps so far."""
        return self._counters.micro_steps

    @property
    def global_steps(self) -> int:
        """Boundaries reached so far, skipped updates included."""
        return self._counters.global_steps

    @property
    def global_samples(self) -> int:
        """Samples that all ranks have consumed."""
        return self._counters.global_samples

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because gradients were not finite."""
        self._learn_of_skip()
        return self._counters.skipped_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one rank in one micro-step."""
        return self._batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of one update."""
        return self._batches.accumulation

    def train_batch_size(self) -> int:
        """Samples of all ranks in one update."""
        return self._batches.train

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of one update, by way of the micro-steps alone.

        Raises:
            UsageError: not a multiple of the samples of one micro-step on all ranks, or called in
                the middle of an update.
        """
        batches = self._batches.with_train(train_batch_size)
        if self._inside_accumulation or self._cycle.backwards:
            raise UsageError("set_train_batch_size was called inside an accumulation; step first")
        self._batches = batches
        self._begin_accumulation()

    @property
    def _inside_accumulation(self) -> bool:
        batches, micro_steps = self._batches, self._counters.micro_steps
        return batches.managed and micro_steps % batches.accumulation != 0

    def _begin_accumulation(self) -> None:
        """Count micro-steps so that the next one is the first of an update."""
        if self._batches.managed:
            self._counters.micro_steps = self._counters.global_steps * self._batches.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-step ends in an update.

        Where the caller owns the boundary (`managed_gradient_accumulation` false) that is so
        only while `step` makes the update: nobody knows it before.
        """
        if not self._batches.managed:
            return self._cycle.stepping
        if self._cycle.boundary is not None:
            return self._cycle.boundary
        return self._batches.ends_update(self._counters.micro_steps)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next backwards and `step` end an update; None counts again.

        Raises:
            UsageError: `managed_gradient_accumulation` is false: every `step` is an update.
        """
        if not self._batches.managed:
            raise UsageError(
                "set_gradient_accumulation_boundary was called, but managed_gradient_accumulation"
                " is false: every engine.step() is an update. Leave one of the two out."
            )
        self._cycle.boundary = is_boundary

    # ---- what the last update found --------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """The L2 norm of the last update's gradients before clipping.

        None before the first update, and where `compute_grad_norm` is false; infinity where the
        update was skipped because they overflowed.
        """
        self._learn_of_skip()
        return self._cycle.last.norm

    @property
    def clip_coefficient(self) -> float:
        """What the last update's gradients were multiplied with to clip them; 1.0: nothing."""
        self._learn_of_skip()
        return self._cycle.last.clip

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because gradients were not finite."""
        self._learn_of_skip()
        return self._cycle.last.overflow

    def _learn_of_skip(self) -> None:
        """Read whether the device has skipped the last update, and take back what followed it."""
        undecided, self._undecided = self._undecided, None
        if undecided is not None and undecided.was_skipped():
            undecided.undo()
            self._counters.skipped_steps += 1
            norm = None if undecided.found.measured is None else math.inf
            self._cycle.last = Finding(norm, overflow=True)
            self._skipped = undecided

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before backward (1.0 where nothing is fp16)."""
        return self._scale.scale

    @property
    def gradient_factor(self) -> float:
        """What the gradients that wait for an update are multiplied with."""
        factor = self._cycle.factor
        return self._scale.scale if factor is None else factor

    def get_lr(self) -> list[float]:
        """The present learning rate of each param group."""
        if self._training is None:
            return []
        return [float(group["lr"]) for group in self._training.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The present betas, or momentum, of each param group; 0.0 where it has neither."""
        return list(options_of(self._training.optimizer if self._training else None).momenta)

    def wall_clock_times(self) -> dict[str, float]:
        """Milliseconds of the last update on this rank; empty without `wall_clock_breakdown`.

        On an accelerator they are measured in its own work, without waiting for it: of the last
        update that it has finished.

        `forward` and `backward` are summed over the micro-steps; `backward` is `backward_inner`
        plus `backward_allreduce`, the work on and the wait for reductions; `step` is the update.
        """
        return dict(self._parts.clocks.last)

    # ---- who takes part --------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The ranks in which this one does each kind of shared work."""
        return self._parts.topology
