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


@pytest.mark.slow_cells(
    "stage0-fp32-acc1-free-w1-plain-tiny-adamw-usual",
    "stage0-bf16-acc1-free-w1-attention_evaluated-tiny-adamw-usual",
    "stage2-fp32-acc3-clip-w1-attention-tiny-adamw-usual",
    "stage0-autocast-acc3-clip-w2-attention-default-uncorrected-parts",
    "stage3-autocast-acc1-free-w2-plain-default-uncorrected-rows",
    "stage0-autocast-acc1-free-w2-scalars-tiny-adamw-usual",
    "stage0-fp32-acc1-free-w3-edited_in_place-large-sgd-before",
    "stage3-fp32-acc3-clip-w3-groups-large-adagrad-parts",
    "stage3-fp32-acc1-free-w4mics-reentrant_reused-ahead-adagrad-usual",
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
