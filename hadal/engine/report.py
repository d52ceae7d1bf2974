"""Reports of an engine: a line of progress, times and memory, and its state at the start."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hadal.config import Config
from hadal.device import is_host_memory, memory_use, read_on_host
from hadal.engine.batches import BatchSizes
from hadal.engine.clocks import Clocks, MemoryGauge, Throughput
from hadal.engine.progress import Progress
from hadal.engine.topology import Topology
from hadal.listener import Forward, Listener, Update
from hadal.zero.bucket import Bucket
from hadal.zero.runtime import ZeroRuntime

_log = logging.getLogger(__name__)

_MEBIBYTE = 1 << 20


class Reporter(Listener):
    """Logger of progress, times and memory after an update, on one rank only."""

    def __init__(
        self,
        every: int | None,
        clocks: Clocks,
        throughput: Throughput | None,
        device: torch.device,
        *,
        total: int | None = None,
        readers: int,
        speaks: bool,
    ) -> None:
        self._every = every
        """Updates between two lines of progress; None: no lines."""
        self._clocks = clocks
        self._throughput = throughput
        self._device = device
        self._total = total
        """Updates until the schedule ends; None if it does not."""
        self._readers = readers
        """Ranks that see different samples."""
        self._speaks = speaks
        self._losses: list[Tensor] = []
        self._updates = self._tokens = self._samples = 0
        """Counts since the previous line, on this rank."""

    def before_forward(self, forward: Forward) -> None:
        """Count tokens."""
        if self._speaks and forward.is_training:
            self._tokens += forward.tokens

    def after_update(self, update: Update) -> None:
        """Log a line of progress, times and memory, if they are due."""
        if self._throughput is not None:
            self._throughput.end_update(update.samples)
        if not self._speaks:
            return
        if self._every is not None:
            self._add(update)
            if update.number % self._every == 0:
                _log.info("%s", self._take(update))
        if update.number % (self._every or 1) == 0:
            self._log_breakdowns(update.number)

    def _add(self, update: Update) -> None:
        self._updates += 1
        self._samples += update.samples
        loss = update.loss
        if loss is not None:
            self._losses.append(loss)

    def _take(self, update: Update) -> Progress:
        """Return the next line, and reset the counts. Waits for the device."""
        rate = self._throughput.take_rate() if self._throughput else None
        losses = self._losses
        mean = read_on_host(torch.stack(losses).mean(), "the loss to log") if losses else None
        use = memory_use(self._device)
        each = self._samples / self._updates
        said = Progress(
            number=update.number,
            total=self._total,
            loss=None if mean is None else float(mean),
            rates=update.rates,
            momenta=update.momenta,
            norm=update.norm,
            samples_per_s=rate,
            tokens_per_s=self._token_rate(rate, update),
            update_s=each / rate if rate else None,
            nbytes=use.host if is_host_memory(self._device) else use.device_peak,
            skipped=update.skipped_updates,
        )
        self._losses.clear()
        self._updates = self._samples = self._tokens = 0
        return said

    def _token_rate(self, rate: float | None, update: Update) -> float | None:
        """Return tokens per second of all ranks, assuming batches like this rank's."""
        if rate is None or not self._tokens:
            return None
        mine = self._samples / self._readers
        return rate * self._tokens / mine

    def _log_breakdowns(self, number: int) -> None:
        means = self._clocks.take_means()
        if means:
            text = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
            _log.info("step %d, ms of one update: %s", number, text)
        for name, gauge in self._clocks.memory.items():
            _log.info("step %d, memory around %s: %s", number, name, memory_text(gauge))


def memory_text(gauge: MemoryGauge) -> str:
    """Format the memory before and after a phase, in MiB."""
    before, after = gauge.before, gauge.after
    host = f"host {_mib(before.host)} -> {_mib(after.host)}"
    device = f"device {_mib(before.device)} -> {_mib(after.device)}"
    return f"{host}, {device}, peak {_mib(after.device_peak)}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MEBIBYTE:.1f} MiB"


def log_state(
    config: Config, model: nn.Module, runtime: ZeroRuntime, batches: BatchSizes, topology: Topology
) -> None:
    """Log the output of `dump_state`."""
    _log.info("configuration: %s", json.dumps(config.as_public_dict(), indent=1, default=str))
    _log.info("%s", "\n".join(_state(model, runtime, batches, topology)))


def _state(
    model: nn.Module, runtime: ZeroRuntime, batches: BatchSizes, topology: Topology
) -> Iterator[str]:
    parameters = list(model.parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    yield f"state of the engine over {type(model).__name__}"
    yield f"parameters: {len(parameters)} of {numel:,} elements, {trained:,} to be trained"
    yield (
        f"batch: {batches.train} = {batches.micro} per device x {batches.accumulation} accumulation"
        f" x {batches.data_parallel_size} ranks"
    )
    yield (
        f"ranks: {topology.sharing.shards.size} share the state, {topology.sequence_parallel_size}"
        f" each sequence, {topology.model_parallel_size} the model"
    )
    yield from _table([_row(bucket) for bucket in runtime.buckets])


def _row(bucket: Bucket) -> Mapping[str, str]:
    partition, precision = bucket.partition, bucket.precision
    cut = {
        "optimizer": partition.optimizer,
        "gradients": partition.gradients,
        "weights": partition.weights,
    }
    start, stop = bucket.span
    return {
        "bucket": bucket.name,
        "parameters": str(len(bucket.parameters)),
        "elements": f"{bucket.layout.numel:,}",
        "padding": f"{bucket.layout.padding:,}",
        "mine": f"{stop - start:,}",
        "sharded": ", ".join(name for name, is_cut in cut.items() if is_cut) or "nothing",
        "weights": _name(precision.compute),
        "masters": _name(precision.master) if bucket.trainable else "frozen",
        "gradients": _name(precision.accumulate) if bucket.trainable else "frozen",
        "wire": _name(precision.reduce) if bucket.trainable else "frozen",
    }


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the rows as columns below a header; nothing if there are none."""
    if not rows:
        return
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    for row in ({name: name for name in names}, *rows):
        yield "  ".join(f"{row[name]:<{widths[name]}}" for name in names).rstrip()
