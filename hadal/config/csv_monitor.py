"""`csv_monitor`: training events as one CSV file for each event."""

from typing import ClassVar

from hadal.config.section import NULL_IS_DEFAULT, UNBUILT, Section, key
from hadal.config.values import Boolean, Text


class CsvMonitor(Section):
    """Training events as one CSV file for each event, written by rank 0."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Write events.", mark=UNBUILT)
    output_path: Text = key(
        "", "Parent folder; empty or null is the working folder.", mark=NULL_IS_DEFAULT
    )
    job_name: Text = key("DeepSpeedJobName", "Folder inside output_path.")
