"""`wandb`: scalars in Weights & Biases."""

from typing import ClassVar

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Text


class Wandb(Section):
    """Scalars of training in a Weights & Biases run, sent by rank 0.

    The step is the number of samples so far. Needs `pip install wandb`. wandb's own variables set
    everything else (WANDB_MODE, WANDB_DIR, WANDB_RUN_ID); a run that the program has started is
    used.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Send scalars.")
    group: Text | None = key(None, "Group of the run.")
    team: Text | None = key(None, "Owner of the run.")
    project: Text = key("deepspeed", "Project of the run.")
