"""`tensorboard`: an event file for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hadal.config.monitors import TensorBoard
from hadal.plugins.monitor.packages import imported
from hadal.plugins.monitor.record import ScalarRecord

# TensorBoard's own thread writes and flushes the file at this interval; calls would block if its
# queue were full.
_FLUSH_S = 1
_QUEUE = 1024


class TensorBoardWriter:
    """Writes an event file: one scalar for each name, with the samples as its step."""

    section = "tensorboard"

    def __init__(self, config: TensorBoard, run: Mapping[str, Any]) -> None:
        """Create the directory and the event file; its text "run" describes the run.

        Raises:
            MissingPackageError: tensorboard is not installed.
            OSError: the file cannot be written.
        """
        imported(self.section)
        from torch.utils.tensorboard import SummaryWriter

        summary = imported(self.section, "tensorboard.compat.proto.summary_pb2")
        self._summary = summary.Summary
        folder = Path(config.output_path) / config.job_name
        self.summary_writer: Any = SummaryWriter(str(folder), max_queue=_QUEUE, flush_secs=_FLUSH_S)
        if run:
            told = json.dumps(run, indent=1, default=str)
            self.summary_writer.add_text("run", f"```json\n{told}\n```")

    def write(self, record: ScalarRecord) -> None:
        """Add one event with all values."""
        value = self._summary.Value
        found = record.values.items()
        summary = self._summary(value=[value(tag=tag, simple_value=one) for tag, one in found])
        self.summary_writer.file_writer.add_summary(summary, record.samples, record.time)

    def flush(self) -> None:
        """Flush the events that TensorBoard's thread has not written."""
        self.summary_writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self.summary_writer.close()
