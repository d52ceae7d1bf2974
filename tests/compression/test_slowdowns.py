"""Bits that fall more slowly where the loss is curved (MoQ with eigenvalues)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

from compression.test_curvature import Net, configured, inputs
from compression.test_eigenvalues import engine_of
from hadal.config import load_config
from hadal.errors import ConfigError, UsageError
from hadal.plugins.compression.layers import compressed_modules
from hadal.plugins.compression.training import slowdown_of

KEYS = "quantize_training.eigenvalue"
BITS = {
    "enabled": True,
    "quantize_bits": {"start_bits": 8, "target_bits": 5},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
}


class Uneven(Net):
    """The first block is less curved than the second; the last layer is in no block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x).tanh()
        return self.head(x).square().sum()


def old_form(**keys: Any) -> dict[str, Any]:
    return {"quantize_training": {**BITS, "eigenvalue": configured(**keys)}}


def train(engine: Any, updates: int) -> list[tuple[int | None, ...]]:
    """The bits of each module in the updates' forwards."""
    seen = []
    for _ in range(updates):
        engine.backward(engine(inputs()))
        states = [module.compression for _, module in compressed_modules(engine.module)]
        seen.append(tuple(state.bits and state.bits.bits for state in states))
        engine.step()
    return seen


def slowed(engine: Any) -> list[tuple[int, ...]]:
    return [module.compression.slowdowns for _, module in compressed_modules(engine.module)]


@pytest.mark.claims(f"{KEYS}.enabled", f"{KEYS}.layer_name", f"{KEYS}.layer_num")
@pytest.mark.parametrize("stage", [0, 3])
def test_the_period_grows_with_the_eigenvalue_of_the_block(stage: int) -> None:
    engine = engine_of(None, stage, Uneven(), **old_form())
    computed = []
    seen: list[tuple[int | None, ...]] = []
    for _ in range(14):
        before = engine.eigenvalues.values
        seen += train(engine, 1)
        if engine.eigenvalues.values is not before:
            computed.append(engine.global_steps)
    # Values are computed before updates after which a weight loses a bit, and only there.
    falls = {
        update
        for update in range(1, 14)
        for now, then in zip(seen[update], seen[update - 1], strict=True)
        if now is not None and then is not None and now < then
    }
    assert falls <= set(computed)
    first, second, head = slowed(engine)
    assert head == (1, 1, 1)
    assert set(first + second) <= {1, 2, 3, 4, 5}
    assert 5 in (first[0], second[0])  # that of the largest eigenvalue; both fall at once
    assert first[0] != second[0]
    for index, slowdowns in enumerate((first, second, head)):
        period, at = 1, 1
        for lost, slowdown in enumerate(slowdowns):
            at = 1 + period
            assert seen[at - 1][index] == 8 - lost
            assert at >= len(seen) or seen[at][index] == 7 - lost
            period *= 2 * slowdown
    engine.destroy()


@pytest.mark.claims(
    f"{KEYS}.verbose",
    f"{KEYS}.max_iter",
    f"{KEYS}.tol",
    f"{KEYS}.stability",
    f"{KEYS}.gas_boundary_resolution",
)
def test_its_options_are_those_of_eigenvalue(caplog: pytest.LogCaptureFixture) -> None:
    def values(**keys: Any) -> list[float]:
        engine = engine_of(None, model=Uneven(), **old_form(**keys))
        torch.manual_seed(0)
        train(engine, 2)
        found = engine.eigenvalues.values
        engine.destroy()
        return found

    exact = values(tol=1e-7)
    assert len(exact) == 2
    assert values(max_iter=1) != pytest.approx(exact, rel=1e-3)
    assert values(tol=0.5) != pytest.approx(exact, rel=1e-3)
    assert values(stability=1.0, max_iter=1) != values(max_iter=1)
    assert values(gas_boundary_resolution=5) == []
    with caplog.at_level("INFO", "hadal.plugins.compression.eigenvalues"):
        values(verbose=True)
    assert "update 2: block 0: " in caplog.text


def test_the_section_eigenvalue_slows_down_too() -> None:
    group = {"params": {"start_bits": 8, "target_bits": 5}, "modules": ["*"]}
    section = {"shared_parameters": {"enabled": True}, "different_groups": {"all": group}}
    compression = {"compression_training": {"weight_quantization": section}}
    plain = engine_of(None, model=Uneven(), **compression)
    assert {bits[0] for bits in train(plain, 6)} == {8, 7, 6, 5}
    engine = engine_of(configured(), model=Uneven(), **compression)
    train(engine, 1)
    expected = [slowdown_of(value) for value in engine.eigenvalues.relative]
    train(engine, 1)
    assert slowed(engine) == [(expected[0],), (expected[1],), (1,)]
    plain.destroy()
    engine.destroy()


def test_a_resumed_run_continues_as_slowly(tmp_path: Path) -> None:
    engine = engine_of(None, model=Uneven(), **old_form())
    train(engine, 3)
    engine.save_checkpoint(tmp_path)
    expected, state = train(engine, 12), slowed(engine)
    assert state[0] != state[2]
    engine.load_checkpoint(tmp_path)
    assert train(engine, 12) == expected
    engine.destroy()
    engine = engine_of(None, stage=2, model=Uneven(), **old_form())
    engine.load_checkpoint(tmp_path)
    assert train(engine, 12) == expected
    assert slowed(engine) == state
    engine.destroy()


def bits_on_ranks(stage: int) -> list[Any]:
    engine = engine_of(None, stage, Uneven(), **old_form())
    found = [train(engine, 8), slowed(engine)]
    engine.destroy()
    return found


def test_ranks_agree(ranks: RankPools) -> None:
    (first, second), (third, _) = ranks(2).run(bits_on_ranks, 3), ranks(2).run(bits_on_ranks, 0)
    assert first == second == third


def test_faults_are_reported_by_path() -> None:
    both = {**old_form(layer_num=0), "eigenvalue": configured()}
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, **both})
    assert [fault.path for fault in caught.value.faults] == [
        "quantize_training.eigenvalue.enabled",
        "quantize_training.eigenvalue.layer_num",
    ]
    with pytest.raises(UsageError, match=r"quantize_training\.eigenvalue\.layer_num: expected 1"):
        engine_of(None, model=Uneven(), **old_form(layer_num=3))
