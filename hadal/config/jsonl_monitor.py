"""`jsonl_monitor`: everything about a run in one file of JSON lines."""

from typing import ClassVar

from hadal.config.section import NULL_IS_DEFAULT, Section, key
from hadal.config.values import Boolean, Text


class JsonlMonitor(Section):
    """Everything about a run in `events.jsonl`, one JSON object per line, written by rank 0.

    The first line describes the run (configuration, model, machine); each update adds a line with
    its scalars. A section of Hadal's own.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Write the file.")
    output_path: Text = key(
        "", "Parent directory; empty or null is the working directory.", mark=NULL_IS_DEFAULT
    )
    job_name: Text = key("DeepSpeedJobName", "Directory inside output_path.")
    report: Boolean = key(
        False,
        "Also record warnings, checkpoints, memory, profile and communication, and write "
        "report.html next to the file when the program ends. `hadal report FOLDER` builds "
        "that page from any such file.",
    )
