"""torch's functions that clip gradients, on parameters whose gradients an engine holds."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

from engine.toys import backward, engine_of, train
from hadal.errors import UsageError


def _own() -> nn.Parameter:
    own = nn.Parameter(torch.ones(4))
    own.grad = torch.full((4,), 3.0)
    return own


@pytest.mark.parametrize("stage", range(4))
@on_ranks(1)
def test_clipping_by_hand_is_refused(stage: int) -> None:
    engine = engine_of(stage)
    backward(engine, 0)
    for parameters in (
        engine.parameters(),
        list(engine.module.parameters()),
        engine.module[0].bias,
    ):
        with pytest.raises(UsageError, match=r'of 0\.\w+, .*"gradient_clipping": 0\.5'):
            clip_grad_norm_(parameters, 0.5)
    with pytest.raises(UsageError, match=r"clip_grads_with_norm_.*gradient_clipping"):
        clip_grads_with_norm_(engine.parameters(), 0.5, torch.tensor(1.0))
    with pytest.raises(UsageError, match=r"clip_grad_value_.*safe_set_full_grad"):
        clip_grad_value_(parameters=engine.parameters(), clip_value=0.5)
    engine.step()
    own = _own()
    assert clip_grad_norm_(own, 3.0).item() == 6.0
    assert own.grad is not None and own.grad.norm().item() == pytest.approx(3.0, abs=1e-4)
    clip_grad_value_([own], 1.0)
    assert own.grad.tolist() == [1.0] * 4
    module = engine.module
    engine.destroy()
    clip_grad_norm_(module.parameters(), 1.0)  # they are the program's again


def clip_as_well() -> Any:
    """With gradient_clipping the engine clips: an additional call only returns the wrong norm."""
    engine = engine_of(2, gradient_clipping=0.1)
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hadal.engine.training").addHandler(listener)
    for step in range(2):
        backward(engine, step)
        clip_grad_norm_(engine.parameters(), 0.1)
        engine.step()
    logging.getLogger("hadal.engine.training").removeHandler(listener)
    found = engine.state_dict()
    engine.destroy()
    plain = engine_of(2, gradient_clipping=0.1)
    train(plain, range(2))
    expected = plain.state_dict()
    plain.destroy()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return told


def test_a_second_clipping_is_reported_once(ranks: RankPools) -> None:
    (told,) = ranks(1).run(clip_as_well)
    assert len(told) == 1
    assert "clip_grad_norm_" in told[0]
    assert "engine.get_global_grad_norm()" in told[0]


@on_ranks(1)
def test_other_parameters_are_clipped_by_torch() -> None:
    """Parameters outside the optimizer keep `.grad`; they are clipped as ever."""
    engine = engine_of(1)
    extra = _own()
    assert clip_grad_norm_([extra], 3.0, error_if_nonfinite=True).item() == 6.0
    frozen = engine.module[0].weight.requires_grad_(False)
    clip_grad_norm_([frozen, extra], 3.0)
    engine.destroy()
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in ()), 1.0)
