"""How a bucket's full buffer is filled: which collective brings the ranks' slices together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.codecs.codec import Codec
from hadal.comm.coded import start_coded_gather
from hadal.comm.collectives import (
    start_all_gather,
    start_broadcasts,
    start_gather_by_sum,
    start_gather_in_hops,
    start_gather_in_pieces,
)
from hadal.comm.pending import Pending
from hadal.zero.policy import Refresh
from hadal.zero.sharing import Sharing


@dataclass(frozen=True, slots=True)
class Filling:
    """The ways in which full buffers (1-D) of one bucket are filled.

    Each rank has put its own slice in its place, and gets those of the others.
    """

    sharing: Sharing
    adds_up: bool
    """Whether buffers are added up, in place of a gather (`Transport.gathers_by_sum`)."""
    refresh: Refresh
    name: str
    """The bucket's."""
    member: str
    """Which parameters it holds, in short."""

    def over_shards(self, full: Tensor, codec: Codec | None) -> Pending:
        """From everybody who cuts the copy, coded or as they are."""
        if codec is not None:
            gather = partial(self.over_shards, codec=None)
            return start_coded_gather(full, self.sharing.shards, codec, gather)
        hops = self.sharing.hops
        if hops is not None:
            return start_gather_in_hops(full, *hops, self._label)
        return self.over(self.sharing.shards, full)

    def over(self, ranks: Ranks, full: Tensor) -> Pending:
        """From these ranks, in one message."""
        gather = start_gather_by_sum if self.adds_up else start_all_gather
        return gather(full, ranks, self._label)

    def refreshed(self, full: Tensor) -> Pending:
        """From everybody who has stepped, or loaded, a slice of weights that stay whole."""
        label, shards = f"the refresh of {self.name}", self.sharing.shards
        if self.refresh.broadcasts:
            return start_broadcasts(full, shards, label)
        return start_gather_in_pieces(full, shards, label, self.refresh.numel)

    @property
    def _label(self) -> str:
        return f"the gather of {self.name} ({self.member})"
