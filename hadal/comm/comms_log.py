"""The log of collectives: their count, latency and bandwidth. It never waits.

Each collective has a record with a time stamp of its start and one of its last work's end. The
first to see a work end reports it: the thread that receives from a neighbour; torch's future of the
work (on an accelerator it records an event in a stream behind the collective); or, if a backend has
no futures (gloo's sends and reduce-scatters), the thread that waits for the work.

Messages and bandwidths are counted as NCCL's tests count them
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md derives the factors):

message              of a gather (or all-gather) all ranks' data together; of a reduce-scatter,
                     scatter or all-to-all the data that one rank sends to all: the longer side
algorithm bandwidth  the message's bytes divided by the transfer's seconds
bus bandwidth        the same times `bus_factor`: the traffic that any algorithm needs on a
                     rank's link, so it can be compared with the link's speed, and between
                     collectives and numbers of ranks
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.config.monitors import KIND_OF, OPERATIONS
from hadal.device import Stamp
from hadal.errors import UsageError

_log = logging.getLogger(__name__)

_SHARED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
# Latencies that are kept of each entry, to compare them between ranks.
_KEPT = 1000
# Records under way above which all of them are looked at, and not only the oldest.
_MANY = 64
# Files that are never reported as a call site.
_OWN = ("hadal.comm", "hadal.compat")


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor from a message's bytes to those on each rank's link."""
    if ranks < 2 or operation == "barrier":
        return 0.0
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in _SHARED else 1.0


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """Return the message's bytes per second; 0 if it took no time."""
    return nbytes / seconds if seconds > 0 else 0.0


def bus_bandwidth(operation: str, nbytes: int, seconds: float, ranks: int) -> float:
    """Return the bytes per second on each rank's link."""
    return bus_factor(operation, ranks) * algorithm_bandwidth(nbytes, seconds)


@dataclass(frozen=True, slots=True)
class LogChoice:
    """The choice of collectives to record."""

    verbose: bool = False
    """True: log a line for each collective."""
    prof_all: bool = True
    prof_ops: tuple[str, ...] = ()
    """The kinds that are recorded if `prof_all` is false; torch's function names are accepted.
    """
    debug: bool = False
    """True: distinguish calls from different places."""

    def __post_init__(self) -> None:
        kinds = tuple(KIND_OF.get(name, name) for name in self.prof_ops)
        object.__setattr__(self, "prof_ops", kinds)
        unknown = [name for name in kinds if name not in OPERATIONS]
        if unknown:
            raise UsageError(
                f"prof_ops names {unknown}, which is no kind of collective; expected some of"
                f" {list(OPERATIONS)}"
            )

    def wants(self, operation: str) -> bool:
        """Return True if collectives of this kind are recorded."""
        return self.prof_all or operation in self.prof_ops


class Key(NamedTuple):
    """The properties that calls counted together share."""

    operation: str
    nbytes: int
    """Bytes of the message, as it travels."""
    dtype: str
    """The dtype in which it travels; `object` for a pickle."""
    ranks: tuple[int, ...]
    """The ranks of the world that took part."""
    site: str
    """The call site or purpose; empty unless `debug`."""


class Record:
    """One collective under way."""

    __slots__ = ("_device", "_left", "began", "ended", "is_void", "key", "sent")

    def __init__(self, key: Key, device: torch.device) -> None:
        self.key = key
        self.sent = _least_sent(key)
        self._device = device
        self._left: set[int] = set()
        self.ended: Stamp | None = None
        self.is_void = False
        self.began = Stamp(device)

    def give_up(self) -> None:
        """Drop the record: the collective has failed, and is not counted."""
        self.is_void = True
        self.end()

    def is_long(self, nbytes: int) -> None:
        """Set the message's bytes, which were not known when it began."""
        self.key = self.key._replace(nbytes=nbytes)
        self.sent = _least_sent(self.key)

    def parts(self, count: int) -> list[Callable[[], None]]:
        """Return a callback for each work, to be called when that ends; repeats are harmless.

        Any thread may call it.
        """
        self._left = set(range(count))
        if not count:
            self.end()
        return [partial(self._end_part, number) for number in range(count)]

    def _end_part(self, number: int) -> None:
        self._left.discard(number)
        if not self._left:
            self.end()

    def end(self) -> None:
        """Record the end of the last work; on an accelerator, the current point of its stream."""
        if self.ended is None:
            self.ended = Stamp(self._device)

    @property
    def is_over(self) -> bool:
        """Return True if the end was recorded and the device has reached it."""
        return self.ended is not None and self.ended.is_reached

    @property
    def seconds(self) -> float:
        """Return the seconds that it took."""
        assert self.ended is not None  # it is over
        return self.ended.seconds_since(self.began)


def _least_sent(key: Key) -> int:
    if key.operation == "recv":
        return 0
    return int(key.nbytes * bus_factor(key.operation, len(key.ranks)))


@dataclass(slots=True)
class Row:
    """The log's entry for one kind of call, message, group and call site, on this rank."""

    operation: str
    nbytes: int
    """Bytes of one message, as it travels; `hadal.comm.comms_log` defines the message."""
    dtype: str
    ranks: tuple[int, ...]
    site: str
    count: int = 0
    total_nbytes: int = 0
    sent_nbytes: int = 0
    """Bytes that this rank has sent; if a backend chooses the route, the least possible."""
    seconds: float = 0.0
    """Seconds of all calls together, each from its start to its end."""
    least_s: float = float("inf")
    most_s: float = 0.0
    latencies_s: MutableSequence[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Seconds of each of the latest calls, the oldest first."""
    lost_s: dict[int, float] | None = None
    """Seconds that each rank waited for later ranks in the latest calls; None if not requested, or
    if the ranks differ in the number of these calls."""

    def add(self, record: Record) -> None:
        """Count a call that is over."""
        seconds = record.seconds
        self.count += 1
        self.total_nbytes += self.nbytes
        self.sent_nbytes += record.sent
        self.seconds += seconds
        self.least_s = min(self.least_s, seconds)
        self.most_s = max(self.most_s, seconds)
        self.latencies_s.append(seconds)

    @property
    def mean_s(self) -> float:
        """The average latency."""
        return self.seconds / self.count

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the messages in a second."""
        return algorithm_bandwidth(self.total_nbytes, self.seconds)

    @property
    def bus_bandwidth(self) -> float:
        """Bytes in a second on the link of each rank."""
        return bus_bandwidth(self.operation, self.total_nbytes, self.seconds, len(self.ranks))

    @property
    def straggler(self) -> int | None:
        """The rank that lost least, as the others waited for it; None: see `lost_s`."""
        return min(self.lost_s, key=self.lost_s.__getitem__) if self.lost_s else None


class CommsLog:
    """The recorded collectives, and those under way."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.choice = LogChoice()
        self._lock = Lock()
        self._open: deque[Record] = deque()
        self._many = _MANY
        self._rows: dict[Key, Row] = {}

    def open(
        self,
        operation: str,
        tensors: Tensor | Sequence[Tensor],
        group: dist.ProcessGroup | None,
        label: str,
        times: int = 1,
    ) -> Record | None:
        """Begin a record of a message `times` as long as `tensors`; None if it is not wanted."""
        if not (self.is_on and self.choice.wants(operation)):
            return None
        found = [tensors] if isinstance(tensors, Tensor) else tensors
        nbytes = sum(tensor.nbytes for tensor in found) * times
        dtype = str(found[0].dtype).removeprefix("torch.") if found else "object"
        device = found[0].device if found else torch.device("cpu")
        ranks = numbers_of(group)
        site = (label or _caller()) if self.choice.debug else ""
        self._settle()
        record = Record(Key(operation, nbytes, dtype, ranks, site), device)
        with self._lock:
            self._open.append(record)
        return record

    def reset(self) -> None:
        """Forget all records, including those of collectives under way."""
        with self._lock:
            self._open.clear()
            self._rows.clear()

    def rows(self) -> list[Row]:
        """Return the finished calls by operation, largest messages first."""
        self._settle(all_of_them=True)
        with self._lock:
            kinds = {name: number for number, name in enumerate(OPERATIONS)}
            order = sorted(self._rows, key=lambda key: (kinds[key.operation], -key.nbytes, key[2:]))
            found = [self._rows[key] for key in order]
            return [replace(row, latencies_s=list(row.latencies_s)) for row in found]

    def _settle(self, all_of_them: bool = False) -> None:
        """Count the finished ones of those under way."""
        with self._lock:
            over: list[Record] = []
            if all_of_them or len(self._open) > self._many:
                left: deque[Record] = deque()
                stuck: set[Key] = set()
                for record in self._open:
                    # Ranks match calls of one key by their order.
                    if record.key in stuck or not record.is_over:
                        stuck.add(record.key)
                        left.append(record)
                    else:
                        over.append(record)
                self._open = left
                self._many = 2 * len(self._open) + _MANY
            while self._open and self._open[0].is_over:
                over.append(self._open.popleft())
            over = [record for record in over if not record.is_void]
            for record in over:
                self._rows.setdefault(record.key, Row(*record.key)).add(record)
        if self.choice.verbose:
            _log_records(over)


def _log_records(records: Iterable[Record]) -> None:
    for record in records:
        key = record.key
        site = f" ({key.site})" if key.site else ""
        speed = bus_bandwidth(key.operation, key.nbytes, record.seconds, len(key.ranks))
        _log.info(
            "%s of %d bytes (%s) among %d ranks%s: %.3f ms, %.3f GB/s on the bus",
            *(key.operation, key.nbytes, key.dtype, len(key.ranks), site),
            *(record.seconds * 1e3, speed / 1e9),
        )


def numbers_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks of the world that are in a group."""
    if not isinstance(group, dist.ProcessGroup):
        group = dist.group.WORLD
    return (0,) if group is None else tuple(dist.get_process_group_ranks(group))


def _caller() -> str:
    """Return the innermost place on the stack outside of this library and torch."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"


# ---- the one log of this process -----------------------------------------------------------------

comms_log = CommsLog(is_on=False)
opened = comms_log.open
reset_log = comms_log.reset


def start_log(
    verbose: bool = False, prof_all: bool = True, prof_ops: Sequence[str] = (), debug: bool = False
) -> None:
    """Record collectives from now on; earlier records stay.

    Args:
        verbose: write a line to the log for each of them.
        prof_all: record all kinds; else those of `prof_ops`.
        prof_ops: kinds: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`,
            `reduce`, `gather`, `scatter`, `send`, `recv`, `barrier`.
        debug: distinguish calls from different places.

    Raises:
        UsageError: `prof_ops` names something else.
    """
    comms_log.choice = LogChoice(verbose, prof_all, tuple(prof_ops), debug)
    comms_log.is_on = True


def stop_log() -> None:
    """Stop recording; collectives under way are still completed."""
    comms_log.is_on = False


@contextmanager
def pause_log() -> Iterator[None]:
    """Record nothing inside the block."""
    before, comms_log.is_on = comms_log.is_on, False
    try:
        yield
    finally:
        comms_log.is_on = before


def is_logging() -> bool:
    """Return True if collectives are recorded."""
    return comms_log.is_on
