"""Detection, one update late, of writes to weights that torch does not count on accelerators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects
from hadal.device import HostCopy, start_reading
from hadal.errors import UsageError, few
from hadal.zero.bucket import Bucket


class UncountedEdits:
    """A check of weights before each update that does not wait for the device.

    torch counts in-place writes under `torch.no_grad()`, which are absorbed. A write through
    `parameter.data` shows only in the values: the device compares them, and the host reads the
    result before the next update. By then such a write is lost.
    """

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._reading: HostCopy | None = None

    def look(self, buckets: Sequence[Bucket]) -> None:
        """Absorb counted writes, and begin to compare values for uncounted ones."""
        seen = [(bucket.absorb_unread(), bucket) for bucket in buckets]
        found = [(answer, bucket.name) for answer, bucket in seen if answer is not None]
        if self._reading is not None and (not self._reading.is_over or self.lost):
            return  # the device is more than an update behind, or a loss is not reported yet
        self._reading = None
        if found:
            self._names = [name for _, name in found]
            answers = torch.stack([answer for answer, _ in found])
            self._reading = start_reading(answers, "whether weights were written to")

    @property
    def lost(self) -> bool:
        """Return True if an uncounted write on this rank before the last update is known."""
        reading = self._reading
        return reading is not None and reading.is_over and bool(reading.values().any())

    def error(self, ranks: Ranks) -> UsageError:
        """Return the error to raise on every rank if any has lost a write; all must call it."""
        mine: list[str] = []
        if self.lost and self._reading is not None:
            answers = self._reading.values().tolist()
            mine = [name for name, is_lost in zip(self._names, answers, strict=True) if is_lost]
        self._reading = None
        names = sorted({name for names in gather_objects(mine, ranks) for name in names})
        return UsageError(
            f"weights of {few(names)} were written to through parameter.data"
            " (or a tensor made from it) before the last update, and the write is lost: on an"
            " accelerator torch does not count such a write, and finding it would mean to wait for"
            " the device. Write in place under torch.no_grad(), as in parameter.copy_(values), or"
            " inside `with hadal.zero.GatheredParameters(parameters, modifier_rank=0):`"
        )
