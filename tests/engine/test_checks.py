"""What is checked before an engine is made (what users see of it: contracts/test_bad_input.py)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hadal.engine.checks import check_groups
from hadal.errors import OptimizerError


def test_parameters_of_another_model_are_refused():
    mine, other = nn.Linear(2, 3), nn.Linear(2, 5)
    optimizer = torch.optim.SGD(
        [{"params": list(mine.parameters())}, {"params": list(other.parameters())}], lr=0.1
    )
    with pytest.raises(OptimizerError, match=r"rank 2: parameter 0 of param group 1 \(\(5, 2\)"):
        check_groups(optimizer, list(mine.parameters()), 2)
    check_groups(optimizer, [*mine.parameters(), *other.parameters()], 2)
