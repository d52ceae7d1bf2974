"""The mean over ranks in two compressed hops; errors of the encoding are sent later.

Each rank sends every other one the encoded slice that this one owns; the owner decodes and averages
them, and sends the mean, encoded anew, to all. Both sides remember what their encoding has lost and
add it to what they encode next (Seide 2014; in two hops Tang 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hadal.comm.codecs.codec import Codec
from hadal.comm.collectives import slice_of, start_all_gather, start_exchange
from hadal.comm.pending import Pending, finished
from hadal.comm.ranks import Ranks

Put = Callable[[int, Tensor], None]
"""A function that gets the mean slice by slice: its offset, and its values, valid for the call."""


class Owed(NamedTuple):
    """The values that this rank has still to send."""

    mine: Tensor
    """Residual of its own values: one for each of them."""
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
        """Clear what is owed."""
        for owed in self.owed:
            owed.zero_()

    def start(self, put: Put, label: str) -> Pending:
        """Begin to average what is owed. All ranks must call it, in one order."""
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
