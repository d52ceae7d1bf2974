"""`tensorboard`: scalars for TensorBoard."""

from typing import ClassVar

from hadal.config.section import NULL_IS_DEFAULT, Section, key
from hadal.config.values import Boolean, Text


class TensorBoard(Section):
    """Scalars of training in an event file for TensorBoard, written by rank 0.

    The step is the number of samples so far. Needs `pip install tensorboard`.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Write scalars.")
    output_path: Text = key(
        "", "Parent directory; empty or null is the working directory.", mark=NULL_IS_DEFAULT
    )
    job_name: Text = key("DeepSpeedJobName", "Directory inside output_path.")
