"""Programs that do not compile do not import the compiler."""

from __future__ import annotations

import os
import sys

import forks
import torch
from torch import nn

from hadal.device import spared_import

PROGRAM = """
import sys, warnings, torch, hadal
warnings.simplefilter("ignore")
model = torch.nn.Linear(3, 2)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
engine, *_ = hadal.initialize(model=model, config=config)
engine.backward(engine(torch.ones(1, 3)).sum())
engine.step()
assert "torch._dynamo" not in sys.modules
torch.optim.SGD(model.parameters(), lr=0.1)
assert "torch._dynamo" in sys.modules  # torch's own way is back
"""


def test_training_from_a_configuration_imports_no_compiler() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = forks.run(["-c", PROGRAM], env=env, timeout=300)
    assert done.returncode == 0, done.stderr


def test_an_optimizer_made_inside_is_an_ordinary_one() -> None:
    model = nn.Linear(2, 1)
    with spared_import():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
