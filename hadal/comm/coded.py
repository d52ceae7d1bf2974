"""Gathers, reductions and means of values that a codec encodes into fewer bytes.

Encoded bytes are sent by the same calls as other tensors, also between the processes of one host. A
codec rounds, in the same place on all ranks: in a gather each rank decodes every slice, including
its own, so that all hold the same bits; in a reduction each rank adds its own exact values to the
decoded ones of the others.

A mean in two hops is encoded twice. Each rank encodes each slice and sends it to the slice's owner.
The owner decodes and averages the slices, encodes the mean and sends it to all. Both sides keep the
error of their encoding and add it to the next message (Seide 2014; in two hops Tang 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.comm.codecs import Codec, ErrorFeedback
from hadal.comm.collectives import slice_of, start_all_gather, start_exchange, sum_into
from hadal.comm.pending import Pending, finished
from hadal.comm.ranks import Ranks

# Exchanges of coded values have their own order, and so their own tag.
_CODED = 31


def start_coded_gather(
    full: Tensor, ranks: Ranks, codec: Codec, gather: Callable[[Tensor], Pending]
) -> Pending:
    """Fill the slices of 1-D `full` with the decoded slices of all ranks.

    This rank's must be in its place. `gather` starts to fill the slices of a tensor of bytes, over
    several `ranks`.
    """
    nbytes = codec.wire_bytes(full.numel() // ranks.size)
    wire = torch.empty(nbytes * ranks.size, dtype=torch.uint8, device=full.device)
    codec.encode(slice_of(full, ranks.rank, ranks), slice_of(wire, ranks.rank, ranks))

    def decode() -> None:
        for rank in range(ranks.size):
            codec.decode(slice_of(wire, rank, ranks), slice_of(full, rank, ranks))

    return gather(wire).then(decode)


class Messages:
    """Encoders of one bucket's gradients, one for each rank that receives a slice of them.

    With `decay`, the error of a message is added to the next one to the same rank, and forgotten
    after so many `updates`.
    """

    def __init__(
        self, codec: Codec, decay: float | None = None, updates: int | None = None
    ) -> None:
        self.codec = codec
        self._decay = decay
        self._most_updates = updates
        self._updates = 0
        self._errors: dict[tuple[int, int], ErrorFeedback] = {}

    def encode(self, values: Tensor, out: Tensor, hop: int, place: int) -> None:
        """Write `values` into `out`; the hop and the values' place in it identify the message."""
        if self._decay is None:
            self.codec.encode(values, out)
            return
        key = (hop, place)
        if key not in self._errors:
            self._errors[key] = ErrorFeedback(self.codec, values.dtype, self._decay)
        self._errors[key].encode(values, out)

    def begin_update(self) -> None:
        """Count an update; forget the residuals once their time is over."""
        if self._updates == self._most_updates:
            self.drop()
        self._updates += 1

    def rescale(self, factor: float) -> None:
        """Scale the residuals, as values will be `factor` times as large from now on."""
        for error in self._errors.values():
            error.rescale(factor)

    def drop(self) -> None:
        """Forget the residuals."""
        self._updates = 0
        self._errors.clear()

    @property
    def residuals(self) -> list[Tensor]:
        """Return the residual of each message: the encoding error that is still to be sent."""
        return [error.residual for error in self._errors.values() if error.residual is not None]


def start_coded_reduce_scatter(
    full: Tensor,
    out: Tensor,
    hops: Sequence[Ranks],
    messages: Messages,
    factor: float,
    accumulate: bool,
    label: str,
) -> Pending:
    """Put the sum over all ranks of my slice of 1-D `full`, times `factor`, into `out`.

    Or add it to `out`. It is added up in float32. `hops` is the group of all ranks, or two: first
    the ranks inside my node sum the slices of the ranks that have my place in other nodes; then
    these sums, encoded again, go to those ranks across nodes. Slices are ordered by node, and by
    rank in each.
    """
    exact = torch.promote_types(torch.float32, full.dtype)

    def start_hop(number: int, values: Tensor) -> tuple[Pending, Tensor]:
        ranks = hops[number]
        # For each rank of this hop: its slice for every group of the hops that follow.
        table = values.view(-1, ranks.size, out.numel()).transpose(0, 1)
        totals = torch.empty(table.shape[1:], dtype=exact, device=out.device)
        return _start_sum(table, totals, ranks, messages, number, label), totals

    def end(totals: Tensor) -> None:
        sum_into(out, [totals.view(-1)], factor, accumulate)

    # A function that called itself would be a cycle, and keep the tensors.
    def start_second(first: Tensor) -> Pending:
        pending, totals = start_hop(1, first)
        return pending.then(lambda: end(totals))

    pending, totals = start_hop(0, full)
    return pending.then(lambda: end(totals) if len(hops) == 1 else start_second(totals))


def _start_sum(
    table: Tensor, totals: Tensor, ranks: Ranks, messages: Messages, hop: int, label: str
) -> Pending:
    """Send (slices, numel) `table[r]` to each rank r; `totals` becomes my sum over all ranks."""
    codec = messages.codec
    _, count, numel = table.shape
    nbytes = codec.wire_bytes(numel)
    wire = torch.empty(ranks.size, count, nbytes, dtype=torch.uint8, device=table.device)
    found = torch.empty_like(wire)
    nothing = wire.view(-1)[:0]
    for other in ranks.others:
        for number in range(count):
            place = other * count + number
            messages.encode(table[other, number], wire[other, number], hop, place)
    outgoing = [wire[r].view(-1) if r != ranks.rank else nothing for r in range(ranks.size)]
    incoming = [found[r].view(-1) if r != ranks.rank else nothing for r in range(ranks.size)]
    # My own summand is added exactly: only messages are encoded.
    totals.copy_(table[ranks.rank])

    def add_up() -> None:
        for other in ranks.others:
            for number in range(count):
                codec.decode_add(found[other, number], totals[number])

    return start_exchange(outgoing, incoming, ranks, label, _CODED).then(add_up)


Put = Callable[[int, Tensor], None]
"""A function that gets the mean slice by slice: its offset, and its values, valid for the call."""


class Owed(NamedTuple):
    """The values that this rank has still to send."""

    mine: Tensor
    """Residual of this rank's own values, one for each."""
    of_mean: Tensor
    """Residual of the mean of its slice."""


class CompressedMean:
    """The repeated average of one long 1-D value over ranks.

    Add the values to `owed.mine`, at any time before an exchange. Their number is a multiple of the
    ranks. A single rank sends nothing, so nothing is compressed.
    """

    def __init__(self, numel: int, ranks: Ranks, codec: Codec, device: torch.device) -> None:
        self._ranks = ranks
        self._codec = codec
        self.owed = Owed(
            torch.zeros(numel, device=device), torch.zeros(numel // ranks.size, device=device)
        )

    def forget(self) -> None:
        """Clear the residuals."""
        for owed in self.owed:
            owed.zero_()

    def start(self, put: Put, label: str) -> Pending:
        """Begin to average the residuals. All ranks must call it, in the same order."""
        ranks, mine = self._ranks, self.owed.mine
        if ranks.size == 1:
            put(0, mine)
            mine.zero_()
            return finished(label)
        leaving, coming = (
            [slice_of(room, number, ranks) for number in range(ranks.size)]
            for room in (self._room(), self._room())
        )
        for number, wire in enumerate(leaving):
            self._encode(slice_of(mine, number, ranks), wire)
        pending = start_exchange(leaving, coming, ranks, label)
        return pending.then(lambda: self._start_spread(coming, put, label))

    def _start_spread(self, coming: Sequence[Tensor], put: Put, label: str) -> Pending:
        """Average the messages received for my slice, and send the mean to all."""
        ranks, codec, mean = self._ranks, self._codec, self.owed.of_mean
        for wire in coming:
            codec.decode_add(wire, mean, 1.0 / ranks.size)
        whole = self._room()
        self._encode(mean, slice_of(whole, ranks.rank, ranks))

        def arrive() -> None:
            values = torch.empty_like(mean)
            for number in range(ranks.size):
                codec.decode(slice_of(whole, number, ranks), values)
                put(number * values.numel(), values)

        return start_all_gather(whole, ranks, label).then(arrive)

    def _encode(self, values: Tensor, wire: Tensor) -> None:
        """Fill `wire`, and leave the error of the encoding in `values`."""
        self._codec.encode(values, wire)
        self._codec.decode_add(wire, values, -1.0)

    def _room(self) -> Tensor:
        """Return an empty buffer for a wire of each slice."""
        nbytes = self._codec.wire_bytes(self.owed.of_mean.numel())
        return torch.empty(
            nbytes * self._ranks.size, dtype=torch.uint8, device=self.owed.mine.device
        )
