"""What an engine tells: a line of progress, times and memory, and its state at the start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from hadal.config import Config
from hadal.engine.batches import BatchSizes
from hadal.engine.clocks import Clocks, MemoryGauge, Throughput
from hadal.engine.topology import Topology
from hadal.zero.bucket import Bucket
from hadal.zero.runtime import ZeroRuntime

_log = logging.getLogger(__name__)

_MEBIBYTE = 1 << 20


class Progress(NamedTuple):
    """What a line of progress says beside the number of updates."""

    skipped: int
    rates: Sequence[float]
    momenta: Sequence[Any]
    norm: float | None


@dataclass(slots=True)
class Reporter:
    """Says after an update what is due. Lines come from one rank only."""

    every: int | None
    """Updates between two lines of progress; None: there are none."""
    clocks: Clocks
    throughput: Throughput | None
    speaks: bool
    """Whether this is the rank that tells."""

    def end_update(self, number: int, samples: int, progress: Callable[[], Progress]) -> None:
        """Update `number` (from 1), with so many samples of all ranks, is over."""
        self.clocks.end_update()
        if self.throughput is not None:
            self.throughput.end_update(samples)
        if not self.speaks:
            return
        if self.every is not None and number % self.every == 0:
            _log.info("%s", self._line(number, progress()))
        if number % (self.every or 1) == 0:
            self._tell_breakdowns(number)

    def _line(self, number: int, progress: Progress) -> str:
        norm = "not computed" if progress.norm is None else f"{progress.norm:.4g}"
        line = (
            f"step {number}, skipped {progress.skipped}, lr {list(progress.rates)},"
            f" momentum {list(progress.momenta)}, gradient norm {norm}"
        )
        rate = self.throughput.take_rate() if self.throughput else None
        return line if rate is None else f"{line}, {rate:.4g} samples/s"

    def _tell_breakdowns(self, number: int) -> None:
        means = self.clocks.take_means()
        if means:
            told = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
            _log.info("step %d, ms of one update: %s", number, told)
        for name, gauge in self.clocks.memory.items():
            _log.info("step %d, memory around %s: %s", number, name, memory_told(gauge))


def memory_told(gauge: MemoryGauge) -> str:
    """The memory before and after a phase, in MiB."""
    before, after = gauge.before, gauge.after
    host = f"host {_mib(before.host)} -> {_mib(after.host)}"
    device = f"device {_mib(before.device)} -> {_mib(after.device)}"
    return f"{host}, {device}, peak {_mib(after.device_peak)}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MEBIBYTE:.1f} MiB"


def tell_state(
    config: Config, model: nn.Module, runtime: ZeroRuntime, batches: BatchSizes, topology: Topology
) -> None:
    """Log what `dump_state` asks for."""
    _log.info("configuration: %s", json.dumps(config.as_dict(), indent=1, default=str))
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
    """The rows in columns, below their names; nothing where there are none."""
    if not rows:
        return
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    for row in ({name: name for name in names}, *rows):
        yield "  ".join(f"{row[name]:<{widths[name]}}" for name in names).rstrip()
