"""Whole parameters, each on the rank that owns it, for optimizers that require them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm import Ranks
from hadal.comm.collectives import max_, start_exchange
from hadal.optim.pieces import HeldTensor, Piece
from hadal.optim.workspace import Multiplier, scale_
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.layout import Fragment, share_out
from hadal.zero.views import flattened, shaped


@dataclass(slots=True, eq=False)
class _Transfer:
    """The exchange of one bucket between shards and the owners of whole parameters."""

    owned: dict[int, nn.Parameter]
    """The whole values that this rank owns, by slot."""
    held: list[list[Fragment]]
    """The fragments of this rank's span whose parameters another rank owns, by that rank."""
    asked: list[list[Fragment]]
    """The fragments of another rank's span whose parameters this rank owns, by that rank."""
    seen: tuple[int, int] | None = None
    """The stamp of this rank's shard of the master as last sent to the owners; None: never sent."""
    left: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The stamps of the values that this rank owns after the last update, by slot."""


class WholeParameters:
    """Whole parameters, each on the rank that owns it, next to the flat shards of all ranks.

    Owns `values`: for each of the model's parameters that this rank owns, a parameter of the same
    shape and strides in the master's dtype, whose `grad` is set between `to_owners` and
    `to_shards`. Ranks send gradients only to owners, and owners send new values only to the shards
    that need them. Owners keep values between updates, so masters are sent only if something else
    has changed them.

    If optimizer state is not partitioned, every rank owns everything and nothing is sent.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.values: dict[nn.Parameter, nn.Parameter] = {}
        self._transfers: dict[Gradients, _Transfer] = {}
        self._loads: dict[Ranks, tuple[int, ...]] = {}

    def add(
        self, gradients: Iterable[Gradients], takes: Callable[[int], bool] = lambda _: True
    ) -> None:
        """Add the parameters of these buckets whose param group `takes` accepts."""
        flat: dict[Ranks, list[tuple[Gradients, int]]] = {}
        for one in gradients:
            chosen = [n for n, place in enumerate(one.bucket.layout.slots) if takes(place.group)]
            among = flat.setdefault(one.bucket.sharing.shards, [])
            among += [(one, slot) for slot in chosen]
        owner_of: dict[Gradients, dict[int, int]] = {}
        for ranks, found in flat.items():
            numels = [one.bucket.layout.slots[slot].numel for one, slot in found]
            share = share_out(numels, self._loads.get(ranks, (0,) * ranks.size))
            self._loads[ranks] = share.loads
            for (one, slot), owner in zip(found, share.owners, strict=True):
                owner_of.setdefault(one, {})[slot] = owner
        for one, owners in owner_of.items():
            self._transfers[one] = self._lay_transfer(one.bucket, owners)

    def _lay_transfer(self, bucket: Bucket, owners: dict[int, int]) -> _Transfer:
        ranks, layout = bucket.sharing.shards, bucket.layout
        is_cut = bucket.partition.optimizer
        owned = {}
        for slot, owner in owners.items():
            if not is_cut or owner == ranks.rank:
                owned[slot] = self.values[bucket.parameters[slot]] = _make_values(bucket, slot)
        if not is_cut:
            return _Transfer(owned, [], [])
        held: list[list[Fragment]] = [[] for _ in range(ranks.size)]
        for fragment in layout.fragments(*bucket.span):
            if fragment.slot in owners:
                held[owners[fragment.slot]].append(fragment)
        asked = [
            [part for part in layout.fragments(*layout.span(rank)) if part.slot in owned]
            for rank in range(ranks.size)
        ]
        return _Transfer(owned, held, asked)

    def pieces(self, one: Gradients) -> list[Piece]:
        """Return the whole values of one bucket that this rank owns, laid end to end."""
        transfer, pieces, start = self._transfers.get(one), [], 0
        for slot, values in {} if transfer is None else transfer.owned.items():
            stop = start + values.numel()
            place = one.bucket.layout.slots[slot]
            pieces.append(Piece(place.group, start, stop, values, place))
            start = stop
        return pieces

    def held(self) -> Iterator[HeldTensor]:
        """Yield the whole values that this rank owns."""
        for one, transfer in self._transfers.items():
            for slot, values in transfer.owned.items():
                place = one.bucket.layout.slots[slot]
                yield HeldTensor(values, one.bucket, place.offset, place.group, slot)

    def to_owners(
        self, multiplier: Multiplier | None, masters: Mapping[Gradients, Tensor] | None = None
    ) -> None:
        """Send the owners the mean gradients times `multiplier`, and changed values.

        All ranks must call it together. Without a multiplier no gradients are sent. `masters` are
        the buckets whose masters are temporarily in memory: the owners of their parameters get all
        values each time; None: all buckets.
        """
        chosen = self._chosen(masters)
        if multiplier is not None:
            means = [(one.bucket, transfer, one.mean) for one, transfer in chosen]
            for values, gradient in _to_owners(means):
                # A copy even if nothing is cast: an optimizer may change its gradients.
                values.grad = scale_(gradient.to(values.dtype, copy=True), multiplier)
        if masters is None:
            self.bring_values()
            return
        cuts = [(one.bucket, transfer, masters[one]) for one, transfer in chosen]
        for values, whole in _to_owners(cuts):
            values.data = whole

    def to_shards(self, masters: Mapping[Gradients, Tensor] | None = None) -> None:
        """Send the owners' new values to every rank's shard of the master, or into `masters`.

        All ranks must call it together; see `to_owners`.
        """
        waiting = []
        for one, transfer in self._chosen(masters):
            for values in transfer.owned.values():
                values.grad = None
            master = _master_of(one.bucket) if masters is None else masters[one]
            if one.bucket.partition.optimizer:
                waiting.append((one, transfer, _start_to_shards(one.bucket, transfer, master)))
            else:
                self._put_back(one.bucket, transfer, master)
        for one, transfer, finish in waiting:
            finish()
            if masters is None:
                transfer.seen = _stamp(_master_of(one.bucket))
                transfer.left = {slot: _stamp(values) for slot, values in transfer.owned.items()}

    def _put_back(self, bucket: Bucket, transfer: _Transfer, master: Tensor) -> None:
        """Put values that the optimizer gave other memory (`values.data = ...`) into the master.

        If it has swapped them with its state, that gets memory of its own.
        """
        for slot, values in transfer.owned.items():
            place = bucket.layout.slots[slot]
            mine = shaped(master[place.offset : place.stop], place)
            if values.data_ptr() == mine.data_ptr():
                continue
            state = self._optimizer.state.get(values, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.data_ptr() == mine.data_ptr():
                    state[key] = value.clone()
            mine.copy_(values.detach())
            values.data = mine

    @contextmanager
    def without_gradients_after(self) -> Iterator[None]:
        """Clear the gradients after an update in the block, even if it is interrupted."""
        try:
            yield
        finally:
            for values in self.values.values():
                values.grad = None

    def _chosen(self, among: Container[Gradients] | None) -> list[tuple[Gradients, _Transfer]]:
        return [pair for pair in self._transfers.items() if among is None or pair[0] in among]

    def bring_values(self) -> None:
        """Send the owners values that have changed since they were sent. All ranks must call it."""
        remembered: list[tuple[Bucket, _Transfer, Tensor]] = []
        for one, transfer in self._transfers.items():
            bucket = one.bucket
            if not bucket.partition.optimizer:
                continue  # the values are the master itself
            if bucket.partition.weights or bucket.has_own_master:
                remembered.append((bucket, transfer, _master_of(bucket)))
                continue
            views = bucket.views_of(bucket.full)
            for slot, values in transfer.owned.items():
                if transfer.left.get(slot, _stamp(values)) == _stamp(values):
                    values.detach().copy_(views[slot])
                transfer.left[slot] = _stamp(values)
        if not remembered:
            return
        report = torch.tensor(
            [transfer.seen != _stamp(master) for _, transfer, master in remembered],
            dtype=torch.uint8,
        )
        max_(report, remembered[0][0].sharing.everyone, "the agreement on edited masters")
        for values, whole in _to_owners([*compress(remembered, report.tolist())]):
            values.detach().copy_(whole)
        for _, transfer, master in remembered:
            transfer.seen = _stamp(master)


def _make_values(bucket: Bucket, slot: int) -> nn.Parameter:
    place, stored = bucket.layout.slots[slot], bucket.stored_master
    if stored is not None and stored.on_disk is not None:
        return nn.Parameter(torch.full((), torch.nan, dtype=stored.dtype).expand(place.shape))
    master = _master_of(bucket)
    if not bucket.partition.optimizer:
        return nn.Parameter(shaped(master[place.offset : place.stop], place))
    return nn.Parameter(shaped(master.new_empty(place.numel), place))


def _master_of(bucket: Bucket) -> Tensor:
    assert bucket.master is not None  # every bucket with gradients is trained
    return bucket.master


def _stamp(values: Tensor) -> tuple[int, int]:
    """Return values' address and version, which show whether they have been written to since."""
    return values.data_ptr(), values._version


def _to_owners(
    cuts: Sequence[tuple[Bucket, _Transfer, Tensor]],
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Send the fragments of tensors, laid out like this rank's span of a bucket, to their owners.

    Yields each parameter that this rank owns with the values sent for it, in its shape.
    """
    for transfer, join in [(cut[1], _start_to_owners(*cut)) for cut in cuts]:
        for slot, whole in join().items():
            yield transfer.owned[slot], whole


def _start_to_owners(
    bucket: Bucket, transfer: _Transfer, cut: Tensor
) -> Callable[[], dict[int, Tensor]]:
    """Start sending the fragments of one tensor; the returned function waits for the values."""
    slots = bucket.layout.slots
    if not bucket.partition.optimizer:
        views = bucket.views_of(cut)
        return lambda: {slot: views[slot] for slot in transfer.owned}
    sent = [[_cut_of(part, cut) for part in parts] for parts in transfer.held]
    label = f"the exchange of fragments of {bucket.name}"
    arrived = _start_exchange(bucket, sent, transfer.asked, cut, label)

    def join() -> dict[int, Tensor]:
        wholes = {slot: cut.new_empty(slots[slot].numel) for slot in transfer.owned}
        for part, values in arrived():
            wholes[part.slot][part.start : part.start + part.numel].copy_(values)
        return {slot: shaped(whole, slots[slot]) for slot, whole in wholes.items()}

    return join


def _start_to_shards(bucket: Bucket, transfer: _Transfer, master: Tensor) -> Callable[[], None]:
    """Start sending this rank's whole values to their shards; the returned function waits."""
    slots = bucket.layout.slots
    flat = {n: flattened(values.detach(), slots[n]) for n, values in transfer.owned.items()}
    sent = [
        [flat[part.slot][part.start : part.start + part.numel] for part in parts]
        for parts in transfer.asked
    ]
    arrived = _start_exchange(
        bucket, sent, transfer.held, master, f"the new values of {bucket.name}"
    )

    def finish() -> None:
        for part, values in arrived():
            _cut_of(part, master).copy_(values)

    return finish


def _start_exchange(
    bucket: Bucket,
    sent: Sequence[Sequence[Tensor]],
    wanted: Sequence[Sequence[Fragment]],
    like: Tensor,
    label: str,
) -> Callable[[], Iterator[tuple[Fragment, Tensor]]]:
    """Start sending `sent[r]` to each rank r, and receiving the fragments `wanted[r]` from it.

    The returned function waits, and yields each fragment with its values.
    """
    outgoing = [torch.cat([like.new_empty(0), *pieces]) for pieces in sent]
    incoming = [like.new_empty(sum(part.numel for part in parts)) for parts in wanted]
    pending = start_exchange(outgoing, incoming, bucket.sharing.shards, label)

    def arrived() -> Iterator[tuple[Fragment, Tensor]]:
        pending.wait()
        for parts, packed in zip(wanted, incoming, strict=True):
            yield from zip(parts, packed.split([part.numel for part in parts]), strict=True)

    return arrived


def _cut_of(part: Fragment, cut: Tensor) -> Tensor:
    return cut[part.offset : part.offset + part.numel]


def hand_over(
    optimizer: Optimizer,
    group: dict[str, Any],
    members: Iterable[nn.Parameter],
    wholes: WholeParameters,
) -> None:
    """Replace a param group's parameters by the values that this rank owns, with their state."""
    members = list(members)
    group["params"] = [wholes.values[member] for member in members if member in wholes.values]
    for member in members:
        state = optimizer.state.pop(member, None)
        if state and member in wholes.values:
            optimizer.state[wholes.values[member]] = state
