"""`SaveOnSignal`: the Hugging Face Trainer saves its own checkpoint when it is preempted.

Tests: tests/compat/test_preempted_trainer.py
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hadal.engine.preemption import Preemption


class SaveOnSignal(TrainerCallback):
    """Make the Trainer save and leave at a signal of `checkpoint.on_signal`, with `save_dir` null.

    `trainer.add_callback(SaveOnSignal())` on all ranks. The checkpoint is one of the Trainer's, in
    its `output_dir`, from which `trainer.train(resume_from_checkpoint=True)` goes on. The program
    ends with exit code 75 once it is saved.
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
