"""The engine of a model in stages: it trains by whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from hadal.comm.collectives import broadcast_, gather_codes, gather_objects, sum_
from hadal.data.loader import RepeatingLoader
from hadal.engine.engine import Engine
from hadal.engine.precision import Casting, cast_floats
from hadal.engine.state import Parts
from hadal.errors import ChoiceError, CommunicationError, PipelineError, UsageError, expect_one_of
from hadal.plugins.pipeline.executor import Executor, chunks_of
from hadal.plugins.pipeline.later_weights import Later, LaterWeights
from hadal.plugins.pipeline.module import PipelineModule
from hadal.plugins.pipeline.orders import (
    OrderedSchedule,
    check_schedule,
    forward_order,
    training_schedule,
)
from hadal.plugins.pipeline.schedule import InferenceSchedule, PipeInstruction, PipeSchedule
from hadal.plugins.pipeline.wires import DataEndedError

Batch = Any
BatchFunction = Callable[[Any], Any]


class PipelineEngine(Engine):
    """An engine of one stage, made by `hadal.initialize` for a `PipelineModule`.

    All ranks call `train_batch` and `eval_batch` equally often.
    """

    def __init__(self, parts: Parts) -> None:
        module = parts.model
        assert isinstance(module, PipelineModule)  # `initialize` chooses the class by it
        # The whole model's inputs and outputs are cast, not those of a stage between others.
        super().__init__(parts._replace(casting=parts.casting._replace(inputs=None, outputs=None)))
        self.grid = module.mpu()
        self.num_stages, self.stage_id = module.num_stages, module.stage_id
        names = [module.chunk_name(number) for number in range(len(module.parts) - 1)]
        slices, section = self.grid.slices, parts.config.pipeline
        self._schedule = section.schedule
        work = _StageWork(self, module, parts.casting, puts_off=section.schedule == "zero_bubble")
        self._work = work
        sends_slices = section.pipe_partitioned, section.grad_partitioned
        shared = [slices if wanted and slices.size > 1 else None for wanted in sends_slices]
        chunks = chunks_of(self.grid.pipe, names, parts.device, (shared[0], shared[1]))
        self._executor = Executor(work, chunks, keeps_layout=not module.dynamic_shape)
        self._state.boundary = False
        self.total_loss: Tensor | None = None
        """The sum of the last batch's losses, on the last stage."""
        self.agg_train_loss: Tensor | None = None
        """The mean loss of the last batch over all samples."""
        self.loss: Tensor | None = None
        """The loss of the last micro-batch, on the last stage."""
        self._additional: dict[str, Tensor] | None = None
        self.training_loader: Any = None
        if parts.loader is not None:
            self.set_dataloader(RepeatingLoader(parts.loader))

    # ---- who this is -----------------------------------------------------------------------------

    @property
    def _stages(self) -> PipelineModule:
        assert isinstance(self.module, PipelineModule)
        return self.module

    @property
    def micro_batches(self) -> int:
        """The micro-batches of one update."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """The samples of a micro-batch on one rank."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def loaded(self) -> Any:
        """The last micro-batch that this rank has read; None on a stage in the middle."""
        return self._work.loaded

    def is_first_stage(self) -> bool:
        """Return True if this stage reads the inputs."""
        return self.grid.is_first_stage

    def is_last_stage(self) -> bool:
        """Return True if this stage computes the loss."""
        return self.grid.is_last_stage

    def get_pipeline_parallel_rank(self) -> int:
        """Return this stage's number."""
        return self.stage_id

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True during the last backward of an update, and in the update."""
        return bool(self._state.boundary)

    # ---- data ------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Batch]) -> None:
        """Read micro-batches, pairs of inputs and labels, from a loader from now on."""
        self.training_loader = loader
        self._work.batches = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Batch]) -> None:
        """Read micro-batches from an iterator from now on. The stages in the middle read none."""
        self.training_loader = None
        self._work.batches = iterator

    def set_batch_fn(self, fn: BatchFunction | None) -> None:
        """Call `fn` on each micro-batch that is read; it returns the pair."""
        self._work.batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: stages send tensors of any dtype unchanged."""

    def reset_activation_shape(self) -> None:
        """Let the next micro-batches have other shapes. All ranks must call it."""
        self._executor.forget_layouts()

    # ---- training and evaluation -----------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Batch] | None = None) -> Tensor:
        """Train on one batch, of `micro_batches` micro-batches; return its mean loss on all ranks.

        Args:
            data_iter: micro-batches, as `set_dataiterator` takes them.

        Raises:
            StopIteration: the data of any stage has ended; nothing was trained.
            PipelineError: another stage has failed; the text is its error.
            UsageError: gradients are switched off.
        """
        if not torch.is_grad_enabled():
            raise UsageError("train_batch() was called under torch.no_grad(); use eval_batch()")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._state.expect_alive(in_pass=True)
        self._begin_pass()
        self.train()
        steps = self._training_steps()
        losses = self._followed(steps, trains=True)
        means, self.agg_train_loss = self._mean_loss(losses)
        self._state.losses = list(means.unbind())
        self._state.boundary = True
        try:
            self._update()
        finally:
            self._state.boundary = False
            self._state.micro_steps = 0
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Batch] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate micro-batches, without gradients.

        Args:
            data_iter: the micro-batches; middle stages read none.
            return_logits: return also the last micro-batch's output; None on other stages.
            compute_loss: compute losses, or else return the outputs themselves.
            reduce_output: "avg": their mean over micro-batches and ranks; None: the list of
                them, on the last stage alone.
            bcast_loss: broadcast the mean loss to all stages; otherwise they return None.
            num_micro_batches: the number of micro-batches; by default that of an update.

        Raises:
            ChoiceError: another `reduce_output`.
            StopIteration, PipelineError: as `train_batch`.
        """
        expect_one_of(("avg", None), "eval_batch's reduce_output", reduce_output, ChoiceError)
        self._state.expect_alive()
        count = num_micro_batches or self.micro_batches
        was_training, before = self.module.training, self._work.batches
        self.eval()
        self._work.batches, self._work.computes_loss = data_iter, compute_loss
        try:
            steps = self._evaluation_steps(count)
            with torch.no_grad():
                found: Any = self._followed(steps, trains=False)
        finally:
            self._work.batches, self._work.computes_loss = before, True
            self.train(was_training)
        outputs, self._work.outputs = self._work.outputs, None
        found = self._reduced(found, reduce_output, spreads=compute_loss and bcast_loss)
        if self.monitor.enabled and compute_loss and bcast_loss and isinstance(found, Tensor):
            event = ("Train/Samples/eval_loss", float(found.float().mean()), self.global_samples)
            self.monitor.write_events([event])
        return (found, outputs) if return_logits else found

    def _update(self) -> None:
        """Average the gradients, and update the weights."""
        super().step()

    def _own_instructions(self) -> Mapping[type[PipeInstruction], Callable[..., Any]]:
        """Return the program's own functions for kinds of instructions."""
        return {}

    def _training_steps(self) -> PipeSchedule:
        count, stages, stage = self.micro_batches, self.num_stages, self.stage_id
        chunks = len(self._stages.chunks)
        return training_schedule(self._schedule, count, stages, stage, chunks)

    def _evaluation_steps(self, count: int) -> PipeSchedule:
        stages, stage, chunks = self.num_stages, self.stage_id, len(self._stages.chunks)
        if chunks == 1:
            return InferenceSchedule(count, stages, stage)
        return OrderedSchedule(count, stages, stage, forward_order(count, stages, chunks), chunks)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of an update, and so its micro-batches.

        Raises:
            UsageError: the ranks cannot share it, or the schedule has no such number.
        """
        super().set_train_batch_size(train_batch_size)
        check_schedule(self._schedule, self.micro_batches, self.num_stages)

    def destroy(self) -> None:
        """Free everything that belongs to the engine; the module keeps its weights."""
        self._work.close()
        super().destroy()

    def _followed(self, steps: PipeSchedule, *, trains: bool) -> list[Any]:
        """Follow a schedule; after a failure on any stage, raise on all of them.

        After it the stages can begin anew.
        """
        pipe, fault = self.grid.pipe, None
        found: list[Any] = []
        try:
            found = self._executor.run(steps, trains=trains, own=self._own_instructions())
        except CommunicationError:
            raise  # a rank is gone, or programs differ: ranks cannot agree any more
        except Exception as error:
            fault = error
        codes = gather_codes(
            int(fault is not None), pipe, "the agreement of the stages at the end of a batch"
        )
        if not any(codes):
            return found
        self._executor.end()
        if trains:
            self._state.boundary = False
            self.zero_grad()
        if isinstance(fault, DataEndedError):
            raise StopIteration(str(fault)) from None
        if fault is not None:
            raise fault
        stages = [stage for stage, code in enumerate(codes) if code]
        raise PipelineError(f"stages {stages} stopped at the end of a batch; their errors say why")

    def _mean_loss(self, losses: list[Any]) -> tuple[Tensor, Tensor]:
        """Return each micro-batch's loss here, and the mean over all samples, on all stages."""
        pipe, readers = self.grid.pipe, self.grid.sharing
        row = torch.zeros(self.micro_batches, dtype=torch.float32, device=self.device)
        mean = torch.zeros((), dtype=torch.float32, device=self.device)
        if self.is_last_stage():
            self.loss = losses[-1]
            row = torch.stack([loss.float().reshape(()) for loss in losses])
            self.total_loss = row.sum()
            mean = row.mean()
            sum_(mean, readers, "the sum of the losses")
            mean /= readers.size
        last = pipe.size - 1
        broadcast_(row, last, pipe, "the broadcast of the last stage's losses")
        broadcast_(mean, last, pipe, "the broadcast of the mean loss")
        self._share_additional()
        return row, mean

    def _share_additional(self) -> None:
        last = self._stages.get_additional_losses() if self.is_last_stage() else None
        if type(self._stages).get_additional_losses is PipelineModule.get_additional_losses:
            return
        values = {name: float(value) for name, value in (last or {}).items()}
        found: Mapping[str, float] = gather_objects(values, self.grid.pipe)[-1]
        self._additional = {name: torch.tensor(value) for name, value in found.items()} or None

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """Return the module's additional losses of the last batch; None if it has none."""
        return self._additional

    def _reduced(self, found: list[Any], how: str | None, *, spreads: bool) -> Any:
        """Return the mean of the last stage's results, on all stages if it is a loss."""
        if how is None:
            return found if self.is_last_stage() else None
        mean: Any = None
        if self.is_last_stage():
            mean = _mean(found)
            for tensor in mean if isinstance(mean, tuple) else (mean,):
                sum_(tensor, self.grid.sharing, "the sum of results")
                tensor /= self.grid.sharing.size
        if not spreads:
            return mean
        pipe, last = self.grid.pipe, self.grid.pipe.size - 1
        shape = gather_objects(None if mean is None else tuple(mean.shape), pipe)[-1]
        if not self.is_last_stage():
            mean = torch.zeros(shape, dtype=torch.float32, device=self.device)
        broadcast_(mean, last, pipe, "the broadcast of the last stage's results")
        return mean

    # ---- refused: the schedule does it -----------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `PipelineError`: a single stage has no input."""
        raise _refused("forward")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `PipelineError`: `train_batch` runs backwards."""
        raise _refused("backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `PipelineError`: `train_batch` makes updates."""
        raise _refused("step")

    def run_forward(self, value: Any, chunk: int) -> Any:
        """Return the output of a chunk of this stage, for the executor."""
        return super().forward(value, chunk=chunk)

    def run_backward(self, root: Tensor | None, loss: Tensor | None, *, is_last: bool) -> None:
        """Run a backward of this stage, for the executor."""
        self._state.boundary = is_last
        if root is None:
            root = torch.zeros((), device=self.device, requires_grad=True)
        # The gradients that were received have all factors already.
        self._backwards.run(root, retain_graph=False, divides=loss is not None)


class _StageWork:
    """The computation of one stage, as the executor calls it."""

    def __init__(
        self, engine: PipelineEngine, module: PipelineModule, casting: Casting, *, puts_off: bool
    ) -> None:
        self._engine = engine
        self._module = module
        self._casting = casting
        self._later = LaterWeights(module) if puts_off else None
        self.batches: Iterator[Batch] | None = None
        self.batch_fn: BatchFunction | None = None
        self.computes_loss = True
        self.loaded: Any = None
        """The last micro-batch that was read."""
        self.outputs: Any = None
        """The last output, on the last stage, outside of training."""

    def load(self) -> tuple[Any, Any]:
        if self.batches is None:
            raise UsageError(
                "train_batch() has no data: pass data_iter=, or training_data= to initialize, or"
                " call set_dataiterator() or set_dataloader()"
            )
        batch = next(self.batches)
        batch = batch if self.batch_fn is None else self.batch_fn(batch)
        self.loaded = batch
        first, last = self._engine.is_first_stage(), self._engine.is_last_stage()
        inputs, labels = (self._moved(part) for part in self._module.halves_of(batch))
        return self._cast(inputs, self._casting.inputs) if first else None, labels if last else None

    @staticmethod
    def _cast(value: Any, dtype: torch.dtype | None) -> Any:
        return value if dtype is None else cast_floats(value, dtype)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(self._engine.device)
        if isinstance(value, tuple | list):
            return tuple(self._moved(item) for item in value)
        if isinstance(value, Mapping):
            return {key: self._moved(item) for key, item in value.items()}
        return value

    def forward(self, chunk: int, value: Any) -> Any:
        return self._engine.run_forward(value, chunk)

    def loss(self, outputs: Any, labels: Any) -> Any:
        outputs = self._cast(outputs, self._casting.outputs)
        if not torch.is_grad_enabled():
            self.outputs = outputs
        if self._module.loss_fn is None or not self.computes_loss:
            return outputs
        return self._module.loss_fn(outputs, labels)

    def backward(self, root: Tensor | None, loss: Tensor | None, *, is_last: bool) -> None:
        self._engine.run_backward(root, loss, is_last=is_last)

    def put_off(self) -> list[Later]:
        return [] if self._later is None else self._later.take()

    def close(self) -> None:
        if self._later is not None:
            self._later.close()

    def place(self, chunk: int) -> str:
        index = self._module.curr_layer
        return self._module.layer_name(self._module.chunks[chunk][0] if index is None else index)


def _mean(found: list[Any]) -> Any:
    """Return the mean of tensors, or of tuples of tensors, in float32."""
    if isinstance(found[0], Tensor):
        return torch.stack([one.float() for one in found]).mean(0)
    return tuple(_mean(list(same)) for same in zip(*found, strict=True))


def _refused(name: str) -> PipelineError:
    return PipelineError(
        f"engine.{name}() is not there for a model in stages; call train_batch() or eval_batch()"
    )
