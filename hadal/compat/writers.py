"""`deepspeed.io`: file objects for `torch.save` that count what they write."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hadal.compat.log import logger

_NO_DESCRIPTOR = -1
_COUNTED = ("close", "fileno", "flush", "write", "bytes", "write_sec", "write_speed")


class BaseFileWriter:
    """A file object, and what was called on it."""

    def __init__(self, file_path: str | Path) -> None:
        self._file_path = str(file_path)
        self._stats: dict[str, Any] = dict.fromkeys(_COUNTED, 0)

    def file_path(self) -> str:
        """Return the file's path."""
        return self._file_path

    def fileno(self) -> int:
        """Return -1, so that torch writes through `write`."""
        self._count("fileno")
        return _NO_DESCRIPTOR

    def flush(self) -> None:
        """Count the call."""
        self._count("flush")

    def close(self) -> None:
        """Count the call."""
        self._count("close")

    def write(self, buffer: Any) -> int:
        """Count the bytes; return their number."""
        nbytes = memoryview(buffer).nbytes
        self._count("write")
        self._count("bytes", nbytes)
        return nbytes

    def _count(self, name: str, amount: float = 1) -> None:
        self._stats[name] += amount

    def _dump_state(self) -> None:
        """Log the counts, and the speed in GiB per second."""
        if self._stats["write_sec"] > 0:
            gibibytes = self._stats["bytes"] / 1024**3
            self._stats["write_speed"] = gibibytes / self._stats["write_sec"]
        logger.info("stats = %s", self._stats | {"path": self._file_path})


class MockFileWriter(BaseFileWriter):
    """Counts, and writes nothing: it shows how fast a state is serialized."""


class PyFileWriter(BaseFileWriter):
    """An ordinary file."""

    def __init__(self, file_path: str | Path) -> None:
        super().__init__(file_path)
        self._file = open(file_path, "wb")  # noqa: SIM115 - `close` closes it

    def write(self, buffer: Any) -> int:
        """Write a buffer; return its bytes."""
        start = time.perf_counter()
        self._file.write(buffer)
        self._count("write_sec", time.perf_counter() - start)
        return super().write(buffer)

    def flush(self) -> None:
        """Hand everything to the system."""
        super().flush()
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._file.close()


@dataclass
class FastFileWriterConfig:
    """The resources that DeepSpeed's asynchronous writer needs; Hadal's needs none of them."""

    dnvme_handle: object
    pinned_tensor: Tensor | None
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(PyFileWriter):
    """A file that is on the disk, not only with the system, once it is closed."""

    def __init__(self, file_path: str | Path, config: FastFileWriterConfig) -> None:
        super().__init__(file_path)
        self._config = config

    def close(self) -> None:
        """Wait for the disk, then close the file; a second call does nothing."""
        if self._file.closed:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        super().close()
