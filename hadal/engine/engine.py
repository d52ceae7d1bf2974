"""The user's object: a module that trains itself with forward, backward and step."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from hadal.checkpoint.background import Saver
from hadal.checkpoint.live import Live
from hadal.checkpoint.loading import Wanted, find, load
from hadal.checkpoint.saving import Order
from hadal.checkpoint.together import compare_tags
from hadal.config import Config
from hadal.device import give_back_freed_memory
from hadal.engine.collector import hold_collector
from hadal.engine.compile import compile_module
from hadal.engine.giving import GivesWeights
from hadal.engine.loader import Reading, ShardedLoader
from hadal.engine.newcomers import Newcomers
from hadal.engine.parts import Counters, Cycle, Parts, Training
from hadal.engine.reading import Collate
from hadal.engine.report import Progress
from hadal.engine.topology import Topology
from hadal.engine.update import measure, moved_scale
from hadal.errors import HadalError, LossError, NotBuiltYetError, OffloadError, UsageError
from hadal.optim.loss_scale import ScaleState, first_scale
from hadal.optim.step import Stepper
from hadal.zero import access, place

_log = logging.getLogger(__name__)
_NOTHING: Mapping[str, Any] = MappingProxyType({})

# A part of what torch says where a transform of torch.func meets hooks on saved tensors.
_NO_SAVED_HOOKS = "don't yet support saved tensor hooks"


class Engine(GivesWeights):
    """A model under training. Made by `hadal.initialize`; one class for every configuration.

    Attributes that it does not have are the module's.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.model
        self._parts = parts
        self._training = parts.training
        self._loader = parts.loader
        self._batches = parts.batches
        self._scale: ScaleState = first_scale(parts.scale_rule)
        self._counters = Counters()
        self._cycle = Cycle()
        self._collector = hold_collector(self) if parts.holds_collector else None
        self._newcomers = Newcomers(parts.model, parts.runtime.bucket_of)
        self._saver = Saver(parts.world)
        self._is_compiled = False
        place.attend(parts.runtime, self)

    def __getattr__(self, name: str) -> Any:
        """Fall through to the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse `copy.deepcopy` and `pickle`: an engine holds processes and a place among them."""
        raise UsageError(
            f"rank {self._parts.ranks.rank}: an engine cannot be copied or pickled. Copy its"
            " module, inside `with hadal.zero.GatheredParameters(engine.module.parameters()):`, or"
            " save it with engine.save_checkpoint(folder)"
        )

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
        return self._cycle.last.norm

    @property
    def clip_coefficient(self) -> float:
        """What the last update's gradients were multiplied with to clip them; 1.0: nothing."""
        return self._cycle.last.clip

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because gradients were not finite."""
        return self._cycle.last.overflow

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before backward (1.0 where nothing is fp16)."""
        return self._scale.scale

    def get_lr(self) -> list[float]:
        """The present learning rate of each param group."""
        if self._training is None:
            return []
        return [float(group["lr"]) for group in self._training.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The present betas, or momentum, of each param group; 0.0 where it has neither."""
        groups = self._training.optimizer.param_groups if self._training else []
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def wall_clock_times(self) -> dict[str, float]:
        """Milliseconds of the last update on this rank; empty without `wall_clock_breakdown`.

        `forward` and `backward` are summed over the micro-steps; `backward` is `backward_inner`
        plus `backward_allreduce`, the work on and the wait for reductions; `step` is the update.
        """
        return dict(self._parts.clocks.last)

    # ---- who takes part --------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The ranks in which this one does each kind of shared work."""
        return self._parts.topology

    # ---- compilation -----------------------------------------------------------------------------

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module in place with `torch.compile`; it happens at the next forward.

        What gathers, frees and reduces stays outside of the graphs. Called again, the last call
        counts.

        Args:
            backend: torch's name of a backend, or a backend.
            compile_kwargs: more arguments of `torch.compile` (mode, dynamic, fullgraph, options).
            schedule: passes over the graphs; not built yet.
            compiled_autograd_enabled: trace the backward as well; not built yet.

        Raises:
            NotBuiltYetError: `schedule` or `compiled_autograd_enabled` is given.
            UsageError: `compile_kwargs` names something that `torch.compile` does not take.
        """
        self._expect_alive()
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
        """Whether `compile` was called."""
        return self._is_compiled

    # ---- training --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, its inputs cast and under autocast as the configuration says."""
        self._expect_alive()
        try:
            with self._parts.clocks.forward:
                return self._parts.casting.run(self.module, self.device, args, kwargs)
        except RuntimeError as error:
            # A weight that was moved or cast away from its bucket: say so, by its name.
            self._parts.runtime.check_links()
            if _NO_SAVED_HOOKS in str(error):
                raise UsageError(self._refused_transform()) from error
            raise
        except BaseException:
            self._parts.hooks.end_interrupted()
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
        the number of ranks that see different samples. Each of them counts alike, whatever the
        number of its samples. Ranks that share a sequence each give their part of its loss; the
        parts add up. `retain_graph` keeps the graph for another backward through it.

        Raises:
            LossError: `loss` is not a scalar that depends on trainable parameters.
            UsageError: nothing is trainable, or the model has a parameter since `initialize` that
                asks for gradients and is not trained.
        """
        self._expect_alive()
        boundary = self.is_gradient_accumulation_boundary() and not self._cycle.unsynchronized
        self._check_loss_everywhere(loss, boundary)
        if self._training is None:
            self._training = self._parts.make_training()
        factor = self._scale.scale
        if scale_wrt_gas:
            factor /= self._batches.accumulation
        exact = torch.promote_types(loss.dtype, torch.float32)
        scaled = loss if factor == 1.0 else loss.to(exact) * factor
        parts = self._parts
        with (
            parts.clocks.backward,
            parts.runtime.backward(boundary=boundary),
            parts.hooks.reading(),
        ):
            scaled.backward(retain_graph=retain_graph)
        self._cycle.backwards += 1
        return loss

    def _expect_alive(self) -> None:
        if self._cycle.destroyed:
            raise UsageError("this engine was destroyed; use its module, or initialize anew")
        self._parts.hooks.end_left_over()

    def _check_loss_everywhere(self, loss: object, boundary: bool) -> None:
        """Raise on every rank where the loss of one is at fault: none may wait for it."""
        fault: HadalError | None = None
        try:
            self._check_loss(loss)
        except HadalError as error:
            fault = error
        if self._parts.runtime.any_fault(fault is not None, boundary=boundary):
            raise fault or LossError(
                "engine.backward(loss) was refused, or left out, on another rank, which tells why;"
                " no rank has computed gradients"
            )

    def _check_loss(self, loss: object) -> None:
        where = f"rank {self._parts.ranks.rank}: engine.backward(loss)"
        if not self._parts.runtime.gradients:
            raise UsageError(
                f"{where} has nothing to train: no parameter of the model that requires a gradient"
                " is given to the optimizer"
            )
        if not self._cycle.backwards:
            self._newcomers.check(where)
        if not isinstance(loss, Tensor):
            raise LossError(
                f"{where} expects a tensor, got {type(loss).__name__}; give the loss itself, for"
                " example outputs.loss or outputs[0]"
            )
        if loss.numel() != 1:
            raise LossError(
                f"{where} expects a scalar, got a tensor of shape {tuple(loss.shape)}; reduce it"
                " first, for example loss.mean()"
            )
        if not loss.requires_grad:
            raise LossError(
                f"{where}: the loss does not depend on any trainable parameter; was it computed"
                " under torch.no_grad(), or detached?"
            )

    def step(self) -> None:
        """End a micro-step; at the boundary, update the weights and the learning rate.

        Every call is a boundary where `managed_gradient_accumulation` is false.

        Raises:
            UsageError: no backward came before, or called inside `no_sync`.
            LossScaleError: fp16 gradients overflow at the floor of the loss scale.
        """
        self._expect_alive()
        if self._cycle.unsynchronized:
            raise UsageError("engine.step() was called inside engine.no_sync(); leave it first")
        if not self._cycle.backwards:
            # Ranks that do call backward ask there whether anybody is at fault: answer them.
            self._parts.runtime.any_fault(True)
            raise UsageError(
                "engine.step() came without a backward; call engine.backward(loss) before each step"
            )
        backwards, self._cycle.backwards = self._cycle.backwards, 0
        managed = self._batches.managed
        try:
            if not managed or self.is_gradient_accumulation_boundary():
                self._cycle.stepping = True
                self._update(self._batches.consumed(backwards))
        finally:
            # An update that failed was one all the same: the next accumulation begins anew.
            self._cycle.stepping = False
            self._counters.micro_steps += 1 if managed else backwards

    @torch.no_grad()
    def _update(self, samples: int) -> None:
        parts, training, counters = self._parts, self._training, self._counters
        assert training is not None  # a backward came before
        with parts.clocks.late_reduce:
            parts.runtime.reduce_all()
        with parts.clocks.step:
            parts.runtime.check_sanity(overflow_is_told=parts.skip_overflow)
            parts.runtime.reshard_all()
            found = self._cycle.last = measure(parts, self._scale.scale)
            if found.overflow:
                counters.skipped_steps += 1
            else:
                self._step_weights(training, found.clip / self._scale.scale)
                if training.schedule is not None:
                    training.schedule.step()
            parts.runtime.clear_gradients()
        counters.global_steps += 1
        counters.global_samples += samples
        self._scale = moved_scale(self._scale, found, counters.global_steps - 1, parts)
        parts.reporter.end_update(counters.global_steps, samples, self._progress)

    def _step_weights(self, training: Training, multiplier: float) -> None:
        runtime = self._parts.runtime
        try:
            with runtime.holding_frozen():
                training.stepper.step(multiplier)
        except OffloadError:
            # The next update must not begin with what this one could not use.
            runtime.clear_gradients()
            raise

    def _progress(self) -> Progress:
        skipped, norm = self._counters.skipped_steps, self._cycle.last.norm
        return Progress(skipped, self.get_lr(), self.get_mom(), norm)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Say that more backwards follow before the next step: reductions may wait for them.

        A hint, legal at every stage. Where gradients are partitioned they are reduced all the same;
        the numbers do not change.
        """
        before = self._cycle.unsynchronized
        self._cycle.unsynchronized = True
        try:
            yield
        finally:
            self._cycle.unsynchronized = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients collected since the last update."""
        self._parts.runtime.clear_gradients()
        super().zero_grad(set_to_none=set_to_none)

    # ---- state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's whole state, in memory of its own, on every rank. All ranks must call it."""
        self._expect_alive()
        runtime = self._parts.runtime
        with runtime.whole(runtime.buckets):
            state = self.module.state_dict(*args, **kwargs)
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Put whole values, as `state_dict` gives them, into weights and masters.

        All ranks must call it, with the same values.

        Raises:
            UsageError: `assign` would replace the parameters, which lie in buckets.
        """
        self._expect_alive()
        if assign:
            raise UsageError(
                "engine.load_state_dict(assign=True) would take parameters out of"
                " their buckets; leave assign out"
            )
        runtime = self._parts.runtime
        with runtime.whole(runtime.buckets):
            return self.module.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] = _NOTHING,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all that training needs under `save_dir`/`tag`. All ranks must call it.

        The place in the training loader is among it: how much of its epoch was handed out.
        Gradients are not: where some wait for an update, that is told, and a load begins it anew.

        Args:
            save_dir: the folder; it is made where it does not exist.
            tag: the checkpoint's name; `global_step<N>` by default.
            client_state: the caller's own values: numbers, text, lists, tuples, dicts, tensors
                and arrays of numpy. Those of rank 0 are saved.
            save_latest: whether `load_checkpoint` should find this one without a tag.
            exclude_frozen_parameters: leave out parameters that are not trained; the checkpoint
                then loads with `load_module_strict=False`, into a model that has their values.

        A save that fails, or is killed, leaves what was there: the checkpoint of this tag, if there
        was one, and `latest`. See `checkpoint.keep_last` for how old ones go, and
        `checkpoint.async_save` for saves that are written while training goes on.

        Raises:
            CheckpointError: the folder cannot be written, or `client_state` cannot be saved; on
                every rank, with the file and the reason. Also where the save begun before this one
                failed after it had returned; this one is then not begun.
            MismatchError: another rank goes on without saving.
        """
        self._expect_alive()
        self._parts.runtime.meet_at_checkpoint()
        name = str(tag or f"global_step{self._counters.global_steps}")
        compare_tags(name, self._parts.saving.tag_validation, self._parts.world)
        if self._parts.runtime.holds_gradients and self._parts.world.rank == 0:
            _log.warning(
                "checkpoint %s is saved in the middle of an update: what its micro-steps so far"
                " have brought is not saved, and their samples are not read again; save after an"
                " engine.step() that ended in an update",
                name,
            )
        order = Order(
            Path(save_dir), name, client_state or _NOTHING, save_latest, exclude_frozen_parameters
        )
        self._saver.save(order, self._live())
        return True

    store_checkpoint = save_checkpoint

    def wait_for_checkpoint(self) -> None:
        """Wait until a save that goes on by itself has ended. All ranks must call it.

        Raises:
            CheckpointError: it failed; on every rank.
        """
        self._saver.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint. All ranks must call it.

        It may have been saved by another number of ranks, at another stage, in another dtype or
        other buckets and param groups: parameters are found by their names. The program's random
        generators (Python's, numpy's, torch's) and the training loader go on where they stood, too.

        Args:
            load_dir: the folder that it was saved in.
            tag: its name; by default the latest.
            load_module_strict: raise where the checkpoint lacks a parameter or buffer of the
                model, or has others; else these keep their values and are told.
            load_optimizer_states: load moments, the options of param groups and the loss scale;
                else they stay as they are. Masters go with the weights.
            load_lr_scheduler_states: load the learning-rate schedule.
            load_module_only: load weights and buffers, and nothing else.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` to put weights
                and buffers into the module, in place of loading them by name.

        Returns:
            The checkpoint's folder and the `client_state` saved with it, its tensors on the host;
            (None, None) where `load_dir` holds none.

        Raises:
            CheckpointError: it is damaged, or was saved by another model; on every rank, and
                nothing has changed.
        """
        self._expect_alive()
        self._parts.runtime.meet_at_checkpoint()
        self._saver.wait()
        folder = find(Path(load_dir), None if tag is None else str(tag), self._parts.world)
        if folder is None:
            return None, None
        wanted = Wanted(
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            schedule=load_lr_scheduler_states,
            module_only=load_module_only,
            custom=custom_load_fn,
        )
        # What is loaded is trained on, whatever mode the caller is in.
        with torch.inference_mode(False), torch.no_grad():
            if self._training is None and self._parts.runtime.gradients:
                self._training = self._parts.make_training()
            loaded = load(folder, self._live(), wanted)
        if loaded.scalars is not None:
            self._counters = Counters(**loaded.scalars["counters"])
            scale = ScaleState(*loaded.scalars["scale"])
            # One that has never moved tells nothing: what was saved may have had none.
            if load_optimizer_states and self._parts.scale_rule.dynamic and scale.iteration:
                self._scale = scale
        self._cycle.backwards = 0
        if self._inside_accumulation:
            # Gradients are not saved, and today's accumulation may be another one.
            self._begin_accumulation()
        return str(folder), loaded.client_state

    def _live(self) -> Live:
        if any(bucket.rests_on_disk for bucket in self._parts.runtime.buckets):
            raise NotBuiltYetError(
                "saving and loading a checkpoint of state that rests on the disk"
                ' (zero_optimization.offload_*.device "nvme") is not built yet; give "cpu"'
            )
        scalars = {"counters": asdict(self._counters), "scale": list(self._scale)}
        return self._parts.live(self._training, self._loader, scalars)

    @torch.no_grad()
    def destroy(self) -> None:
        """Take the hooks off and give every parameter whole memory of its own. All ranks must."""
        if self._cycle.destroyed:
            return
        self._saver.wait()
        self._cycle.destroyed = True
        runtime = self._parts.runtime
        self._parts.hooks.remove()
        access.forget(runtime.bucket_of)
        runtime.release()
        self._parts.homes.close()
        if self._collector is not None:
            self._collector()
        gc.collect()
        give_back_freed_memory()
