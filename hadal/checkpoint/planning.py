"""Read planning: which stored chunk holds which elements, by torch's checkpoint planner.

Every value is treated as 1-D here, in row-major order, as in a flat buffer.

Tests: tests/checkpoint/test_reshard.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Cut(NamedTuple):
    """Consecutive elements to read from one chunk."""

    chunk: int
    """The chunk's number."""
    start: int
    """The first element, counted from the chunk's start."""
    target: int
    """The first element's position in the requested range."""
    numel: int


def cuts_of(name: str, chunks: Sequence[tuple[int, int]], start: int, numel: int) -> list[Cut]:
    """Return the cuts that make up elements [start, start + numel); a chunk is (start, numel)."""
    # Only a load needs these modules, and they take longer to import than all of Hadal.
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
