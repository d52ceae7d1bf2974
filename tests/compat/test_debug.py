"""Names by the object: those of the newest engine's model."""

from __future__ import annotations

import torch
from engine.toys import config_of, model_of
from ranks import on_ranks
from torch import nn

from hadal.compat import log as debug
from hadal.compat.engine import initialize


@on_ranks(2)
def test_modules_and_parameters_have_names() -> None:
    model = model_of()
    engine, *_ = initialize(model=model, config=config_of(3))
    assert debug.param_names[model[0].weight] == "0.weight"
    assert debug.module_names[model[3]] == "3"
    assert debug.debug_param2name(model[3].bias) == "3.bias"
    assert debug.debug_module2name_class(model[3]) == "name=3 Linear"
    assert debug.debug_param2name(nn.Parameter(torch.ones(4))) == "unknown"
    debug.debug_clear_module_and_param_names()
    assert debug.debug_module2name(model[3]) == "unknown"
    engine.destroy()
