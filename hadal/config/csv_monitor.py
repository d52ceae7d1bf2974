"""`csv_monitor`: scalars in CSV files."""

from typing import ClassVar

from hadal.config.section import NULL_IS_DEFAULT, Section, key
from hadal.config.values import Boolean, Text


class CsvMonitor(Section):
    """Scalars of training in CSV files, one per name, written by rank 0.

    Each has a header, then lines with the number of samples so far and the value; later runs
    append.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Write scalars.")
    output_path: Text = key(
        "", "Parent directory; empty or null is the working directory.", mark=NULL_IS_DEFAULT
    )
    job_name: Text = key("DeepSpeedJobName", "Directory inside output_path.")
