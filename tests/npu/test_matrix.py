"""The equivalence matrix on the device: ranks with late work train like one process."""

from __future__ import annotations

import pytest
from contracts.cells import COVERED, cells_of_nodes, id_of, world_of
from contracts.cover import Cell, pairwise_cover
from contracts.reference import Outcome, trained_by_reference
from contracts.test_equivalence import faults_of
from contracts.training import trained_by_hadal
from ranks import RankPools

import npu

_OF_EACH = 12  # the rest is slow


def _runs_here(cell: Cell) -> bool:
    """True if the test device has the kernels: torch requires a fused cell for an LSTM there."""
    return cell["model"] != "lstm"


_CELLS = sorted(
    filter(_runs_here, [*pairwise_cover(COVERED), *cells_of_nodes()]),
    key=world_of,
)


def _late(cell: Cell) -> Outcome:
    with npu.asynchronous():
        return trained_by_hadal(cell)


@pytest.mark.fast_cells(
    "stage2-autocast-acc1-free-w1-edited-large-adagrad-parts",
    "stage2-autocast-acc1-free-w3-tied-large-adagrad-parts",
)
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=id_of(cell), marks=[pytest.mark.slow] if number % _OF_EACH else [])
        for number, cell in enumerate(_CELLS)
    ],
)
def test_a_device_trains_as_one_process_does(cell: Cell, npus: RankPools) -> None:
    expected = trained_by_reference(cell)
    for rank, got in enumerate(npus(world_of(cell)).run(_late, cell)):
        faults = faults_of(cell, rank, got, expected)
        assert not faults, f"rank {rank} of {id_of(cell)}:\n" + "\n".join(faults)
