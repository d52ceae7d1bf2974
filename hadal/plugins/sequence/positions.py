"""Positions of whole sequences, and the documents that are packed into them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm.functions import all_gather_into_tensor, labelled
from hadal.device import on_device, read_on_host


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of whole sequences."""

    whole: Tensor
    """[..., length]."""
    documents: tuple[tuple[int, ...], ...] | None
    """Lengths of the documents in each row; None if each row is one."""

    def numbered(self) -> Tensor | None:
        """Return the number of each position's document, [batch, length]; None as above."""
        if self.documents is None:
            return None
        rows = []
        for lengths in self.documents:
            numbers = torch.arange(len(lengths), device="cpu")
            rows.append(numbers.repeat_interleave(torch.tensor(lengths, device="cpu")))
        return on_device(torch.stack(rows), self.whole.device)


def gather_positions(mine: Tensor, group: dist.ProcessGroup) -> Positions:
    """Join the positions [..., length / ranks] of all ranks."""
    size = dist.get_world_size(group)
    found = mine.new_empty(size, *mine.shape)
    labelled(
        "positions of whole sequences",
        all_gather_into_tensor,
        found.flatten(0, 1) if mine.dim() > 1 else found.flatten(),
        mine.contiguous(),
        group=group,
    )
    whole = torch.cat(list(found), dim=-1)
    return Positions(whole, documents_in(whole) if whole.dim() == 2 else None)


def documents_in(positions: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Return the lengths of the runs of consecutive positions in each row; None if all are one."""
    breaks = positions[:, 1:] != positions[:, :-1] + 1
    on_host = read_on_host(breaks, "where packed documents begin")
    if not on_host.any():
        return None
    length = positions.shape[1]
    found = []
    for row in on_host:
        starts = [0, *(row.nonzero()[:, 0] + 1).tolist(), length]
        found.append(tuple(b - a for a, b in pairwise(starts)))
    return tuple(found)


class PositionsCache:
    """The positions of the latest forward, which all its layers use."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._mine: Tensor | None = None
        self._version = -1
        self._found: Positions | None = None

    def forget(self) -> None:
        """Drop them: another forward starts, possibly with the same tensor on only some ranks."""
        self._mine = self._found = None

    def of(self, mine: Tensor) -> Positions:
        """Return the positions of whole sequences; all ranks must make the same calls."""
        if self._found is None or self._mine is not mine or self._version != mine._version:
            self._found = gather_positions(mine, self._group)
            self._mine, self._version = mine, mine._version
        return self._found
