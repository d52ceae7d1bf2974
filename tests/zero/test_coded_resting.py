"""Weights that rest coded: any stretch of them can be read, and what was decoded stays the same."""

from __future__ import annotations

import pytest
import torch

from hadal.comm.codecs.blockwise import Blockwise
from hadal.errors import ShardedAccessError
from hadal.offload.runs import UNIT_NUMEL, RunCut
from hadal.zero import coded_resting
from hadal.zero.coded_resting import CodedResting, CodedRun

CODEC = Blockwise(8, 256)
NUMEL = 3 * UNIT_NUMEL + 780


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_resting, "_PART_NUMEL", 2560)


def values() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_any_stretch_can_be_read() -> None:
    run = CodedRun(values(), CODEC)
    whole = run.read()
    assert (whole - values()).abs().max() < values().abs().max() / 127
    assert sum(wire.nbytes for wire in run.wires) < 0.52 * values().nbytes
    for start, stop in ((0, NUMEL), (5, 6), (UNIT_NUMEL - 1, NUMEL - 3), (9000, 9000)):
        # Parts lie in one memory: each lasts until the next.
        parts = [part.clone() for part in RunCut(run, start, stop).parts(UNIT_NUMEL * 2)]
        assert torch.equal(torch.cat([whole[:0], *parts]), whole[start:stop])


def test_what_is_written_is_kept_and_what_is_read_is_not_rounded_again() -> None:
    resting = CodedResting("the weights", values(), CODEC)
    place = torch.empty(NUMEL, dtype=torch.bfloat16)
    resting._copy_to(place)
    first = place.clone()
    with pytest.raises(ShardedAccessError, match="the weights were read"):
        _ = resting.values
    for writes in (False, True):
        with resting.present(writes=writes) as present:
            assert torch.equal(present, first)
            with resting.present() as inner:
                assert inner is present
            present[300] = 1.0
        resting._copy_to(place)
        assert (place[300] == 1.0) == writes
        assert torch.equal(place[:256], first[:256])
        assert torch.equal(place[512:], first[512:])
    resting.replace(first)
    resting._copy_to(place)
    assert torch.equal(place, first)
    assert resting.holds(first)
