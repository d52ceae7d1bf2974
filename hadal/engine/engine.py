"""The engine: a module that trains itself with forward, backward and step."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from hadal.config import Config
from hadal.data.loader import Reading, ShardedLoader
from hadal.data.reading import Collate
from hadal.device import give_back_freed_memory
from hadal.engine.checkpoints import Checkpoints
from hadal.engine.collector import hold_collector
from hadal.engine.features import ATTRIBUTES
from hadal.engine.graph_passes import moves_of
from hadal.engine.listeners import options_of
from hadal.engine.mistakes import FirstUpdate, missing_attribute, mixed_dtypes
from hadal.engine.preemption import Preemption
from hadal.engine.state import LossBackward, Parts, State
from hadal.engine.state_offload import StateOffload
from hadal.engine.topology import Topology
from hadal.engine.training import begin_training
from hadal.engine.update import Backwards, Updates, expect_loss, measure
from hadal.errors import NotBuiltYetError, UsageError, expect_one_of
from hadal.listener import Forward, Listener
from hadal.optim.schedules import check_step_arguments, needs_metric
from hadal.optim.step import OptimizerStepper
from hadal.order import Order
from hadal.plugins.monitor.monitor import Monitor
from hadal.zero import access, place
from hadal.zero.hooks import shield_hooks

# A part of torch's message if a transform of torch.func meets hooks on saved tensors.
_NO_SAVED_HOOKS = "don't yet support saved tensor hooks"

_Engine = TypeVar("_Engine", bound="Engine")
# Modes of torch.compile that capture CUDA graphs.
_CAPTURING = ("reduce-overhead", "max-autotune")


class Engine(Checkpoints, StateOffload, nn.Module):
    """Model in training, made by `hadal.initialize`; one class for every configuration.

    Attributes that it does not have are looked up in the module.
    """

    rounds_early: ClassVar[bool] = False
    """The default of `data_types.early_rounding`."""
    seeds_data: ClassVar[bool] = True
    """True if loaders follow `torch.manual_seed`; else their seed is 0, until it is set."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.model
        self._parts = parts
        self._state = state = State(parts)
        state.listeners.add(FirstUpdate(state))
        if parts.training is not None:
            begin_training(state, parts.training)
        self._updates = Updates(state)
        self._backwards = Backwards(state)
        self._collector = hold_collector(self) if parts.config.disable_python_gc else None
        self._is_compiled = False
        section = parts.config.checkpoint.on_signal
        self._preemption = (
            None if section is None else Preemption(section, parts.world, self.wait_for_checkpoint)
        )
        state.loss_backward = LossBackward(self._backwards.direct, parts.runtime)
        place.register_trainer(parts.runtime, self)
        for listener in state.listeners:
            listener.on_attach(self)

    def __getattr__(self, name: str) -> Any:
        """Look the attribute up among the features, and in the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            if name in ATTRIBUTES:
                found = self.find_listener(ATTRIBUTES[name])
                return getattr(found, "profiler", found)  # what programs know of its listener
            module = self.module
            try:
                return getattr(module, name)
            except AttributeError:
                if hasattr(type(module), name):
                    raise  # a property of the module's, which failed
            raise missing_attribute(name, self, module) from None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse `copy.deepcopy` and `pickle`: an engine is bound to its process groups."""
        raise UsageError(
            f"rank {self._parts.ranks.rank}: an engine cannot be copied or pickled. Copy its"
            " module, inside `with hadal.zero.GatheredParameters(engine.module.parameters()):`, or"
            " save it with engine.save_checkpoint(folder)"
        )

    # ---- compilation -----------------------------------------------------------------------------

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Iterable[tuple[int, Sequence[Any]]] | None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module in place with `torch.compile`; it happens at the next forward.

        Gathers, releases and reductions stay outside the graphs. If called again, the last call
        counts.

        Args:
            backend: a backend, or torch's name for it.
            compile_kwargs: more arguments of `torch.compile` (mode, dynamic, fullgraph, options).
            schedule: pairs of an update and the passes of `deepspeed.compile.passes` that apply
                from it on, instead of those of the section `compile`. Those that move Adam's states
                keep the optimizer's state in host memory during forward and backward; the others
                say what is done anyway.
            compiled_autograd_enabled: trace the backward as well; not built yet.

        Raises:
            NotBuiltYetError: `compiled_autograd_enabled` is given, or a pass moves parameters.
            UsageError: `compile_kwargs` has a name that `torch.compile` does not take, or asks for
                CUDA graphs although weights are sharded; or `schedule` has a pass that is not known
                or is for another stage.
        """
        self._state.expect_alive()
        if compiled_autograd_enabled:
            raise NotBuiltYetError(
                "engine.compile(compiled_autograd_enabled=True): tracing the backward is not built"
                " yet; leave it out (the backward of each graph is compiled with it)"
            )
        options = compile_kwargs or {}
        taken = set(inspect.signature(torch.compile).parameters) - {"model", "backend"}
        unknown = sorted(set(options) - taken)
        if unknown:
            raise UsageError(
                f"engine.compile(compile_kwargs=...) got {unknown[0]!r}, expected some of"
                f" {', '.join(sorted(taken))}; the backend is a separate argument"
            )
        settings = options.get("options") or {}
        captures = options.get("mode") in _CAPTURING or settings.get("triton.cudagraphs")
        if (captures or backend == "cudagraphs") and self._parts.runtime.gathering.uses.units:
            raise UsageError(
                "engine.compile() was asked for CUDA graphs (by mode, options or backend), which"
                " read weights at fixed addresses, but sharded and offloaded weights are in new"
                " memory at each use; use the default mode or"
                ' mode="max-autotune-no-cudagraphs", or ZeRO stage 0, 1 or 2'
            )
        stage = self._parts.config.zero_optimization.stage
        self._state.moves = None if schedule is None else moves_of(schedule, stage)
        self.module.compile(backend=backend, **options)
        shield_hooks()  # now that the compiler is there
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """True if `compile` was called."""
        return self._is_compiled

    # ---- training --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; inputs are cast, and autocast is applied, as configured."""
        if self._state.ended and not self._state.destroyed:
            return self._parts.casting.run(self.module, self.device, args, kwargs)
        self._state.expect_alive(in_pass=True)
        if self.module.training and torch.is_grad_enabled():
            self._begin_pass()
        with self._state.alone(), self._state.listeners as listeners:
            if listeners:
                updates, micro_step = self.global_steps, self._state.collected
                begun = Forward(args, kwargs, updates, micro_step, self.module.training)
                args, kwargs, *_ = listeners.before_forward(begun)
            found = self._run(args, kwargs)
            for listener in listeners:
                listener.after_forward(found)
        return found

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self._parts
        try:
            return parts.casting.run(self.module, self.device, args, kwargs)
        except RuntimeError as error:
            # A weight that was moved or cast away from its bucket: say so, by its name.
            parts.runtime.check_links()
            if _NO_SAVED_HOOKS in str(error):
                raise UsageError(self._refused_transform()) from error
            mixed = mixed_dtypes(str(error), args, kwargs, self.module)
            if mixed is not None:
                raise UsageError(f"rank {parts.ranks.rank}: {mixed}") from error
            raise
        except BaseException:
            parts.hooks.end_interrupted()
            raise

    def _refused_transform(self) -> str:
        return (
            f"rank {self._parts.ranks.rank}: torch.func.grad (or vjp, jacrev, hessian) was used in"
            " a forward at stage 3. torch refuses it where saved tensors are watched, which freed"
            " weights need. Use torch.autograd.grad(..., create_graph=True) there, or stage 2;"
            " torch.func.functional_call alone works."
        )

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute gradients of `loss`, the mean over this rank's micro-batch, and return it.

        The engine divides by the micro-steps of an update, unless `scale_wrt_gas` is false, and by
        the number of ranks that see different samples. Each rank has the same weight, regardless
        of its number of samples. Ranks that share a sequence each pass their part of its loss; the
        parts add up. `retain_graph` keeps the graph for another backward through it.

        Raises:
            LossError: `loss` is not a scalar that depends on trainable parameters.
            UsageError: nothing is trainable, or a parameter added to the model since `initialize`
                requires gradients and is not trained.
        """
        self._state.expect_alive(in_pass=True)
        with self._state.alone():
            self._backwards.run(loss, retain_graph, divides=scale_wrt_gas)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale (fp16), for the caller's own backward.

        `engine.scale(loss).backward()` then equals `engine.backward(loss)`; if nothing is
        fp16, `loss.backward()` does too.

        Raises:
            LossError: `loss` is not a scalar that depends on trainable parameters.
        """
        expect_loss(loss, f"rank {self._parts.ranks.rank}: engine.scale(loss)")
        self._state.scaled = loss.detach()
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.loss_scale

    def train(self: _Engine, mode: bool = True) -> _Engine:
        """Set the module's mode, as torch does. All ranks must call it if `mode` is false.

        If the optimizer lets weights differ between ranks for a while (ZeroOneAdam), they are
        synchronized before they are evaluated.
        """
        if not mode and not self._state.ended:
            self._parts.runtime.bring_together()
        return super().train(mode)

    def step(
        self,
        metric: float | Tensor | None = None,
        schedule_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """End a micro-step; at the boundary, update the weights and the learning rate.

        Every call is a boundary if `managed_gradient_accumulation` is false.

        Args:
            metric: the value that a `ReduceLROnPlateau` schedule follows, such as a validation
                loss. The schedule steps in the updates that get one. All ranks must pass it; the
                schedule gets their mean.
            schedule_arguments: arguments for the step of a schedule of your own, if this step ends
                an update. Megatron's `increment`, if missing, is the number of samples of the
                update on all ranks.

        Raises:
            UsageError: no backward came before, or called inside `no_sync`; or `metric` is given
                but the step ends no update, or the schedule takes none; or its step
                does not take `schedule_arguments`, or needs others.
            LossScaleError: fp16 gradients overflow at the floor of the loss scale.
        """
        state = self._state
        state.expect_alive(in_pass=True)
        if metric is not None:
            self._check_metric()
        check_step_arguments(self.lr_scheduler, schedule_arguments or {})
        if state.unsynchronized:
            raise UsageError("engine.step() was called inside engine.no_sync(); leave it first")
        if not state.backwards:
            # Ranks that do call backward check there whether any rank has a fault: answer them.
            self._parts.runtime.gathering.any_fault(True)
            raise UsageError(
                f"rank {self._parts.ranks.rank}: engine.step() has no gradients: no backward came"
                " since the last step, or engine.zero_grad() has dropped its gradients; call"
                " engine.backward(loss) before each step, and leave out the step of a batch that is"
                " to be skipped"
            )
        backwards, state.backwards = state.backwards, 0
        managed = state.batches.managed
        ends_update = not managed or state.is_boundary
        try:
            if ends_update:
                state.stepping = True
                with state.alone(), state.listeners:
                    value = None if metric is None else float(metric)
                    consumed = state.batches.consumed(backwards)
                    self._updates.make(consumed, value, schedule_arguments or {})
        finally:
            if state.stepping:
                # An update that failed still ends its accumulation: the next one starts afresh.
                state.stepping, state.collected, state.losses = False, 0, []
            state.micro_steps += 1 if managed else backwards
            if ends_update and state.boundary:
                state.begin_accumulation()  # the caller's boundary ends the count as well
        if ends_update and self._preemption is not None:
            self._preemption.at_boundary(self.save_checkpoint)

    def _check_metric(self) -> None:
        where = f"rank {self._parts.ranks.rank}: engine.step(metric=...)"
        if not needs_metric(self.lr_scheduler):
            raise UsageError(
                f"{where}: the schedule, {type(self.lr_scheduler).__name__}, takes no metric; leave"
                " metric out, or use ReduceLROnPlateau"
            )
        if self._state.batches.managed and not self._state.is_boundary:
            raise UsageError(
                f"{where} ends no update; pass the metric to the step for which"
                " engine.is_gradient_accumulation_boundary() is true"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Announce more backwards before the next step, so that reductions may wait for them.

        A hint, allowed at every stage. Partitioned gradients are reduced anyway; the numbers do
        not change.
        """
        before = self._state.unsynchronized
        self._state.unsynchronized = True
        try:
            yield
        finally:
            self._state.unsynchronized = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last update; `step` then requires a new backward."""
        self._parts.runtime.clear_gradients()
        self._state.forget_backwards()
        super().zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def find_overflow(self) -> bool:
        """Return whether an update with the gradients so far would be skipped.

        All ranks must call it. Right after an update it returns that update's result.
        """
        if not self._state.backwards:
            return self.overflow
        self._state.expect_alive()
        self._parts.runtime.reduce_all()
        return measure(self._parts, self.gradient_factor).overflow

    @property
    def skips_next_update(self) -> bool:
        """True if the next update is skipped as if its gradients overflowed; set on all ranks."""
        return self._state.skips_next

    @skips_next_update.setter
    def skips_next_update(self, skips: bool) -> None:
        self._state.skips_next = skips

    # ---- checkpoints, weights, memory ------------------------------------------------------------

    @property
    def is_preempted(self) -> bool:
        """True once a signal of `checkpoint.on_signal` has come; from one update on, on all ranks.

        Always false with `checkpoint.on_signal.save_dir`, with which the engine saves and leaves.
        """
        return self._preemption is not None and self._preemption.is_due

    def leave_preempted(self) -> None:
        """Exit the program with code 75, after a checkpoint that `is_preempted` has requested.

        Waits for an asynchronous save first. All ranks must call it.

        Raises:
            SystemExit: always.
            CheckpointError: the asynchronous save failed.
            UsageError: `checkpoint.on_signal` is not set.
        """
        if self._preemption is None:
            raise UsageError("engine.leave_preempted() needs checkpoint.on_signal; set it")
        self._preemption.leave()

    # ---- listeners -------------------------------------------------------------------------------

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The configuration's listeners and the added ones, in call order."""
        return tuple(self._state.listeners)

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` around every forward, backward and update from now on.

        Its state is saved in checkpoints and loaded from them: add it before `load_checkpoint`.

        Raises:
            UsageError: it is not a `hadal.Listener`, or the engine has one of this name.
        """
        self._state.listeners.add(listener)
        listener.on_attach(self)

    def remove_listener(self, listener: Listener) -> None:
        """Stop calling `listener`. It is not closed.

        Raises:
            UsageError: the engine does not have it.
        """
        self._state.listeners.remove(listener)

    def find_listener(self, name: str) -> Any:
        """Return the listener of this name; None if there is none."""
        return next((one for one in self._state.listeners if one.name == name), None)

    # ---- state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return a copy of the module's whole state on every rank. All ranks must call it."""
        return self._state.whole_state(*args, **kwargs)

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load whole values, as `state_dict` returns them, into weights and masters.

        All ranks must call it, with the same values.

        Raises:
            UsageError: `assign` would replace the parameters, which are views of buckets.
        """
        self._state.expect_alive()
        if assign:
            raise UsageError(
                "engine.load_state_dict(assign=True) would take parameters out of"
                " their buckets; leave assign out"
            )
        runtime = self._parts.runtime
        with runtime.whole(runtime.buckets):
            return self.module.load_state_dict(state_dict, strict=strict)

    @torch.no_grad()
    def end_training(self) -> None:
        """Give every parameter its own whole memory, and only evaluate from now on.

        The hooks are removed, and optimizer and gradients are no longer used; the module can be
        changed in any way. All ranks must call it.

        Raises:
            OffloadError: weights cannot be read from their disk; files are removed all the same.
        """
        state = self._state
        if state.ended or state.destroyed:
            return
        self._state.expect_alive()
        self.wait_for_checkpoint()
        self._take_back_states()
        state.ended = True
        self._let_go()

    def _take_back_states(self) -> None:
        self.reload_states()
        self._state.host_memory.clear()

    def _let_go(self) -> None:
        runtime = self._parts.runtime
        self._parts.hooks.remove()
        access.forget(runtime.bucket_of)
        try:
            runtime.release()
        finally:
            # Also if weights can no longer be read from their disk: no file is left behind.
            self._parts.sharded.offloading.close()

    @torch.no_grad()
    def destroy(self) -> None:
        """Remove the hooks and restore every parameter as a whole tensor. All ranks must call it.

        At stage 3 a device must have room for all weights; at others for those of one bucket.

        Raises:
            OffloadError: weights cannot be read from their disk; files are removed anyway.
        """
        state = self._state
        if state.destroyed:
            return
        if not state.ended:
            self.wait_for_checkpoint()
            self._take_back_states()
        if self._preemption is not None:
            self._preemption.close()
        state.destroyed = True
        self._state.listeners.close()
        try:
            if not state.ended:
                self._let_go()
        finally:
            if self._collector is not None:
                self._collector()
            gc.collect()
            give_back_freed_memory()

    # ---- components ------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; its param groups hold this rank's flat slices of the master weights."""
        return self._state.optimizer

    @property
    def stepper(self) -> OptimizerStepper | None:
        """The stepper of the optimizer; None until there is something to train with."""
        return self._state.training.stepper if self._state.training else None

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule, if there is one."""
        return self._state.training.schedule if self._state.training else None

    @property
    def training_dataloader(self) -> ShardedLoader | None:
        """The loader over `training_data`, or else the first training loader of `deepspeed_io`."""
        return self._state.loader

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
        expect_one_of(("train", "eval", "predict"), "deepspeed_io's route", route)
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
        if route == "train" and self._state.loader is None:
            self._state.loader = loading.training_loader(dataset, reading, batch_size)
            return self._state.loader
        return loading.loader(dataset, batch_size, reading)

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
        return self._state.micro_steps

    @property
    def global_steps(self) -> int:
        """Boundaries reached so far, skipped updates included."""
        return self._state.global_steps

    @property
    def global_samples(self) -> int:
        """Samples that all ranks have consumed."""
        return self._state.global_samples

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because gradients were not finite."""
        self._state.learn_of_skip()
        return self._state.skipped_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one rank in one micro-step."""
        return self._state.batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps of one update."""
        return self._state.batches.accumulation

    def train_batch_size(self) -> int:
        """Return the samples of all ranks in one update."""
        return self._state.batches.train

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of one update by changing its micro-steps alone.

        Raises:
            UsageError: not a multiple of the samples of one micro-step on all ranks, or called in
                the middle of an update.
        """
        batches = self._state.batches.with_train(train_batch_size)
        if any(one.name == "dynamic_batching" for one in self._state.listeners):
            raise UsageError(
                "set_train_batch_size: dynamic_batching makes packs for the train_batch_size of the"
                " configuration; change it there, and initialize again"
            )
        if self._state.is_inside_accumulation or self._state.backwards:
            raise UsageError("set_train_batch_size was called inside an accumulation; step first")
        self._state.batches = batches
        self._state.begin_accumulation()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-step ends in an update.

        If the caller owns the boundary (`managed_gradient_accumulation` false), that is true
        only while `step` makes the update: it is not known before.
        """
        return self._state.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next backwards and `step` end an update; None counts again.

        Raises:
            UsageError: `managed_gradient_accumulation` is false: every `step` is an update.
        """
        if not self._state.batches.managed:
            raise UsageError(
                "set_gradient_accumulation_boundary was called, but managed_gradient_accumulation"
                " is false: every engine.step() is an update. Leave one of the two out."
            )
        self._state.boundary = is_boundary

    # ---- results of the last update --------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the last update's gradients before clipping.

        None before the first update, and if `compute_grad_norm` is false; infinity if the
        update was skipped because they overflowed.
        """
        self._state.learn_of_skip()
        return self._state.last.norm

    @property
    def clip_coefficient(self) -> float:
        """The factor that clipped the last update's gradients; 1.0 if they were not clipped."""
        self._state.learn_of_skip()
        return self._state.last.clip

    @property
    def overflow(self) -> bool:
        """True if the last update was skipped because gradients were not finite."""
        self._state.learn_of_skip()
        return self._state.last.overflow

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward (1.0 if nothing is fp16)."""
        return self._state.scale.scale

    @property
    def gradient_factor(self) -> float:
        """The factor in the gradients that wait for an update."""
        return self._state.gradient_factor

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each param group."""
        return [float(rate) for rate in options_of(self._state.optimizer).rates]

    def get_mom(self) -> list[Any]:
        """Return the current betas, or momentum, of each param group; 0.0 if it has neither."""
        return list(options_of(self._state.optimizer).momenta)

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
        optimizer = self._state.optimizer
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
