"""The log of an engine: who writes it, lines of progress, times and memory, the initial state."""

from __future__ import annotations

import json
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hadal.config import Config
from hadal.device import is_host_memory, memory_use, read_on_host
from hadal.engine.clocks import MemoryGauge, Throughput
from hadal.engine.listeners import EngineSetting
from hadal.engine.policies import BatchSizes
from hadal.engine.topology import Topology
from hadal.listener import Forward, Listener, Update
from hadal.zero.bucket import Bucket
from hadal.zero.runtime import ZeroRuntime

_log = logging.getLogger(__name__)

_MEBIBYTE = 1 << 20
_SECONDS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


# ---- the log -------------------------------------------------------------------------------------


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class _IfAlone(logging.StreamHandler):  # type: ignore[type-arg]  # from Python 3.11 on
    """Handler to standard error, silent if the program has its own handlers, now or later."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record above the progress bars that the program shows, if any."""
        if logging.getLogger().handlers:
            return
        self.stream = sys.stderr  # a bar of rich replaces it while it is shown
        tqdm = sys.modules.get("tqdm.std")
        bars = tqdm.tqdm.external_write_mode(sys.stderr) if tqdm is not None else nullcontext()
        with bars:
            super().emit(record)


def hush(rank: int) -> None:
    """Let ranks other than 0 log errors only, so that each message appears once.

    The filter is on every logger of the package, so that it holds for the program's own handlers
    too: a logger's filter does not see the records of its children.
    """
    if rank == 0:
        return
    names = [name for name in logging.root.manager.loggerDict if name.startswith("hadal.")]
    for name in ("hadal", *names):
        logging.getLogger(name).addFilter(_errors_only)


def open_log(config: Config, rank: int) -> None:
    """Set the configured level; add a handler on rank 0 if the program has none."""
    log = logging.getLogger("hadal")
    if config.log_level:
        log.setLevel(config.log_level.upper())
    asks = (
        config.log_level
        or config.steps_per_print
        or config.dump_state
        or config.activation_checkpointing.profile
        or config.activation_checkpointing.memory_budget
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or (config.comms_logger is not None and config.comms_logger.verbose)
        or (config.checkpoint.writer is not None and config.checkpoint.writer.show_statistics)
    )
    if not asks or rank != 0:
        return
    if log.level == logging.NOTSET and log.getEffectiveLevel() > logging.INFO:
        log.setLevel(logging.INFO)  # even if `logging.basicConfig()` has set a higher level
    if not log.handlers:
        log.addHandler(_IfAlone())


# ---- progress ------------------------------------------------------------------------------------


def _each(values: Sequence[float]) -> str:
    """Format the different values of param groups."""
    return ", ".join(dict.fromkeys(f"{float(value):.4g}" for value in values))


def number_of(value: float) -> str:
    """Format `12345.6` as `12.3k`: three digits."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format `3720` seconds as `1 h 2 min`: the two largest units; below a minute three digits."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    left = round(seconds)
    shown: list[tuple[int, str]] = []
    for length, unit in _SECONDS:
        count, left = divmod(left, length)
        if count or shown:
            shown.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in shown[:2] if count)


def _updates_of(config: Config) -> int | None:
    """Return the updates after which the configured schedule ends; None if it has no end."""
    scheduler = config.scheduler
    params: Mapping[str, Any] = scheduler.params if scheduler is not None else {}
    total = params.get("total_num_steps")
    return total if isinstance(total, int) else None


class _Columns:
    """Widths of a log's columns: a value is as wide as the widest of its column so far."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}

    def line(self, cells: Mapping[str, str]) -> str:
        """Return values in one line; their columns are texts with `{}` where the value goes."""
        for column, value in cells.items():
            self._widths[column] = max(len(value), self._widths.get(column, 0))
        return ", ".join(
            column.format(f"{value:>{self._widths[column]}}") for column, value in cells.items()
        )


class Reporter(Listener):
    """Logger of progress, times and memory after an update, on one rank only."""

    def __init__(self, every: int | None, setting: EngineSetting) -> None:
        """Log a line of progress after each `every` updates; None: no lines."""
        timer = setting.config.timers.throughput
        measures = timer.enabled and every is not None
        self._every = every
        self._clocks, self._device = setting.clocks, setting.device
        self._throughput = (
            Throughput(setting.device, synchronized=timer.synchronized) if measures else None
        )
        self._total = _updates_of(setting.config)
        self._readers = setting.data_parallel.size
        self._speaks = setting.world.rank == 0
        self._engine: Callable[[], Any] = lambda: None
        self._columns, self._phases = _Columns(), _Columns()
        self._losses: list[Tensor] = []
        self._updates = self._tokens = self._samples = 0
        """Counts since the previous line, on this rank."""

    def on_attach(self, engine: Any) -> None:
        """Keep the engine, which knows the epoch and the profile."""
        self._engine = weakref.ref(engine)

    def before_forward(self, forward: Forward) -> None:
        """Count tokens; models from a file are in evaluation mode until somebody changes that."""
        if self._speaks and torch.is_grad_enabled():
            self._tokens += forward.tokens

    def after_update(self, update: Update) -> None:
        """Log a line of progress, times and memory, if they are due."""
        if self._throughput is not None:
            self._throughput.end_update(update.samples)
        if not self._speaks:
            return
        if self._every is not None:
            self._updates += 1
            self._samples += update.samples
            self._losses += [] if update.loss is None else [update.loss]
            if update.number % self._every == 0:  # it waits for the device
                _log.info("%s", self._columns.line(dict(self._cells(update))))
                self._losses.clear()
                self._updates = self._samples = self._tokens = 0
        if update.number % (self._every or 1) == 0:
            self._log_breakdowns(update.number)

    def _cells(self, update: Update) -> Iterator[tuple[str, str]]:
        """Yield the columns that have a value."""
        momenta = [one[0] if isinstance(one, (tuple, list)) else one for one in update.momenta]
        use = memory_use(self._device)
        nbytes = use.host if is_host_memory(self._device) else use.device_peak
        yield self._step(update.number)
        engine = self._engine()
        loader = engine.training_dataloader if engine else None
        if loader is not None and loader.epochs:
            yield "epoch {}", f"{loader.epochs:.2f}"
        if self._losses:
            loss = read_on_host(torch.stack(self._losses).mean(), "the loss to log")
            yield "loss {}", f"{float(loss):#.4g}"
        if update.rates:
            yield "lr {}", _each(update.rates)
        if any(momenta):
            yield "mom {}", _each(momenta)
        if update.norm is not None:
            yield "norm {}", f"{update.norm:#.4g}"
        rate = self._throughput.take_rate() if self._throughput else None
        if rate:
            yield from self._speed(rate, engine)
        yield "{} GiB", f"{nbytes / (1 << 30):.2f}"
        if update.skipped_updates:
            yield "{} skipped", str(update.skipped_updates)
        if rate and self._total and self._total > update.number:
            seconds = self._samples / self._updates / rate
            yield "{} left", duration((self._total - update.number) * seconds)

    def _step(self, number: int) -> tuple[str, str]:
        total = self._total
        if total is None:
            return "step {}", f"{number:>5}"
        return "step {}", f"{number:>{len(str(total))}}/{total}"

    def _speed(self, rate: float, engine: Any) -> Iterator[tuple[str, str]]:
        if self._tokens:
            # Of all ranks, if their batches are like this one's.
            tokens = rate * self._tokens * self._readers / self._samples
            yield "{} tokens/s", number_of(tokens)
        else:
            yield "{} samples/s", number_of(rate)
        profiler = engine.flops_profiler if engine else None
        mfu = profiler.profile.mfu_at(rate) if profiler and profiler.profile else None
        if mfu is not None:
            yield "{} % MFU", f"{100 * mfu:.1f}"
        yield "{}/step", duration(self._samples / self._updates / rate)

    def _log_breakdowns(self, number: int) -> None:
        step = self._columns.line(dict([self._step(number)]))
        means = self._clocks.take_means()
        if means:
            times = {f"{name} {{}}": f"{value:.2f}" for name, value in means.items()}
            _log.info("%s, ms of one update: %s", step, self._phases.line(times))
        for name, gauge in self._clocks.memory.items():
            _log.info("%s, memory around %s: %s", step, name, memory_text(gauge))


def memory_text(gauge: MemoryGauge) -> str:
    """Format the memory before and after a phase, in MiB."""
    before, after = gauge.before, gauge.after
    host = f"host {_mib(before.host)} -> {_mib(after.host)}"
    device = f"device {_mib(before.device)} -> {_mib(after.device)}"
    return f"{host}, {device}, peak {_mib(after.device_peak)}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MEBIBYTE:.1f} MiB"


# ---- the state at the start ----------------------------------------------------------------------


def log_state(
    config: Config, model: nn.Module, runtime: ZeroRuntime, batches: BatchSizes, topology: Topology
) -> None:
    """Log the configuration and the state of an engine, if `dump_state` is set."""
    if not config.dump_state:
        return
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
    precision, cut = bucket.precision, bucket.partition._asdict()
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
