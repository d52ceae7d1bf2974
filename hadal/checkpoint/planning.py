"""What to read from which stored chunk, by the planner of `torch.distributed.checkpoint`.

Every value is a 1-D tensor here, whatever its shape: row by row, as it lies in a flat buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Cut(NamedTuple):
    """Consecutive elements to be read from one chunk."""

    chunk: int
    """Its number among the chunks."""
    start: int
    """The first element, counted from the chunk's start."""
    target: int
    """Where it goes to, counted from the start of what is wanted."""
    numel: int


def cuts_of(name: str, chunks: Sequence[tuple[int, int]], start: int, numel: int) -> list[Cut]:
    """How elements [start, start + numel) come from chunks, each given by its (start, numel)."""
    # Only a load needs them, and they take longer to import than all of Hadal.
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def extent(first: int, length: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([first]), torch.Size([length]))

    end = max((first + length for first, length in chunks), default=0)
    stored = TensorStorageMetadata(
        TensorProperties(), torch.Size([end]), [extent(*chunk) for chunk in chunks]
    )
    cuts = []
    for item in create_read_items_for_chunk_list(name, stored, [extent(start, numel)]):
        assert item.storage_index.index is not None  # the planner counts the chunks
        cut = Cut(
            item.storage_index.index,
            item.storage_offsets[0],
            item.dest_offsets[0],
            item.lengths[0],
        )
        if cut.numel:
            cuts.append(cut)
    return cuts
