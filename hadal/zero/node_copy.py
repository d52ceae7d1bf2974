"""A second copy of one bucket's weights, sharded over the ranks of a node (hpZ; Wang 2023)."""

from __future__ import annotations

from torch import Tensor

from hadal.comm import Ranks
from hadal.comm.collectives import slice_of, start_all_gather
from hadal.comm.pending import Pending


class NodeCopy:
    """My slice of the copy that the ranks of `node` hold together; with None there is no copy.

    A gather over all shards creates the copy: each rank keeps its slice when the buffer is freed.
    From then on, until the weights change, full buffers are gathered inside the node.
    """

    def __init__(self, node: Ranks | None) -> None:
        self._node = node
        self.is_current = False
        """True if it holds the current weights; the same on all ranks at each gather."""
        self.kept: Tensor | None = None
        """My slice of the last full buffer."""

    def outdate(self) -> None:
        """Mark the copy stale, because weights have changed or the gather does not create one."""
        self.is_current = False

    def expect(self) -> None:
        """Mark the copy current, because the gather that is under way creates it."""
        self.is_current = self._node is not None

    def keep(self, full: Tensor) -> None:
        """Keep my slice of a full buffer."""
        mine = self._cut_of(full)
        if self.kept is None:
            self.kept = mine.clone()
        else:
            self.kept.copy_(mine)

    def start_gather(self, full: Tensor, source: Tensor | None, label: str) -> Pending:
        """Begin to fill `full` from the node.

        `source` is a full buffer that holds the weights already; None: use my kept slice.
        """
        mine = self.kept if source is None else self._cut_of(source)
        assert self._node is not None and mine is not None  # the copy is current
        self._cut_of(full).copy_(mine)
        return start_all_gather(full, self._node, label)

    def _cut_of(self, full: Tensor) -> Tensor:
        assert self._node is not None  # the copy is sharded over it
        return slice_of(full, self._node.rank, self._node)
