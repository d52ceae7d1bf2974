"""A backward that the caller starts, `loss.backward()`, equals the engine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import every
from ranks import RankPools, on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hadal import utils
from hadal.errors import LossError, UsageError

from .toys import assert_equal, batch_of, engine_of, loss_of, model_of

STAGES = [0, 1, 2, 3]
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 3}},
}


class Recomputed(nn.Module):
    """Two layers that run again in backward, and an outer one with a weight of its own."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = model_of()
        self.scale = nn.Parameter(torch.ones(6))
        self._reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        halves = self.layers[0], self.layers[1:]
        inside = checkpoint(halves[0], inputs * self.scale, use_reentrant=self._reentrant)
        outputs: Tensor = checkpoint(halves[1], inside, use_reentrant=self._reentrant)
        return outputs


def losses_of(engine: Any, steps: range, *, direct: bool) -> list[Tensor]:
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for step in steps:
        inputs, targets = batch_of(step)
        loss = loss_of(engine(inputs.to(dtype)), targets)
        if not direct:
            engine.backward(loss)
        elif dtype == torch.float16:
            engine.scale(loss).backward()
        else:
            loss.backward()
        losses.append(loss.detach())
        engine.step()
    return losses


def alike(stage: int, model: str, changes: dict[str, Any]) -> None:
    found = []
    for direct in (False, True):
        made = {
            "plain": model_of,
            "recomputed": lambda: Recomputed(reentrant=False),
            "reentrant": lambda: Recomputed(reentrant=True),
        }[model]()
        engine = engine_of(stage, made, gradient_accumulation_steps=2, **changes)
        losses = losses_of(engine, range(8), direct=direct)
        found.append((torch.stack(losses), engine.get_global_grad_norm(), engine.state_dict()))
        assert engine.global_steps == 4
        engine.destroy()
    (losses, norm, state), (again, norm_again, state_again) = found
    assert torch.equal(losses, again)
    assert norm == norm_again
    assert_equal(state, state_again)


@pytest.mark.fast_cells("fp32-0", "bf16-1", "fp16-2")
@every(dtype=list(DTYPES), stage=STAGES)
def test_both_ways_give_the_same(stage: int, dtype: str, ranks: RankPools) -> None:
    ranks(2).run(alike, stage, "plain", {**DTYPES[dtype], "gradient_clipping": 0.5})


@pytest.mark.fast_cells("reentrant-1")
@every(model=["recomputed", "reentrant"], stage=STAGES)
def test_recomputation_in_backward_does_too(stage: int, model: str, ranks: RankPools) -> None:
    ranks(2).run(alike, stage, model, DTYPES["bf16"])


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_gradients_are_reported_equally(stage: int) -> None:
    found = []
    for direct in (False, True):
        engine = engine_of(stage, gradient_accumulation_steps=4)
        outputs = engine(batch_of(0)[0])
        if direct:
            # Of tensors that are no scalars too, as in plain torch.
            outputs.backward(torch.full_like(outputs, 0.25))
        else:
            engine.backward((outputs * 0.25).sum())
        found.append(utils.safe_get_full_grad(engine.module[0].weight))
        engine.destroy()
    assert torch.equal(*found)


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_engines_train_with_a_common_loss(stage: int) -> None:
    """The loss of two engines: both train."""
    states = []
    for together in (True, False):
        first, second = engine_of(stage, model_of(1)), engine_of(stage, model_of(2))
        for step in range(3):
            inputs, targets = batch_of(step)
            losses = [loss_of(engine(inputs), targets) for engine in (first, second)]
            if together:
                torch.stack(losses).sum().backward()
            else:
                for engine, loss in zip((first, second), losses, strict=True):
                    engine.backward(loss)
            first.step()
            second.step()
        states.append((first.state_dict(), second.state_dict()))
        first.destroy()
        second.destroy()
    for found, expected in zip(*states, strict=True):
        assert_equal(found, expected)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no gradient today")


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(1)
def test_one_that_raises_is_over(stage: int) -> None:
    model = model_of()
    engine = engine_of(stage, model)
    losses_of(engine, range(2), direct=True)
    handle = model[1].register_forward_hook(lambda *given: Fails.apply(given[-1]))
    with pytest.raises(ValueError, match="no gradient today"):
        losses_of(engine, range(2, 3), direct=True)
    handle.remove()
    engine.zero_grad()
    found = losses_of(engine, range(2, 5), direct=True)
    untouched = engine_of(stage)
    expected = losses_of(untouched, range(5), direct=False)[2:]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert_equal(engine.state_dict(), untouched.state_dict())


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_impossible_values_are_refused(stage: int) -> None:
    engine = engine_of(stage, gradient_accumulation_steps=2)
    loss_of(engine(batch_of(0)[0]), batch_of(0)[1]).backward()
    engine.step()
    with pytest.raises(UsageError, match="use one of the two for all"):
        engine.backward(loss_of(engine(batch_of(1)[0]), batch_of(1)[1]))
    engine.destroy()

    engine = engine_of(stage, **DTYPES["fp16"])
    loss = loss_of(engine(batch_of(0)[0].half()), batch_of(0)[1])
    with pytest.raises((UsageError, LossError), match=r"engine.scale\(loss\).backward\(\)"):
        loss.backward()
    engine.destroy()
