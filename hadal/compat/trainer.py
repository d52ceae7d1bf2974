"""Additions to the Hugging Face Trainer: checkpoints on preemption, weights of micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from hadal.comm import all_reduce
from hadal.compat import groups
from hadal.engine.preemption import Preemption
from hadal.plugins.sequence.tiles import IGNORED


class SaveOnSignal(TrainerCallback):
    """Make the Trainer save and exit at a signal of `checkpoint.on_signal`, with `save_dir` null.

    Call `trainer.add_callback(SaveOnSignal())` on all ranks. The Trainer saves a checkpoint in its
    `output_dir`, from which `trainer.train(resume_from_checkpoint=True)` resumes. Then the program
    ends with exit code 75.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for a checkpoint, and for the end of training."""
        preemption = Preemption.present()
        if preemption is not None and preemption.is_due:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave: the checkpoint is saved."""
        preemption = Preemption.present()
        if preemption is not None and preemption.is_due:
            preemption.leave()


class WeighByTargets:
    """Mixin for a Trainer that splits sequences: weights micro-batches by their targets.

    With `ParallelismConfig(sp_backend="deepspeed")` the Trainer averages the micro-batches of an
    update without regard to their numbers of targets. Without sequence parallelism it averages
    over targets, and so does a Trainer with this mixin: `class Weighing(WeighByTargets,
    SFTTrainer): pass`. Evaluation, and training without split sequences, do not change.
    """

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the batches of an update as the Trainer does, and count their targets."""
        samples, number = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if self._splits_sequences():
            counts = [_targets(one["shift_labels"]) for one in samples]
            total = (
                torch.stack(counts).sum().to(device) if counts else torch.zeros((), device=device)
            )
            over_all = self.args.average_tokens_across_devices  # type: ignore[attr-defined]
            sequence = groups.get_sequence_parallel_group()
            all_reduce(total, group=None if over_all else sequence)
            readers = groups.get_data_parallel_world_size() if over_all else 1
            # The Trainer divides by the micro-batches, and the engine by the readers.
            self._share = len(samples) * readers / total.clamp(min=1)
        return samples, number

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the Trainer's loss, in proportion to the targets of whole sequences."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        if not (self._splits_sequences() and self.model.training):  # type: ignore[attr-defined]
            return found
        count = _targets(inputs["shift_labels"])
        all_reduce(count, group=groups.get_sequence_parallel_group())
        weight = count * self._share.to(count.device)
        return (found[0] * weight, found[1]) if return_outputs else found * weight

    def _splits_sequences(self) -> bool:
        parallel = getattr(self.accelerator, "parallelism_config", None)  # type: ignore[attr-defined]
        return parallel is not None and parallel.sp_enabled and parallel.sp_backend == "deepspeed"


def _targets(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()
