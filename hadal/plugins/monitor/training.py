"""The scalars that are written for each update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import sum_
from hadal.device import (
    HostCopy,
    Stamp,
    StreamPurpose,
    is_host_memory,
    peak_memory,
    side_stream,
    start_reading,
)
from hadal.listener import Forward, Listener, Update
from hadal.plugins.monitor.monitor import Monitor
from hadal.plugins.monitor.record import ScalarRecord, Value

_PREFIX = "Train/Samples/"
_SUM = "the sum of the ranks' losses"


class ScalarScope(NamedTuple):
    """The scalars to write, and the ranks over which the loss is averaged."""

    ranks: Ranks
    """Number of ranks that average gradients: data-parallel ranks times sequence ranks."""
    samplers: int
    """Number of ranks with different samples."""
    extra: bool
    """True to write more scalars than DeepSpeed."""
    has_scale: bool
    """True if there is a loss scale."""


class MeasuredUpdate(NamedTuple):
    """One update, whose values the device may still be computing."""

    update: Update
    sums: HostCopy
    """Sums over ranks: their mean losses, the number of ranks with a loss, and their tokens."""
    scope: ScalarScope
    began: Stamp | None
    """The end of the previous update; None for the first one."""
    ended: Stamp
    peak_nbytes: int
    time: float

    @property
    def is_known(self) -> bool:
        """Return True if the device has finished the update."""
        return self.update.is_known and self.sums.is_over and self.ended.is_reached

    def records(self) -> Iterator[ScalarRecord]:
        """Return the scalars of the update. Waits for the device."""
        update = self.update
        values = {f"{_PREFIX}{name}": value for name, value in self._values()}
        yield ScalarRecord(update.total_samples, values, self.time, update.number)

    def _values(self) -> Iterator[tuple[str, Value]]:
        update, scope = self.update, self.scope
        loss, known, tokens = self.sums.values().tolist()
        if update.rates:
            yield "lr", update.rates[0]
        if known == scope.ranks.size:
            yield "train_loss", loss / scope.samplers
        if scope.has_scale:
            yield "loss_scale", update.scale
        if scope.extra:
            if update.norm is not None:
                yield "grad_norm", update.norm
            yield "skipped_steps", update.skipped_updates
            yield from self._rates(tokens)
            yield "peak_memory_bytes", self.peak_nbytes
        for phase, spent in update.times.items():
            yield f"elapsed_time_ms_{phase}", spent

    def _rates(self, tokens: float) -> Iterator[tuple[str, Value]]:
        seconds = 0.0 if self.began is None else self.ended.seconds_since(self.began)
        if seconds > 0:
            yield "samples_per_sec", self.update.samples / seconds
            if tokens:
                yield "tokens_per_sec", tokens / seconds


class TrainingEvents(Listener):
    """Writes the scalars of each update to the monitors.

    The ranks sum their losses once per update. On an accelerator this overlaps with other work,
    and the scalars are written once it has finished, one or two updates later.
    """

    name = "hadal.monitor"

    def __init__(self, monitor: Monitor, scope: ScalarScope, device: torch.device) -> None:
        self._monitor = monitor
        self._scope = scope
        self._device = device
        self._dtype = torch.float64 if is_host_memory(device) else torch.float32
        self._beside = side_stream(StreamPurpose.REPORT, device)
        self._forwarded = self._tokens = 0
        self._ended: Stamp | None = None

    def before_forward(self, forward: Forward) -> None:
        """Count tokens."""
        if self._scope.extra and torch.is_grad_enabled():
            self._forwarded += forward.tokens

    def after_backward(self, loss: Tensor | None) -> None:
        """Count the forward's tokens as trained."""
        self._tokens += self._forwarded
        self._forwarded = 0

    def after_update(self, update: Update) -> None:
        """Start to sum the ranks' losses, and write the scalars that are known by now."""
        began, self._ended = self._ended, Stamp(self._device)
        peak = peak_memory(self._device) if self._scope.extra else 0
        sums = self._sums(update)
        self._tokens = 0
        self._monitor.write(
            MeasuredUpdate(update, sums, self._scope, began, self._ended, peak, time.time())
        )

    def on_error(self, error: BaseException) -> None:
        """Discard a forward without a backward: its tokens were not trained."""
        self._forwarded = 0

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return None, after writing the scalars of all updates before a checkpoint."""
        self._monitor.flush()
        return None

    def close(self) -> None:
        """Write the remaining scalars."""
        self._monitor.close()

    def at_exit(self) -> None:
        """Write the scalars that the device has computed by now."""
        self._monitor.close_in_time()

    def _sums(self, update: Update) -> HostCopy:
        row, loss = torch.zeros(3, dtype=self._dtype, device=self._device), update.loss
        if loss is not None:
            row[0] = loss
            row[1] = 1
        row[2] = self._tokens
        # The backend runs collectives in order, and gathers of weights may precede this one:
        # the device's next computation does not wait for it.
        self._beside.follow_device()
        with self._beside.current():
            sum_(row, self._scope.ranks, _SUM)
            found = start_reading(row, _SUM)
        self._beside.keep(row)
        return found
