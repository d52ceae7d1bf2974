"""Benchmarks of collectives: each kind over messages of many sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm import collectives, functions
from hadal.comm.comms_log import algorithm_bandwidth, bus_bandwidth
from hadal.comm.ranks import Ranks
from hadal.device import Stamp, current_device, synchronize, total_memory
from hadal.errors import UsageError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "pt2pt")
WAYS = ("hadal", "torch", "training")
"""Implementation: `hadal.comm`'s calls, torch's own, or the engine's in training."""
# Buffers of a message that one measurement holds, plus some headroom.
_BUFFERS = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings for measuring each size."""

    dtype: torch.dtype = torch.float32
    trials: int = 20
    warmups: int = 5
    is_async: bool = False
    """True to start calls and wait for them later."""
    way: str = "hadal"


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one kind at one size."""

    kind: str
    nbytes: int
    """Bytes of the message: see `hadal.comm.comms_log`."""
    numel: int
    seconds: float
    """Time of one call: the median over the trials, on the slowest rank."""
    algorithm_bandwidth: float
    bus_bandwidth: float


class _Bench(NamedTuple):
    """Buffers of a call: a message, and an even slice of it for each rank."""

    ranks: Ranks
    full: Tensor
    other: Tensor
    mine: Tensor


def numels_between(least: int, most: int, factor: int, ranks: int) -> list[int]:
    """Return numbers of elements, each `factor` times the last and a multiple of `ranks`."""
    found, numel = set(), least
    while numel <= most:
        found.add(max(1, numel // ranks) * ranks)
        numel *= factor
    return sorted(found)


def numel_of_memory(share: float, dtype: torch.dtype, ranks: Ranks) -> int:
    """Return the elements of a message whose measurement takes `share` of the free memory.

    Ranks that compute on one host's CPUs share its memory.
    """
    device = current_device()
    free = total_memory(device).free
    free //= ranks.size if device.type == "cpu" else 1
    least = torch.tensor(free, dtype=torch.int64)
    collectives.max_(least.neg_(), ranks, "the free memory")
    numel = int(-int(least) * share) // (_BUFFERS * dtype.itemsize)
    return max(1, numel // ranks.size) * ranks.size


def sweep(kinds: Sequence[str], numels: Sequence[int], trial: Trial) -> Iterator[Measured]:
    """Measure every kind at every size. All ranks must exhaust the iterator.

    Raises:
        UsageError: no such kind or way.
    """
    for told, known in ((kinds, KINDS), ((trial.way,), WAYS)):
        unknown = sorted(set(told) - set(known))
        if unknown:
            raise UsageError(f"{unknown[0]!r} cannot be measured; expected some of {list(known)}")
    ranks = Ranks.world()
    for kind in kinds:
        for numel in numels:
            yield measure(kind, numel, trial, ranks)


def measure(kind: str, numel: int, trial: Trial, ranks: Ranks) -> Measured:
    """Measure one kind with a message of `numel` elements, a multiple of the ranks' number."""
    device = current_device()
    full = torch.ones(numel, dtype=trial.dtype, device=device)
    mine = torch.ones(numel // ranks.size, dtype=trial.dtype, device=device)
    call = _call_of(kind, trial, _Bench(ranks, full, torch.empty_like(full), mine))
    for _ in range(trial.warmups):
        call()
    functions.barrier(ranks.group)
    stamps = [Stamp(device)]
    for _ in range(trial.trials):
        call()
        stamps.append(Stamp(device))
    synchronize(device)
    # A single call that other work on the machine delayed says nothing about the others.
    own = median(after.seconds_since(before) for before, after in pairwise(stamps))
    slowest = torch.tensor([own], dtype=torch.float64)
    collectives.max_(slowest, ranks, "the slowest rank")
    seconds = float(slowest)
    operation = "send" if kind == "pt2pt" else kind
    return Measured(
        kind,
        full.nbytes,
        numel,
        seconds,
        algorithm_bandwidth(full.nbytes, seconds),
        bus_bandwidth(operation, full.nbytes, seconds, ranks.size),
    )


def _call_of(kind: str, trial: Trial, bench: _Bench) -> Callable[[], object]:
    """Return a function that makes one call, from its start to its end."""
    if trial.way == "training":
        return _call_of_training(kind, trial, bench)
    if kind == "pt2pt":
        return _between_two(trial.way, bench)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (bench.full,),
        "all_gather_into_tensor": (bench.full, bench.mine),
        "reduce_scatter_tensor": (bench.mine, bench.full),
        "all_to_all_single": (bench.other, bench.full),
        "broadcast": (bench.full, 0),
    }
    name = next(name for name in arguments if name.startswith(kind))
    function = _found(trial.way, name)

    def call() -> None:
        work = function(*arguments[name], async_op=trial.is_async)
        if trial.is_async:
            work.wait()

    return call


def _found(way: str, name: str) -> Callable[..., Any]:
    """Return our function of a name, or torch's, which has renamed some."""
    ours: Callable[..., Any] = getattr(functions, name)
    return getattr(dist, ours.__name__, ours) if way == "torch" else ours


def _between_two(way: str, bench: _Bench) -> Callable[[], object]:
    """Return a call in which rank 0 sends and rank 1 receives; other ranks do nothing."""
    rank = bench.ranks.rank
    if rank > 1 or bench.ranks.size == 1:
        return lambda: None
    function = _found(way, "recv" if rank else "send")
    return lambda: function(bench.full, 1 - rank)


def _call_of_training(kind: str, trial: Trial, bench: _Bench) -> Callable[[], object]:
    ranks, full, other, mine = bench
    cuts = [collectives.slice_of(other, rank, ranks) for rank in range(ranks.size)]
    parts = [collectives.slice_of(full, rank, ranks) for rank in range(ranks.size)]
    label = "a measurement"
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: collectives.start_all_reduce(full, ranks, trial.dtype, label).wait(),
        "all_gather": lambda: collectives.start_all_gather(full, ranks, label).wait(),
        "reduce_scatter": lambda: collectives.start_reduce_scatter(
            full, mine, ranks, trial.dtype, False, label
        ).wait(),
        "all_to_all": lambda: collectives.start_exchange(parts, cuts, ranks, label).wait(),
        "broadcast": lambda: collectives.broadcast_(full, 0, ranks, label),
    }
    if kind not in calls:
        raise UsageError(f"training has no {kind}; measure it by another way: hadal or torch")
    return calls[kind]
