"""The engine: a module that trains itself with forward, backward and step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hadal.device import give_back_freed_memory
from hadal.engine.backward import Backwards
from hadal.engine.base import EngineBase
from hadal.engine.checkpoints import Checkpoints
from hadal.engine.collector import hold_collector
from hadal.engine.compile import compile_module
from hadal.engine.direct import DirectBackward
from hadal.engine.giving import WeightsOut
from hadal.engine.mistakes import missing_attribute, mixed_dtypes
from hadal.engine.moving import Moving
from hadal.engine.parts import Parts
from hadal.engine.preemption import Preemption
from hadal.engine.session import through
from hadal.engine.update import Updates, measure
from hadal.errors import NotBuiltYetError, UsageError
from hadal.listener import Forward, Listener
from hadal.optim.schedules import check_step_arguments, needs_metric
from hadal.zero import access, place

if TYPE_CHECKING:
    from hadal.data.loader import PostProcess
    from hadal.engine.curvature import BlockEigenvalues
    from hadal.plugins.data_efficiency.batching import BatchingByTokens
    from hadal.plugins.data_efficiency.layer_drop import LayerDrop
    from hadal.plugins.data_efficiency.pacing import CustomPace
    from hadal.plugins.data_efficiency.seqlen import LengthCurriculum
    from hadal.plugins.data_efficiency.token_drop import TokenDrop
    from hadal.plugins.profiling import FlopsProfiler

# A part of torch's message if a transform of torch.func meets hooks on saved tensors.
_NO_SAVED_HOOKS = "don't yet support saved tensor hooks"

_Engine = TypeVar("_Engine", bound="Engine")


class Engine(EngineBase):
    """Model in training, made by `hadal.initialize`; one class for every configuration.

    Attributes that it does not have are looked up in the module.
    """

    rounds_early: ClassVar[bool] = False
    """The default of `data_types.early_rounding`."""
    seeds_data: ClassVar[bool] = True
    """True if loaders follow `torch.manual_seed`; else their seed is 0, until it is set."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        session = self._session
        self._updates = Updates(session)
        self._checkpoints = Checkpoints(session)
        self._weights_out = WeightsOut(session)
        self._moving = Moving(session)
        self._backwards = Backwards(session)
        self._collector = hold_collector(self) if parts.holds_collector else None
        self._is_compiled = False
        section = parts.config.checkpoint.on_signal
        self._preemption = (
            None if section is None else Preemption(section, parts.world, self.wait_for_checkpoint)
        )
        session.direct = DirectBackward(self._backwards.direct, parts.runtime)
        place.attend(parts.runtime, self)
        for listener in session.listeners:
            listener.on_attach(self)

    def __getattr__(self, name: str) -> Any:
        """Look the attribute up in the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
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
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module in place with `torch.compile`; it happens at the next forward.

        Gathers, releases and reductions stay outside the graphs. If called again, the last call
        counts.

        Args:
            backend: a backend, or torch's name for it.
            compile_kwargs: more arguments of `torch.compile` (mode, dynamic, fullgraph, options).
            schedule: passes over the graphs; not built yet.
            compiled_autograd_enabled: trace the backward as well; not built yet.

        Raises:
            NotBuiltYetError: `schedule` or `compiled_autograd_enabled` is given.
            UsageError: `compile_kwargs` has a name that `torch.compile` does not take.
        """
        self._session.expect_alive()
        if schedule is not None:
            raise NotBuiltYetError(
                f"engine.compile(schedule={schedule!r}): passes over compiled graphs are not built"
                " yet; leave schedule out"
            )
        if compiled_autograd_enabled:
            raise NotBuiltYetError(
                "engine.compile(compiled_autograd_enabled=True): tracing the backward is not built"
                " yet; leave it out (the backward of each graph is compiled with it)"
            )
        compile_module(self.module, backend, compile_kwargs or {})
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """True if `compile` was called."""
        return self._is_compiled

    # ---- training --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; inputs are cast, and autocast is applied, as configured."""
        if self._session.cycle.ended and not self._session.cycle.destroyed:
            return self._parts.casting.run(self.module, self.device, args, kwargs)
        self._session.expect_alive()
        with self._session.alone(), self._session.listeners as listeners:
            if listeners:
                updates, micro_step = self.global_steps, self._session.cycle.collected
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
        self._session.expect_alive()
        with self._session.alone():
            self._backwards.run(loss, retain_graph, divides=scale_wrt_gas)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale (fp16), for the caller's own backward.

        `engine.scale(loss).backward()` then equals `engine.backward(loss)`; if nothing is
        fp16, `loss.backward()` does too.
        """
        self._session.cycle.scaled = loss.detach()
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.loss_scale

    def train(self: _Engine, mode: bool = True) -> _Engine:
        """Set the module's mode, as torch does. All ranks must call it if `mode` is false.

        If the optimizer lets weights differ between ranks for a while (ZeroOneAdam), they are
        synchronized before they are evaluated.
        """
        if not mode and not self._session.cycle.ended:
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
        session, cycle = self._session, self._session.cycle
        session.expect_alive()
        if metric is not None:
            self._check_metric()
        check_step_arguments(self.lr_scheduler, schedule_arguments or {})
        if cycle.unsynchronized:
            raise UsageError("engine.step() was called inside engine.no_sync(); leave it first")
        if cycle.counts_refused:
            # The micro-step whose backward was refused has ended, and an update with it.
            cycle.counts_refused = False
            return
        if not cycle.backwards:
            # Ranks that do call backward check there whether any rank has a fault: answer them.
            self._parts.runtime.gathering.any_fault(True)
            raise UsageError(
                f"rank {self._parts.ranks.rank}: engine.step() has no gradients: no backward came"
                " since the last step, or engine.zero_grad() has dropped its gradients; call"
                " engine.backward(loss) before each step, and leave out the step of a batch that is"
                " to be skipped"
            )
        backwards, cycle.backwards = cycle.backwards, 0
        managed = session.batches.managed
        ends_update = not managed or session.is_boundary
        try:
            if ends_update:
                cycle.stepping = True
                with session.alone(), session.listeners:
                    value = None if metric is None else float(metric)
                    consumed = session.batches.consumed(backwards)
                    self._updates.make(consumed, value, schedule_arguments or {})
        finally:
            if cycle.stepping:
                # An update that failed still ends its accumulation: the next one starts afresh.
                cycle.stepping, cycle.collected, cycle.losses = False, 0, []
            session.counters.micro_steps += 1 if managed else backwards
            if ends_update and cycle.boundary:
                session.begin_accumulation()  # the caller's boundary ends the count as well
        if ends_update and self._preemption is not None:
            self._preemption.at_boundary(self.save_checkpoint)

    def _check_metric(self) -> None:
        where = f"rank {self._parts.ranks.rank}: engine.step(metric=...)"
        if not needs_metric(self.lr_scheduler):
            raise UsageError(
                f"{where}: the schedule, {type(self.lr_scheduler).__name__}, takes no metric; leave"
                " metric out, or use ReduceLROnPlateau"
            )
        if self._session.batches.managed and not self._session.is_boundary:
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
        before = self._session.cycle.unsynchronized
        self._session.cycle.unsynchronized = True
        try:
            yield
        finally:
            self._session.cycle.unsynchronized = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last update; `step` then requires a new backward."""
        self._parts.runtime.clear_gradients()
        self._session.cycle.begin_anew()
        super().zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def find_overflow(self) -> bool:
        """Return whether an update with the gradients so far would be skipped.

        All ranks must call it. Right after an update it returns that update's result.
        """
        if not self._session.cycle.backwards:
            return self.overflow
        self._session.expect_alive()
        self._parts.runtime.reduce_all()
        return measure(self._parts, self.gradient_factor).overflow

    @property
    def skips_next_update(self) -> bool:
        """True if the next update is skipped as if its gradients overflowed; set on all ranks."""
        return self._session.cycle.skips_next

    @skips_next_update.setter
    def skips_next_update(self, skips: bool) -> None:
        self._session.cycle.skips_next = skips

    # ---- checkpoints, weights, memory ------------------------------------------------------------

    save_checkpoint = store_checkpoint = through("_checkpoints", Checkpoints.save_checkpoint)
    load_checkpoint = through("_checkpoints", Checkpoints.load_checkpoint)
    resume = through("_checkpoints", Checkpoints.resume)
    wait_for_checkpoint = through("_checkpoints", Checkpoints.wait_for_checkpoint)
    sharded_state_dict = through("_checkpoints", Checkpoints.sharded_state_dict)
    load_sharded_state_dict = through("_checkpoints", Checkpoints.load_sharded_state_dict)
    zero_gather_16bit_weights_on_model_save = through(
        "_weights_out", WeightsOut.zero_gather_16bit_weights_on_model_save
    )
    save_16bit_model = through("_weights_out", WeightsOut.save_16bit_model)
    save_fp16_model = through("_weights_out", WeightsOut.save_fp16_model)
    module_state_dict = through("_weights_out", WeightsOut.module_state_dict)
    _consolidated_16bit_state_dict = through("_weights_out", WeightsOut.consolidated_16bit)
    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict
    offload_states = through("_moving", Moving.offload_states)
    reload_states = through("_moving", Moving.reload_states)

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: CustomPace | Mapping[str, CustomPace]
    ) -> None:
        """Set the functions of schedules whose `schedule_type` is "custom". All ranks must call it.

        Functions are not saved: call it after a resume, too.

        Args:
            schedule_func_dict: a function from the update, from 1, to its difficulty, an integer;
                or such functions by metric ("seqlen" for `curriculum_learning`). A difficulty that
                has reached `max_difficulty` stays there.

        Raises:
            UsageError: there is no such curriculum, its schedule is not custom, or a value is no
                function.
        """
        from hadal.plugins.data_efficiency.ordered import set_custom_paces  # for this alone

        set_custom_paces(self._session.loader, self._session.listeners, schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: PostProcess) -> None:
        """Change each training batch before it is handed out.

        Args:
            post_process_func: a function of the batch and a dict that describes it. With
                `data_sampling.curriculum_learning`, that has `current_difficulties` by metric and
                `curriculum_step`, of this very batch, also if workers read ahead.

        Raises:
            UsageError: the engine has no training loader, or this is no function.
        """
        loader = self._session.loader
        if loader is None:
            raise UsageError(
                "set_data_post_process_func: the engine has no training loader; pass training_data"
                " to initialize, or call engine.deepspeed_io first"
            )
        if not callable(post_process_func):
            raise UsageError(
                "set_data_post_process_func: expected a function of the batch and its state, got"
                f" {type(post_process_func).__name__}"
            )
        loader.post_process = post_process_func

    @property
    def resumed(self) -> tuple[str | None, dict[str, Any] | None]:
        """The directory and `client_state` loaded by `checkpoint.resume`; else (None, None)."""
        return self._checkpoints.resumed

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
            raise UsageError("engine.leave_preempted() is for checkpoint.on_signal, which is null")
        self._preemption.leave()

    # ---- listeners -------------------------------------------------------------------------------

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The configuration's listeners and the added ones, in call order."""
        return tuple(self._session.listeners)

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` around every forward, backward and update from now on.

        Its state is saved in checkpoints and loaded from them: add it before `load_checkpoint`.

        Raises:
            UsageError: it is not a `hadal.Listener`, or the engine has one of this name.
        """
        self._session.listeners.add(listener)
        listener.on_attach(self)

    def remove_listener(self, listener: Listener) -> None:
        """Stop calling `listener`. It is not closed.

        Raises:
            UsageError: the engine does not have it.
        """
        self._session.listeners.remove(listener)

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """The profiler on rank 0 if `flops_profiler.enabled`; None otherwise."""
        found: FlopsProfiler | None = getattr(self._named("flops_profiler"), "profiler", None)
        return found

    @property
    def length_curriculum(self) -> LengthCurriculum | None:
        """The curriculum by sequence length, if `curriculum_learning` is on."""
        found: LengthCurriculum | None = self._named("curriculum_learning")
        return found

    @property
    def layer_drop(self) -> LayerDrop | None:
        """The keep probability of layers, if `progressive_layer_drop` is on."""
        found: LayerDrop | None = self._named("progressive_layer_drop")
        return found

    @property
    def token_drop(self) -> TokenDrop | None:
        """The schedule of kept tokens, if `data_efficiency.data_routing.random_ltd` is on."""
        found: TokenDrop | None = self._named("random_ltd")
        return found

    @property
    def dynamic_batching(self) -> BatchingByTokens | None:
        """Batches by tokens, if `data_efficiency.data_sampling.dynamic_batching` is on."""
        found: BatchingByTokens | None = self._named("dynamic_batching")
        return found

    @property
    def eigenvalues(self) -> BlockEigenvalues | None:
        """The curvature of the model's blocks, if `eigenvalue` is on."""
        found: BlockEigenvalues | None = self._named("eigenvalue")
        return found

    def _named(self, name: str) -> Any:
        return next((one for one in self._session.listeners if one.name == name), None)

    # ---- state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return a copy of the module's whole state on every rank. All ranks must call it."""
        return self._session.whole_state(*args, **kwargs)

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load whole values, as `state_dict` returns them, into weights and masters.

        All ranks must call it, with the same values.

        Raises:
            UsageError: `assign` would replace the parameters, which are views of buckets.
        """
        self._session.expect_alive()
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
        cycle = self._session.cycle
        if cycle.ended or cycle.destroyed:
            return
        self._session.expect_alive()
        self.wait_for_checkpoint()
        self._moving.end()
        cycle.ended = True
        self._let_go()

    def _let_go(self) -> None:
        runtime = self._parts.runtime
        self._parts.hooks.remove()
        access.forget(runtime.bucket_of)
        try:
            runtime.release()
        finally:
            # Also if weights can no longer be read from their disk: no file is left behind.
            self._parts.offloading.close()

    @torch.no_grad()
    def destroy(self) -> None:
        """Remove the hooks and restore every parameter as a whole tensor. All ranks must call it.

        Raises:
            OffloadError: weights cannot be read from their disk; files are removed anyway.
        """
        cycle = self._session.cycle
        if cycle.destroyed:
            return
        if not cycle.ended:
            self.wait_for_checkpoint()
            self._moving.end()
        if self._preemption is not None:
            self._preemption.close()
        cycle.destroyed = True
        self._session.listeners.close()
        try:
            if not cycle.ended:
                self._let_go()
        finally:
            if self._collector is not None:
                self._collector()
            gc.collect()
            give_back_freed_memory()
