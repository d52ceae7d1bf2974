"""Additional checks while a model trains, which help to find a fault."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes, gather_objects
from hadal.device import read_on_host
from hadal.errors import MismatchError, ModelError, few
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.views import digest

_log = logging.getLogger(__name__)


class _Gather(NamedTuple):
    """The gathers of one bucket by the same ranks."""

    name: str
    places: range
    """The places of those ranks."""


@dataclass(slots=True)
class _Report:
    """One rank's observations since the last update."""

    digests: dict[str, int] = field(default_factory=dict)
    """Digest of each parameter whose weights are whole on every rank."""
    gathers: dict[_Gather, tuple[int, list[int]]] = field(default_factory=dict)
    """The number of gathers of each bucket, and a digest of each slice over all gathers."""
    arrivals: dict[str, int] = field(default_factory=dict)
    """The number of gradients that arrived for each trained parameter."""
    faulty_weights: list[str] = field(default_factory=list)
    faulty_gradients: dict[str, None] = field(default_factory=dict)


class Sanity:
    """A check of one model's buckets that compares the ranks' observations once per update.

    It changes no values. It reads each gathered bucket, each gradient, and all weights once per
    update; on an accelerator each read waits for the device.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._buckets: list[Bucket] = []
        self._report = _Report()
        self._reported: set[str] = set()

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """Watch these buckets from now on."""
        self._buckets = list(buckets)
        self._report.gathers.clear()
        for bucket in buckets:
            if bucket.partition.weights:
                bucket.on_gather = partial(self._gathered, bucket)

    def _gathered(self, bucket: Bucket, full: Tensor, places: range) -> None:
        gather, gathers = _Gather(bucket.name, places), self._report.gathers
        count, known = gathers.get(gather, (0, [0] * bucket.layout.world_size))
        slices = full.split(bucket.layout.shard_numel) if full.numel() else ()
        found = _read([digest(part) for part in slices])
        gathers[gather] = (count + 1, [hash(pair) for pair in zip(known, found, strict=False)])

    def check_gradient(self, bucket: Bucket, index: int) -> None:
        """Look at a gradient that autograd has put on parameter number `index` of a bucket."""
        gradient = bucket.parameters[index].grad
        if gradient is not None and not _is_finite(gradient):
            self._report.faulty_gradients[bucket.layout.slots[index].name] = None

    def check(self, gradients: Iterable[Gradients], *, overflow_is_handled: bool) -> None:
        """Compare the ranks' observations since the last update; all ranks must call it.

        `overflow_is_handled`: gradients that are not finite are handled elsewhere.

        Raises:
            MismatchError: the ranks hold different weights, or saw different ones in a gather.
            ModelError: a weight, or a gradient of any micro-step, is not finite.
        """
        mine, self._report = self._report, _Report()
        mine.digests.update(self._weights())
        mine.faulty_weights += self._faulty_weights()
        for one in gradients:
            counts = zip(one.bucket.layout.slots, one.arrivals, strict=True)
            mine.arrivals.update((slot.name, count) for slot, count in counts if count)
        if overflow_is_handled:
            mine.faulty_gradients.clear()
        reports = gather_objects(mine, self._ranks)
        _expect_one([report.digests for report in reports], _PARTED_WEIGHTS)
        _expect_same_gathers([report.gathers for report in reports])
        _expect_finite("weight", [report.faulty_weights for report in reports])
        _expect_finite("gradient", [report.faulty_gradients for report in reports])
        self._warn_of_missing([report.arrivals for report in reports])

    def _weights(self) -> Iterator[tuple[str, int]]:
        for bucket in self._buckets:
            if not bucket.partition.weights:
                slots = [slot for slot in bucket.layout.slots if slot.numel]
                # Up to the next word; padding is zero on every rank.
                words = max(1, 8 // bucket.full.itemsize)
                stops = [-(-slot.stop // words) * words for slot in slots]
                parts = [bucket.full[s.offset : stop] for s, stop in zip(slots, stops, strict=True)]
                found = _read([digest(part) for part in parts])
                yield from zip([slot.name for slot in slots], found, strict=True)

    def _faulty_weights(self) -> Iterator[str]:
        for bucket in self._buckets:
            if bucket.trainable:
                with bucket.present(writes=False):
                    yield from _faulty_names(bucket)

    def _warn_of_missing(self, arrivals: Sequence[Mapping[str, int]]) -> None:
        """Warn of missing gradients once per parameter; ranks may take different branches."""
        names = dict.fromkeys(name for one in arrivals for name in one)
        counts = {name: [one.get(name, 0) for one in arrivals] for name in names}
        parted = sorted(n for n, c in counts.items() if len(set(c)) > 1 and n not in self._reported)
        self._reported.update(parted)
        if parted and self._ranks.rank == 0:
            _log.warning(
                "the ranks got different numbers of gradients in this update: %s. A missing one"
                " counts as zero in the mean over all ranks. Reported once for each parameter.",
                few(f"{name} {counts[name]}" for name in parted),
            )


_READ = "the values that zero_optimization.enable_sanity_checks compares"
_PARTED_WEIGHTS = (
    "the ranks hold different weights of {names}: rank {rank} differs from rank 0. Change weights"
    " in the same way on every rank, or inside `with hadal.zero.GatheredParameters([parameter],"
    " modifier_rank=0):`"
)
_PARTED_GATHERS = (
    "the ranks got different weights in the gathers of {names}, or a different number of gathers:"
    " rank {rank} differs from rank {first}. The memory of a rank, or the network between them,"
    " corrupts data"
)


def _expect_one(known: Sequence[Mapping[str, object]], message: str) -> None:
    for rank, mine in enumerate(known):
        parted = [name for name in {**known[0], **mine} if known[0].get(name) != mine.get(name)]
        if parted:
            raise MismatchError(message.format(names=few(parted), rank=rank))


def _expect_same_gathers(known: Sequence[Mapping[_Gather, object]]) -> None:
    """Compare the gathers of each bucket between the ranks that took part in them."""
    parted: dict[tuple[int, int], list[str]] = {}
    for gather in dict.fromkeys(gather for one in known for gather in one):
        first = gather.places[0]
        for rank in gather.places:
            if known[rank].get(gather) != known[first].get(gather):
                parted.setdefault((rank, first), []).append(gather.name)
    for (rank, first), names in sorted(parted.items())[:1]:
        raise MismatchError(_PARTED_GATHERS.format(names=few(names), rank=rank, first=first))


def _expect_finite(what: str, known: Sequence[Collection[str]]) -> None:
    if any(known):
        raise ModelError(
            f"a {what} is not finite: {_by_rank(known)}; found by"
            " zero_optimization.enable_sanity_checks"
        )


def _is_finite(values: Tensor) -> bool:
    # One pass without a second tensor: a finite sum shows that all elements are finite. The sum may
    # overflow, so otherwise they are checked one by one.
    sums = values.sum(dtype=torch.float32).isfinite()
    return bool(_read([sums])[0]) or bool(_read([values.isfinite().all()])[0])


def _read(found: Sequence[Tensor]) -> list[int]:
    """Return 0-dim values; the host waits once."""
    return read_on_host(torch.stack(list(found)), _READ).tolist() if found else []


def _by_rank(known: Sequence[Collection[str]]) -> str:
    """Return the reported names, each with the ranks that reported it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, names in enumerate(known):
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    return few(f"{name} (rank {', '.join(map(str, r))})" for name, r in ranks_of.items())


def _faulty_names(bucket: Bucket) -> Iterator[str]:
    if _is_finite(bucket.shard):
        return
    for part in bucket.layout.fragments(*bucket.span):
        if not _is_finite(bucket.shard[part.offset : part.offset + part.numel]):
            yield bucket.layout.slots[part.slot].name


def unused_fault(gradients: Sequence[Gradients], ranks: Ranks) -> ModelError | None:
    """Return the same error on every rank if a parameter got no gradient on some rank."""
    mine = [
        slot.name
        for one in gradients
        for slot, parameter, count in zip(
            one.bucket.layout.slots, one.bucket.parameters, one.arrivals, strict=True
        )
        if slot.numel and parameter.requires_grad and not count
    ]
    if not any(gather_codes(len(mine), ranks)):
        return None
    missing = _by_rank(gather_objects(mine, ranks))
    return ModelError(
        f"no gradient arrived in this update for {missing}. Make the loss"
        " depend on each parameter, freeze the others (requires_grad_(False)), or"
        " remove zero_optimization.ignore_unused_parameters, so that they count as zero."
    )
