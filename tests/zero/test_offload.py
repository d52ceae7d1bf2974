"""Encoded weights: any slice of them can be read, and decoding and encoding again loses nothing."""

from __future__ import annotations

import pytest
import torch

from hadal.comm.codecs import Blockwise
from hadal.comm.pending import finished
from hadal.errors import ShardedAccessError
from hadal.offload.tensors import UNIT_NUMEL, StoredSlice
from hadal.zero import offload
from hadal.zero.offload import EncodedTensor, Stored

CODEC = Blockwise(8, 256)
NUMEL = 3 * UNIT_NUMEL + 780


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_BLOCK_NUMEL", 2560)


def values() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_any_slice_can_be_read() -> None:
    tensor = EncodedTensor(values(), CODEC)
    whole = tensor.read()
    assert (whole - values()).abs().max() < values().abs().max() / 127
    assert sum(wire.nbytes for wire in tensor.wires) < 0.52 * values().nbytes
    for start, stop in ((0, NUMEL), (5, 6), (UNIT_NUMEL - 1, NUMEL - 3), (9000, 9000)):
        # Parts lie in one memory: each lasts until the next.
        parts = [part.clone() for part in StoredSlice(tensor, start, stop).parts(UNIT_NUMEL * 2)]
        assert torch.equal(torch.cat([whole[:0], *parts]), whole[start:stop])


def filled(weights: Stored, place: torch.Tensor) -> None:
    assert weights.fill(place, lambda: finished("a gather")).done


def test_what_is_written_is_kept_and_what_is_read_is_not_rounded_again() -> None:
    weights = Stored("the weights", values(), EncodedTensor(values(), CODEC))
    place = torch.empty(NUMEL, dtype=torch.bfloat16)
    filled(weights, place)
    first = place.clone()
    with pytest.raises(ShardedAccessError, match="the weights were used"):
        _ = weights.values
    for writes in (False, True):
        with weights.present(writes=writes) as present:
            assert torch.equal(present, first)
            with weights.present() as inner:
                assert inner is present
            present[300] = 1.0
        filled(weights, place)
        assert (place[300] == 1.0) == writes
        assert torch.equal(place[:256], first[:256])
        assert torch.equal(place[512:], first[512:])
    weights.replace(first)
    filled(weights, place)
    assert torch.equal(place, first)
    assert weights.holds(first)
