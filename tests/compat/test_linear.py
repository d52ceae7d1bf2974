"""Linear layers with a frozen weight and a trained low-rank update."""

from __future__ import annotations

import pytest
import torch
from engine.toys import config_of
from ranks import RankPools
from torch import nn

from hadal.compat.engine import initialize
from hadal.compat.install import alias
from hadal.errors import NotBuiltYetError, UsageError


def trained(stage: int) -> list[float]:
    linear = alias("deepspeed.linear")
    torch.manual_seed(0)
    config = linear.LoRAConfig(lora_r=2, lora_alpha=4.0, delay_lora_init=True)
    layers = [
        linear.OptimizedLinear(4, 4, lora_config=config, dtype=torch.float32) for _ in range(2)
    ]
    model = nn.Sequential(*layers)
    with pytest.raises(UsageError, match="init_lora"):
        model(torch.ones(1, 4))
    linear.init_lora(model)
    frozen = [layer.full_weight().clone() for layer in layers]
    x = torch.ones(2, 4)
    expected = x @ frozen[0].T @ frozen[1].T
    assert torch.allclose(model(x), expected)  # the update begins as zero
    engine, *_ = initialize(model=model, config=config_of(stage))
    losses = []
    for _ in range(3):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = engine.state_dict()
    assert torch.equal(state["module.0.weight"], frozen[0])
    assert state["module.0.lora_weight_2.weight"].abs().sum() > 0
    engine.destroy()
    return losses


def test_only_the_update_is_trained_at_every_stage(ranks: RankPools) -> None:
    found = [ranks(2).run(trained, stage) for stage in (0, 3)]
    for losses in found:
        assert losses[0] == losses[1] and losses[0][0] > losses[0][2]
    assert found[0][0] == pytest.approx(found[1][0])


def test_kinds_of_layers_and_refusals(caplog: pytest.LogCaptureFixture) -> None:
    linear = alias("deepspeed.linear")
    assert type(linear.OptimizedLinear(4, 2, bias=True)) is nn.Linear
    lora = linear.LoRAConfig(base_weight_sharding=2)
    made = linear.OptimizedLinear(4, 2, lora_config=lora)
    assert type(made) is alias("deepspeed.linear.optimized_linear").LoRAOptimizedLinear
    assert "stage 3 shards frozen weights" in caplog.text
    made.disable()
    assert made(torch.ones(1, 4, dtype=torch.bfloat16)).shape == (1, 2)
    with pytest.raises(UsageError, match="bias=False"):
        linear.OptimizedLinear(4, 2, bias=True, lora_config=lora)
    for given in ({}, {"lora_config": lora}):
        with pytest.raises(NotBuiltYetError, match="quantization_config"):
            linear.OptimizedLinear(4, 2, quantization_config=linear.QuantizationConfig(), **given)


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)


def test_a_context_makes_such_layers_of_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, real = alias("deepspeed.linear"), nn.Linear
    with linear.Init(lora_config=linear.LoRAConfig(lora_r=2)):
        model = _Small()
    assert nn.Linear is real
    kind = alias("deepspeed.linear.optimized_linear").LoRAOptimizedLinear
    assert type(model.first) is kind and not hasattr(model.first, "lora_weight_1")
    linear.init_lora(model)
    assert type(model.first.lora_weight_1) is real and not model.first.weight.requires_grad
    with linear.Init(), pytest.raises(ZeroDivisionError):
        assert type(_Small().first) is real
        raise ZeroDivisionError
    assert nn.Linear is real

    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda config: _Small())
    before = AutoModelForCausalLM.from_config
    with linear.Init(lora_config=linear.LoRAConfig(lora_r=2)):
        made = AutoModelForCausalLM.from_config(None)
    assert type(made.first.lora_weight_1) is real
    assert AutoModelForCausalLM.from_config is before
