"""Eigenvalues of blocks in training: stages, ranks, events, keys and faults."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hadal
from compression.test_curvature import GOLDEN, Net, configured, inputs, values_of
from hadal import comm
from hadal.config import load_config
from hadal.errors import ConfigError, UsageError
from hadal.plugins.compression.eigenvalues import BlockEigenvalues
from hadal.plugins.compression.training import PowerIteration, relative

KEYS = "eigenvalue"


class Attending(nn.Module):
    """Blocks with attention and dropout, whose forward returns its loss by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layer:
            x = layer(nn.functional.dropout(x, 0.5, self.training))
            x = nn.functional.scaled_dot_product_attention(x, x, x)
        return {"loss": x.square().mean(), "hidden": x}


def engine_of(
    section: dict[str, Any] | None, stage: int = 0, model: nn.Module | None = None, **keys: Any
) -> Any:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **({} if section is None else {"eigenvalue": section}),
        **keys,
    }
    return hadal.initialize(model=Net() if model is None else model, config=config)[0]


def train(engine: Any, updates: int, batch: Tensor | None = None) -> list[Any]:
    found = []
    for _ in range(updates):
        loss = engine(inputs() if batch is None else batch)
        engine.backward(loss["loss"] if isinstance(loss, dict) else loss)
        engine.step()
        listener = engine.eigenvalues
        found.append(None if listener is None else list(listener.values))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.claims(KEYS, f"{KEYS}.enabled")
def test_every_stage_has_the_values_and_trains_as_without(stage: int) -> None:
    engine = engine_of(configured(gas_boundary_resolution=2), stage)
    model = Net()
    torch.manual_seed(0)
    expected = []
    for _ in range(2):
        expected = values_of(model, PowerIteration(stability=1e-6))
        loss = model(inputs())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.01 * gradient
    torch.manual_seed(0)
    found = train(engine, 3)
    assert found[0] == []
    assert found[1] == found[2] == pytest.approx(expected, rel=1e-5)
    assert engine.eigenvalues.relative == relative(engine.eigenvalues.values)
    plain = engine_of(None, stage)
    train(plain, 3)
    for name, value in plain.state_dict().items():
        assert torch.equal(engine.state_dict()[name], value)
    engine.destroy()
    plain.destroy()


def test_values_on_two_ranks_are_their_mean(ranks: RankPools) -> None:
    mine, theirs = ranks(2).run(train_on_ranks)
    assert mine == theirs
    first, second = (values_alone(scale) for scale in (1.0, 0.5))
    assert mine == pytest.approx(
        [(a + b) / 2 for a, b in zip(first, second, strict=True)], rel=1e-4
    )


def values_alone(scale: float) -> list[float]:
    engine = engine_of(configured(tol=1e-6))
    torch.manual_seed(0)
    (found,) = train(engine, 1, scale * inputs())
    engine.destroy()
    return list(found)


def train_on_ranks() -> list[float]:
    engine = engine_of(configured(tol=1e-6), stage=3)
    torch.manual_seed(0)
    (found,) = train(engine, 1, inputs() * (1.0, 0.5)[comm.get_rank()])
    engine.destroy()
    return list(found)


def test_the_options_of_the_iteration(caplog: pytest.LogCaptureFixture) -> None:
    def values(**keys: Any) -> list[float]:
        engine = engine_of(configured(**keys))
        torch.manual_seed(0)
        (found,) = train(engine, 1)
        engine.destroy()
        return list(found)

    exact = values(tol=1e-7)
    assert [abs(value) for value in exact] == pytest.approx(GOLDEN["exact_dominant"], rel=2e-2)
    assert values(max_iter=1) != pytest.approx(exact, rel=1e-3)
    assert values(tol=0.5) != pytest.approx(exact, rel=1e-3)
    assert values(stability=1.0, max_iter=1) != values(max_iter=1)
    with caplog.at_level(logging.INFO, "hadal.plugins.compression.eigenvalues"):
        values(verbose=True)
    assert "update 1: block 0: " in caplog.text


def test_events_are_written_once_per_block(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    engine = engine_of(configured(), jsonl_monitor=monitor)
    train(engine, 2)
    expected = engine.eigenvalues.relative
    engine.destroy()
    (file,) = tmp_path.rglob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    text = json.dumps(rows)
    assert text.count("Train/Eigenvalues/ModelBlockParam_0") == 2
    assert text.count("Train/Eigenvalues/ModelBlockParam_1") == 2
    assert "ModelBlockParam_2" not in text
    assert max(expected) == 1.0


def test_attention_and_dropout_are_supported_and_random_states_are_kept(tmp_path: Path) -> None:
    batch = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    ends = []
    for section in (configured(), None):
        engine = engine_of(section, model=seeded())
        train(engine, 3, batch)
        ends.append(engine.state_dict())
        if section is not None:
            assert all(engine.eigenvalues.values)
            engine.save_checkpoint(tmp_path)
            values = engine.eigenvalues.values
        engine.destroy()
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value)
    engine = engine_of(configured(), model=seeded())
    engine.load_checkpoint(tmp_path)
    assert engine.eigenvalues.values == values
    engine.destroy()


def seeded() -> nn.Module:
    torch.manual_seed(5)
    return Attending()


class Outer(Net):
    """Returns no loss."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x).tanh()
        return x


def test_the_loss_is_the_output_or_a_function_of_it() -> None:
    engine = engine_of(configured(), model=Outer())
    engine.backward(engine(inputs()).square().sum())
    with pytest.raises(UsageError, match=r"needs the loss, .* returned Tensor; .*loss_of"):
        engine.step()
    engine.destroy()
    engine = engine_of(configured(), model=Outer())
    engine.eigenvalues.loss_of = lambda output: output.square().sum()
    engine.backward(engine(inputs()).square().sum())
    engine.step()
    assert len(engine.eigenvalues.values) == 2
    engine.destroy()


class Recomputed(Net):
    """Recomputes in a way that autograd cannot differentiate twice."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


def test_operations_without_a_second_derivative_are_reported() -> None:
    engine = engine_of(configured(), model=Recomputed())
    engine.backward(engine(inputs()))
    with pytest.raises(UsageError, match=r"for layer\.0: .* use_reentrant=False"):
        engine.step()
    engine.destroy()


def test_frozen_blocks_are_reported() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Net())
    model[1].layer.requires_grad_(False)
    engine = engine_of(configured(layer_name="1.layer"), model=model)
    engine.backward(engine(inputs()))
    with pytest.raises(UsageError, match=r"^eigenvalue\.layer_name: no parameter of the blocks of"):
        engine.step()
    engine.destroy()


def test_an_update_without_a_training_forward_is_reported() -> None:
    engine = engine_of(configured())
    engine.eval()
    engine.backward(engine(inputs()))
    with pytest.raises(UsageError, match="the update had no forward in training mode"):
        engine.step()
    engine.destroy()


def test_faults_are_reported_by_path() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "eigenvalue": {"enabled": True}})
    assert [fault.path for fault in caught.value.faults] == ["eigenvalue.layer_num"]
    with pytest.raises(UsageError, match=r"eigenvalue\.layer_num: expected 1 to 2"):
        engine_of(configured(layer_num=3))
    assert BlockEigenvalues.name == "eigenvalue"
