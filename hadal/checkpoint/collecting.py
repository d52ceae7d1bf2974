"""Collecting what this rank writes to a checkpoint: tensors, and their rows in the index.

Replicated values (unsharded weights and optimizer state, buffers) are written once, a slice by
each rank. Nothing is copied here: tensors are views of the state under training.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hadal.checkpoint.contents import (
    BUFFER,
    MASTER,
    WEIGHT,
    ModelPart,
    SavedBucket,
    SavedGroup,
    SavedSlice,
    Single,
    state_kind,
)
from hadal.checkpoint.live import Live, plain_name, plain_slots
from hadal.checkpoint.plain import encoded_known, encoded_state
from hadal.comm.collectives import max_
from hadal.device import is_host_memory, same_bytes, waiting_for
from hadal.errors import CheckpointError
from hadal.offload.tensors import StoredSlice
from hadal.optim.pieces import HeldTensor
from hadal.zero.bucket import Bucket
from hadal.zero.layout import share_out
from hadal.zero.views import flattened

_CPU_BLOCK_NUMEL = 1 << 17
_PART_NUMEL = 1 << 20

StateRow = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks of one part that write into one folder, as one of them sees them."""

    ranks: tuple[int, ...]
    """Their ranks in the world."""
    me: int
    """This rank."""

    @property
    def number(self) -> int:
        """This rank's index among them."""
        return self.ranks.index(self.me)

    @property
    def count(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def among(self, some: Collection[int]) -> Holders:
        """Return the holders that are in `some`, which are ranks of the world."""
        return Holders(tuple(rank for rank in self.ranks if rank in some), self.me)

    def cut(self, numel: int) -> tuple[int, int]:
        """Return this rank's (start, stop) of `numel` elements that all of them have."""
        return numel * self.number // self.count, numel * (self.number + 1) // self.count


@dataclass(slots=True)
class Rows:
    """The index entries of some tensors."""

    slices: list[SavedSlice] = field(default_factory=list)
    singles: list[Single] = field(default_factory=list)
    state: list[StateRow] = field(default_factory=list)


Values = Tensor | StoredSlice
"""Values in memory, or stored on disk or encoded."""


@dataclass(slots=True)
class PartRows:
    """The index entries of one rank in a part: what some ranks share."""

    mine: Rows = field(default_factory=Rows)
    """Entries of tensors that this rank alone has."""
    replicated: Rows = field(default_factory=Rows)
    """Entries of tensors that all of these ranks have; each folder's holders write them once."""


@dataclass(slots=True)
class RankContents:
    """The tensors that one rank writes, and their index entries."""

    tensors: dict[str, Values]
    parts: dict[tuple[int, ...], PartRows]
    """The rows, keyed by the ranks of the world that share the same parameters: the dense ones
    first, then the experts."""


def find_own_values(live: Live) -> set[str]:
    """Return the names of buffers, and of parameters outside buckets, that differ between ranks.

    All ranks that share the model's part must call it.
    """
    values = [*live.buffers(), *live.unmanaged()]
    if not values or live.ranks.size == 1:
        return set()
    sums = torch.tensor([_crc32(value) for _, value in values], dtype=torch.int64)
    bounds = torch.stack([sums, -sums])
    max_(bounds, live.ranks, "the comparison of buffers between ranks")
    differ = (bounds[0] != -bounds[1]).tolist()
    return {name for (name, _), own in zip(values, differ, strict=True) if own}


def _crc32(value: Tensor) -> int:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def collect(
    live: Live,
    own_values: set[str],
    holders: Holders,
    compared: Container[Bucket],
    without_frozen: bool,
) -> RankContents:
    """Collect what this rank writes; not a collective.

    `compared` are the buckets whose weights are known to be the rounding of their masters.

    Raises:
        CheckpointError: the optimizer has state that a checkpoint cannot hold, or a folder would
            hold less than one full copy of the model states.
    """
    _expect_whole_copies(live, holders)
    tensors: dict[str, Values] = {}
    parts = {
        ranks.numbers: _Collecting(ranks.rank, holders.among(ranks.numbers), tensors)
        for ranks in (live.ranks, *(bucket.ranks for bucket in live.runtime.buckets))
    }
    for number, bucket in enumerate(live.runtime.buckets):
        if bucket.trainable or not without_frozen:
            parts[bucket.ranks.numbers].add_bucket(number, bucket, has_bits=bucket in compared)
    singles = [(BUFFER, name, value) for name, value in live.buffers()]
    singles += [
        (WEIGHT, name, parameter.detach())
        for name, parameter in live.unmanaged()
        if parameter.requires_grad or not without_frozen
    ]
    parts[live.ranks.numbers].add_replicated(singles, own_values)
    if live.stepper is not None:
        numbers = {bucket: number for number, bucket in enumerate(live.runtime.buckets)}
        for held in live.stepper.held():
            parts[held.bucket.ranks.numbers].add_state(live, held, numbers[held.bucket])
        for part in parts.values():
            part.add_replicated(part.everywhere)
    return RankContents(tensors, {ranks: part.rows for ranks, part in parts.items()})


def _expect_whole_copies(live: Live, holders: Holders) -> None:
    """Check that each folder will hold a full copy, if there are several copies of the states."""
    for bucket in live.runtime.buckets[:1]:
        sharing = bucket.sharing
        shards = {bucket.ranks.numbers.index(rank) % sharing.shards.size for rank in holders.ranks}
        if sharing.replicas is not None and len(shards) < sharing.shards.size:
            raise CheckpointError(
                f"rank {holders.me} saves into a folder that holds {len(shards)} of the"
                f" {sharing.shards.size} shards of a copy (zero_optimization.mics_shard_size):"
                " blocks of ranks that span several nodes need one folder for all; remove"
                " checkpoint.use_node_local_storage"
            )


class _Collecting:
    """A builder of one rank's share of a part; `rank` is its index among the part's ranks."""

    def __init__(self, rank: int, holders: Holders, tensors: dict[str, Values]) -> None:
        self._rank = rank
        self._holders = holders
        self._tensors = tensors
        self.rows = PartRows()
        self.everywhere: list[tuple[str, str, Tensor]] = []
        """State of another shape than its parameter that all of the part's ranks have."""

    def add_bucket(self, number: int, bucket: Bucket, *, has_bits: bool) -> None:
        """Add a bucket's weights, and its masters if it keeps them.

        `has_bits`: the weights are known to be the rounding of the masters.
        """
        master = bucket.master_source if bucket.precision.keeps_master else None
        # Full weights that are stepped in shards: each rank has its own shard as well.
        self._add_run(bucket, number, WEIGHT, bucket.span[0], bucket.shard_source, master, has_bits)
        if master is not None:
            self._add_run(bucket, number, MASTER, bucket.span[0], master)

    def _add_run(
        self,
        bucket: Bucket,
        number: int,
        kind: str,
        start: int,
        values: Values,
        master: Values | None = None,
        has_bits: bool = False,
    ) -> None:
        """Add this rank's slice of 1-D values that begin at element `start` of a bucket.

        Values that are the rounding of `master` are not stored; `has_bits`: they are known to be.
        """
        rows, first, last = self.rows.mine, start, start + values.numel()
        replicas = bucket.sharing.replicas
        low, high = first, last
        if not _is_cut(bucket):
            rows = self.rows.replicated
            low, high = self._holders.cut(bucket.layout.numel)
        elif replicas is not None:
            # Each folder has full copies of the states; ranks with this shard each write a slice.
            rows = self.rows.replicated
            low, high = self._holders.among(replicas.numbers).cut(values.numel())
            low, high = start + low, start + high
        first, last = max(first, low), min(last, high)
        if first >= last and values.numel():
            return
        mine = slice(first - start, last - start)
        row = SavedSlice(self._rank, kind, number, first, last - first, values.dtype)
        if master is not None and is_rounding(values[mine], master[mine], has_bits=has_bits):
            row = row._replace(rounds=master.dtype)
        else:
            self._tensors[row.tensor] = values[mine]
        rows.slices.append(row)

    def add_replicated(
        self, values: Sequence[tuple[str, str, Tensor]], own: set[str] | None = None
    ) -> None:
        """Add values that all ranks have: (kind, name, tensor). Each rank writes its own of `own`.

        Every holder must pass the same values.
        """
        shared = share_out(
            [value.numel() * value.element_size() for _, _, value in values],
            [0] * self._holders.count,
        )
        for (kind, name, value), holder in zip(values, shared.owners, strict=True):
            is_own = own is not None and name in own
            if is_own or holder == self._holders.number:
                rank = None if is_own else self._rank
                self._add_single(self.rows.replicated, rank, kind, name, value)

    def _add_single(
        self, rows: Rows, rank: int | None, kind: str, name: str, value: Tensor
    ) -> None:
        row = Single(rank, kind, name, tuple(value.shape), value.dtype)
        rows.singles.append(row)
        self._tensors[row.tensor] = value

    # ---- the optimizer's memory ------------------------------------------------------------------

    def add_state(self, live: Live, held: HeldTensor, number: int) -> None:
        """Add the optimizer's state of a tensor that it steps on this rank, in a bucket."""
        assert live.stepper is not None and live.optimizer is not None  # the caller has checked
        slices, names = live.stepper.slices(held), list(_names_of(held))
        slot = None if held.slot is None else held.bucket.layout.slots[held.slot]
        plain, odd = {}, []
        for key, value in live.optimizer.state.get(held.values, {}).items():
            if is_elementwise(key, value, held):
                values: Values | None = slices.get(key)
                if values is None:
                    values = value.detach() if slot is None else flattened(value.detach(), slot)
                self._add_run(held.bucket, number, state_kind(key), held.start, values)
            elif isinstance(value, Tensor) and value.dim():
                odd.append((state_kind(key), names[0], value))
            else:
                where = f"the state {key!r} that the optimizer has of {names[0]}"
                plain[str(key)] = encoded_state(value, where)
        self._add_rest(held, names, plain, odd)

    def _add_rest(
        self,
        held: HeldTensor,
        names: Sequence[str],
        plain: dict[str, Any],
        odd: list[tuple[str, str, Tensor]],
    ) -> None:
        """Add state that is not a tensor, and tensors of another shape than the parameter's."""
        if odd and held.slot is None:
            raise CheckpointError(
                f"the optimizer's {odd[0][0]} of {names[0]} belongs to several parameters but is"
                " not kept per element, so a checkpoint cannot hold it"
            )
        is_cut = _is_cut(held.bucket)
        rows = self.rows.mine if is_cut else self.rows.replicated
        if plain and (is_cut or self._holders.number == 0):
            rows.state += [(name, plain) for name in names]
        if not is_cut:
            self.everywhere += odd
            return
        for kind, name, value in odd:
            self._add_single(rows, self._rank, kind, name, value)


def is_rounding(weights: Values, master: Values, *, has_bits: bool = False) -> bool:
    """Return whether 1-D weights are the rounding of their masters, bit for bit, on any device.

    `has_bits`: they are known to be on this device; NaN may differ on others.
    """
    parts: Iterable[tuple[Tensor, Tensor]]
    if isinstance(weights, Tensor) and isinstance(master, Tensor):
        parts = [(weights, master)]
    else:
        parts, has_bits = zip(_parts(weights), _parts(master), strict=True), False
    for mine, exact in parts:
        with waiting_for("what is to be saved", mine.device):
            if not _is_rounding(mine, exact, has_bits=has_bits):
                return False
    return True


def _parts(values: Values) -> Iterator[Tensor]:
    """Yield a million elements at a time, of any dtype."""
    if isinstance(values, Tensor):
        yield from values.split(_PART_NUMEL) if values.numel() else ()
    else:
        for start in range(0, values.numel(), _PART_NUMEL):
            cut = values[start : start + _PART_NUMEL]
            yield torch.cat([part.clone() for part in cut.parts(cut.numel() * cut.element_size())])


def _is_rounding(weights: Tensor, master: Tensor, *, has_bits: bool) -> bool:
    # On a CPU, blocks that stay in its cache; on a device, masters may need room for a copy.
    block = _CPU_BLOCK_NUMEL if weights.device.type == "cpu" else _PART_NUMEL
    room = weights.detach().new_empty(min(block, weights.numel()))
    for start in range(0, weights.numel(), block):
        mine = weights.detach()[start : start + block]
        exact = master.detach()[start : start + block].to(mine.device)
        if not has_bits and not _same_bits(room[: mine.numel()].copy_(exact), mine):
            return False
        # The payload bits of a rounded NaN differ between devices. Squares do not cancel out.
        if math.isnan(torch.dot(exact, exact)):
            return False
    return True


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if is_host_memory(one.device):
        return same_bytes(one, other)
    # The widest integers that fit: 16-bit ones are slow to compare.
    for dtype in (torch.int64, torch.int32, torch.int16):
        count = max(dtype.itemsize // one.element_size(), 1)
        if not any(flat.numel() % count or flat.storage_offset() % count for flat in (one, other)):
            return torch.equal(one.view(dtype), other.view(dtype))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def is_elementwise(key: str, value: Any, held: HeldTensor) -> bool:
    """Return whether the optimizer keeps a value for each element of the tensor that it steps."""
    # A 0-dim parameter has 0-dim state; a step count is not per element.
    return isinstance(value, Tensor) and value.shape == held.values.shape and key != "step"


def _names_of(held: HeldTensor) -> Iterator[str]:
    layout = held.bucket.layout
    if held.slot is not None:
        yield plain_name(layout.slots[held.slot].name)
        return
    for fragment in layout.fragments(held.start, held.start + held.values.numel()):
        yield plain_name(layout.slots[fragment.slot].name)


def _is_cut(bucket: Bucket) -> bool:
    return bucket.partition.optimizer or bucket.partition.weights


def head_of(live: Live, ranks: tuple[int, ...]) -> ModelPart:
    """Return what all ranks of a part know of it: the layout of its buckets, groups and names.

    Names are those of the part that these ranks of the world share.
    """
    elsewhere = {
        plain_name(slot.name)
        for bucket in live.runtime.buckets
        if bucket.ranks.numbers != ranks
        for slot in bucket.layout.slots
    }
    here = [names for names in live.names().values() if elsewhere.isdisjoint(names)]
    placements = live.placements()
    options = [] if live.optimizer is None else map(_options, live.optimizer.param_groups)
    return ModelPart(
        ranks=ranks,
        buckets=tuple(map(_saved_bucket, live.runtime.buckets)),
        groups=tuple(
            SavedGroup(one, tuple(names))
            for one, names in zip(options, live.group_names(), strict=True)
        ),
        aliases={alias: first for first, *others in here for alias in others},
        placements={
            name: one
            for name, one in placements.items()
            if name not in elsewhere and not one.is_plain(name)
        },
        unknown=live.unknown_places() - elsewhere,
    )


def describe(head: ModelPart, rows: Iterable[Rows]) -> ModelPart:
    """Complete a part's head by the rows of all its ranks."""
    rows = list(rows)
    state: dict[str, dict[str, Any]] = {}
    for name, values in (one for row in rows for one in row.state):
        # Ranks that have the same state agree on it.
        state[name] = {**values, **state.get(name, {})}
    return replace(
        head,
        slices=tuple(one for row in rows for one in row.slices),
        singles=tuple({(one.kind, one.name): one for row in rows for one in row.singles}.values()),
        state=state,
    )


def _saved_bucket(bucket: Bucket) -> SavedBucket:
    cut = bucket.partition
    flags = zip("ogw", (cut.optimizer, cut.gradients, cut.weights), strict=True)
    return SavedBucket(
        plain_name(bucket.name),
        bucket.layout.numel,
        "".join(letter if flag else "-" for letter, flag in flags),
        bucket.trainable,
        plain_slots(bucket.layout.slots),
    )


def _options(group: dict[str, Any]) -> Any:
    """Return the options of a param group that are plain data; leave out other objects."""
    options = {key: value for key, value in group.items() if key != "params"}
    return encoded_known(options, "a param group", lambda error: None)
