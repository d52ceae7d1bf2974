"""`tensorboard`: training events as TensorBoard event files."""

from typing import ClassVar

from hadal.config.section import NULL_IS_DEFAULT, UNBUILT, Section, key
from hadal.config.values import Boolean, Text


class TensorBoard(Section):
    """Training events as TensorBoard event files, written by rank 0."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Write events.", mark=UNBUILT)
    output_path: Text = key(
        "", "Parent directory; empty or null is the working directory.", mark=NULL_IS_DEFAULT
    )
    job_name: Text = key("DeepSpeedJobName", "Directory inside output_path.")
