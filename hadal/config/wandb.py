"""`wandb`: training events in Weights & Biases."""

from typing import ClassVar

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Text


class Wandb(Section):
    """Training events as a Weights & Biases run, sent by rank 0."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Send events.", mark=UNBUILT)
    group: Text | None = key(None, "Group of the run.")
    team: Text | None = key(None, "Owner of the run.")
    project: Text = key("deepspeed", "Project of the run.")
