"""Programs that do not compile do not import the compiler."""

from __future__ import annotations

import os
import sys
from functools import partial

import forks
import pytest
import torch
from torch import nn

from hadal.device import compiled_apart, spared_import
from hadal.errors import UsageError

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


@pytest.mark.slow
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


def test_a_function_compiled_apart_never_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    functions = [compiled_apart(torch.square) for _ in range(3)]
    with torch._dynamo.config.patch(recompile_limit=1):  # pytest's patch leaves the key hidden
        for number, function in enumerate(functions):
            assert function(torch.tensor(3.0).expand(2 + number)).sum() == 9 * (2 + number)
        with pytest.raises(UsageError, match=r"square_\d+ was compiled 1 times .* torch._dynamo"):
            functions[0](torch.ones(2, dtype=torch.int64))
    torch._dynamo.reset()
