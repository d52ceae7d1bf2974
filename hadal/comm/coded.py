"""Gathers and reductions of values that a codec encodes into fewer bytes.

The bytes travel by the same calls as everything else, also between the processes of one host. A
codec rounds, on all ranks in the same place: in a gather each rank decodes every slice, its own
as well, so that all hold the same bits; in a reduction each rank adds its own exact values to
those that the others have sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hadal.comm.codecs.codec import Codec
from hadal.comm.codecs.feedback import ErrorFeedback
from hadal.comm.collectives import slice_of, start_exchange
from hadal.comm.factors import sum_into
from hadal.comm.pending import Pending
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
        """Return the residual of each message: what was lost and is still to be sent."""
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

    def start_hop(number: int, values: Tensor) -> Pending:
        ranks = hops[number]
        # For each rank of this hop: its slice for every group of the hops that follow.
        table = values.view(-1, ranks.size, out.numel()).transpose(0, 1)
        totals = torch.empty(table.shape[1:], dtype=exact, device=full.device)
        pending = _start_sum(table, totals, ranks, messages, number, label)
        if number + 1 < len(hops):
            return pending.then(lambda: start_hop(number + 1, totals))
        return pending.then(lambda: sum_into(out, [totals.view(-1)], factor, accumulate))

    return start_hop(0, full)


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
