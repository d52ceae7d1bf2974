"""Optimizers that look at whole parameters: a stage and an odd model change nothing for them.

Two ranks average the same two gradients in float32 at every stage, so what is stepped whole comes
out in the same bits. What is stepped flat (Lamb, and Muon's Adam) may differ in the last one: norms
are summed in another order, and a kernel treats the ends of its blocks otherwise.
"""

from __future__ import annotations

import pytest
import torch
from cases import every
from ranks import RankPools

from .cells import BY_PARAMETER, NODES
from .cover import Cell
from .models import SUBJECTS, built
from .training import trained_by_hadal

STAGES = {"lamb": (3,), "muon": (3,), "adafactor": (1, 3)}


def cell_of(stage: int, model: str, optimizer: str) -> Cell:
    return {
        "stage": f"stage{stage}",
        "precision": "fp32",
        "accumulation": "acc1",
        "clipping": "free",
        "world": "w2",
        "model": model,
        "keys": "tiny",
        "optimizer": optimizer,
    }


# torch's Adafactor divides by the number of elements, so it has no update for an empty parameter.
CASES = [
    (optimizer, model)
    for optimizer in BY_PARAMETER
    for model, subject in SUBJECTS.items()
    if optimizer != "adafactor" or all(p.numel() for p in built(subject).parameters())
]


# Two of three: each model with some, and with any where there are all.
@pytest.mark.fast_cells("lamb-two_forwards")
@pytest.mark.parametrize(("optimizer", "model"), CASES)
def test_a_stage_changes_nothing(optimizer: str, model: str, ranks: RankPools) -> None:
    expected = ranks(2).run(trained_by_hadal, cell_of(0, model, optimizer))[0]
    assert expected.weights
    for stage in STAGES[optimizer]:
        for found in ranks(2).run(trained_by_hadal, cell_of(stage, model, optimizer)):
            assert set(found.weights) == set(expected.weights)
            for name, value in expected.weights.items():
                if optimizer == "adafactor":
                    assert torch.equal(found.weights[name], value), (stage, name)
                else:
                    torch.testing.assert_close(found.weights[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@every(optimizer=list(BY_PARAMETER), world=NODES)
def test_nodes_change_nothing(optimizer: str, world: str, ranks: RankPools) -> None:
    """Each copy has its own owners, who come to the same values.

    Four gradients are added up in another order, and what that rounds Muon's orthogonal matrices
    show enlarged: by 6e-6 here, where updates move a weight by 6e-2.
    """
    whole, cut = ({**cell_of(stage, "plain", optimizer), "world": world} for stage in (0, 3))
    expected = ranks(4).run(trained_by_hadal, whole)[0]
    for found in ranks(4).run(trained_by_hadal, cut):
        for name, value in expected.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=1e-5, atol=2e-5)
