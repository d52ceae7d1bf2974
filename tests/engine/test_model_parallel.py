"""A model in parts on several ranks trains like the whole one in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import every
from ranks import RankPools
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hadal
from engine.parts import (
    CLIP,
    PARTS,
    ROWS,
    WIDTH,
    Part,
    core,
    engine_over,
    megatron,
    part_of,
    sequences_of,
    sgd,
    whole_model,
)
from engine.toys import TINY
from hadal import comm
from hadal.errors import MismatchError, UsageError
from hadal.optim.lamb import Lamb
from hadal.utils import safe_get_full_fp32_param, safe_get_full_grad

STAGES = [0, 1, 2, 3]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A part's products are rounded before they are added up: that is all that may differ.
CLOSE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}
KEYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128.0}},
}
Maker = Callable[[Any], torch.optim.Optimizer]


def loss_of(model: nn.Module, step: int, reader: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    inputs, targets = sequences_of(step, reader)
    loss: Tensor = (model(inputs.to(dtype)).float() - targets).square().mean()
    return loss


def train_whole(
    dtype: torch.dtype, maker: Maker, updates: int
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """One process: fp32 masters, the mean over everything, clipped; also losses and norms."""
    model, masters = whole_model().to(dtype), whole_model()
    optimizer = maker(masters.parameters())
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    losses, norms = [], []
    for update in range(updates):
        model.zero_grad()
        optimizer.zero_grad()
        for micro in range(2):
            for reader in range(2):
                loss = loss_of(model, 2 * update + micro, reader)
                losses.append(loss.item())
                for parameter, gradient in zip(
                    model.parameters(),
                    torch.autograd.grad(loss, list(model.parameters())),
                    strict=True,
                ):
                    parameter.grad = gradient
                for parameter, master in pairs:
                    mean = parameter.grad.float() / 4
                    master.grad = mean if master.grad is None else master.grad + mean
        norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), CLIP)))
        optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)
    return {name: value.detach() for name, value in masters.named_parameters()}, losses, norms


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=limit, atol=limit / 10)


def train_parts(stage: int, dtype: str, maker: Maker, born: bool, names: str) -> None:
    data, part = comm.get_rank() // PARTS, comm.get_rank() % PARTS
    mpu = core() if names == "core" else megatron()
    with hadal.zero.Init(mpu=mpu) if born else nullcontext():
        model = Part(part)
    if not born and data == 1:
        # The first data-parallel rank's values are given to the others.
        nn.init.zeros_(model.up.weight)
        nn.init.zeros_(model.norm.weight)
    engine = engine_over(stage, model, wishes={"mpu": mpu, "optimizer": maker}, **KEYS[dtype])
    assert engine.gradient_accumulation_steps() == 2
    assert engine.topology.sharding.numbers == (part, part + PARTS)
    assert engine.topology.model_parallel_size == PARTS
    losses, norms = [], []
    for step in range(6):
        loss = loss_of(engine, step, data)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        if step % 2:
            norms.append(engine.get_global_grad_norm())
    masters, all_losses, all_norms = train_whole(DTYPES[dtype], maker, 3)
    assert all_norms[0] > CLIP
    assert losses == pytest.approx(all_losses[data::2], rel=CLOSE[dtype])
    assert norms == pytest.approx(all_norms, rel=CLOSE[dtype])
    found = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    assert_near(found, part_of(masters, part), CLOSE[dtype])
    engine.destroy()


@pytest.mark.fast_cells("fp32-3")
@every(dtype=list(DTYPES), stage=STAGES)
def test_parts_of_a_model_train_like_the_whole(stage: int, dtype: str, ranks: RankPools) -> None:
    ranks(4).run(train_parts, stage, dtype, sgd, False, "six")


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", STAGES)
def test_parts_that_are_born_sharded_train_like_the_whole(stage: int, ranks: RankPools) -> None:
    ranks(4).run(train_parts, stage, "fp32", sgd, True, "core")


def lamb(parameters: Any) -> torch.optim.Optimizer:
    """Its steps are as long as whole parameters are."""
    return Lamb(parameters, lr=0.02, weight_decay=0.1)


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_lamb_takes_the_norms_of_whole_parameters(stage: int, ranks: RankPools) -> None:
    ranks(4).run(train_parts, stage, "fp32", lamb, False, "six")


def lamb_of_unlike_parts() -> None:
    part = comm.get_rank() % PARTS
    model = Part(part)
    model.down.weight.tensor_model_parallel = part == 0  # type: ignore[attr-defined]
    engine = engine_over(1, model, wishes={"optimizer": lamb}, train_batch_size=None)
    engine.backward(loss_of(engine, 0, 0))
    engine.step()


def test_lamb_refuses_parts_with_different_marks(ranks: RankPools) -> None:
    for error in ranks(4).raises(lamb_of_unlike_parts):
        assert isinstance(error, MismatchError), repr(error)
        assert "mark the same parameters on each" in str(error)


def overflow_in_one_part(stage: int, is_marked: bool, keys: dict[str, Any]) -> None:
    part = comm.get_rank() % PARTS
    engine = engine_over(
        stage,
        Part(part),
        fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        gradient_clipping=0.0,
        zero_optimization={"stage": stage, **TINY, **keys},
    )
    before = engine.state_dict()
    for _ in range(2):
        loss = engine(torch.ones(ROWS, WIDTH, dtype=torch.float16)).float().mean()
        # The norm counts what is not marked as a part on the first rank alone.
        parameter = engine.module.up.weight if is_marked else engine.module.down.bias
        with hadal.zero.GatheredParameters(parameter):
            blown = parameter.float().sum() * torch.inf
        engine.backward(loss + blown if part == 1 else loss)
        engine.step()
    assert engine.overflow
    assert engine.skipped_steps == 1
    assert engine.loss_scale == 8.0
    for name, value in engine.state_dict().items():
        assert torch.equal(value, before[name])
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "not marked"])
def test_an_overflow_in_one_part_skips_all_parts(
    stage: int, is_marked: bool, ranks: RankPools
) -> None:
    ranks(4).run(overflow_in_one_part, stage, is_marked, {})


def test_it_is_skipped_without_a_norm_too(ranks: RankPools) -> None:
    ranks(4).run(overflow_in_one_part, 2, False, {"compute_grad_norm": False})


def read_over_parts() -> list[int]:
    data = TensorDataset(torch.arange(8), torch.randn(8, WIDTH))
    engine = engine_over(
        1, Part(comm.get_rank() % PARTS), wishes={"optimizer": sgd, "training_data": data}
    )
    taken = [n for numbers, _ in engine.training_dataloader for n in numbers.tolist()]
    engine.destroy()
    return taken


def test_the_parts_of_a_model_read_the_same_samples(ranks: RankPools) -> None:
    first, second, third, fourth = ranks(4).run(read_over_parts)
    assert (first, third) == (second, fourth)
    assert sorted(first + third) == list(range(8))


def modify_beyond() -> None:
    engine = engine_over(3, Part(comm.get_rank() % PARTS))
    weight = engine.module.up.weight
    with pytest.raises(UsageError, match=r"expected 0\.\.1"):
        hadal.zero.GatheredParameters(weight, modifier_rank=2)
    with hadal.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        weight.fill_(comm.get_rank())
    # Rank 1 of those that share the first part is rank 2 of the world.
    assert bool((engine.state_dict()["up.weight"] == 2 + comm.get_rank() % PARTS).all())
    engine.destroy()


def test_a_modifier_is_one_of_those_that_share_a_part(ranks: RankPools) -> None:
    assert TINY["stage3_param_persistence_threshold"] == 0
    ranks(4).run(modify_beyond)


class Adapted(nn.Module):
    """A part with a layer that comes later, the same on all ranks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.later = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.later.weight, 0.1 * comm.get_rank())

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.later(self.inner(values))
        return out


def add_a_group(stage: int) -> tuple[float, Tensor, Tensor]:
    data, part = comm.get_rank() // PARTS, comm.get_rank() % PARTS
    model = nn.Sequential(Part(part))
    engine = engine_over(stage, model, train_batch_size=None)
    model[0] = Adapted(model[0])
    later = model[0].later
    engine.optimizer.add_param_group({"params": list(later.parameters())})
    engine.backward(loss_of(engine, 0, data))
    gradients = [safe_get_full_grad(p).square().sum() for p in engine.module.parameters()]
    engine.step()
    with hadal.zero.GatheredParameters(list(later.parameters())):
        told = engine.get_global_grad_norm(), later.weight.detach().clone(), torch.stack(gradients)
    engine.destroy()
    return told


@pytest.mark.parametrize("stage", [1, 3])
def test_later_parameters_are_shared_by_the_ranks_of_a_part(stage: int, ranks: RankPools) -> None:
    told = ranks(4).run(add_a_group, stage)
    # Each part's first rank gives its values.
    for first, second in ((0, 2), (1, 3)):
        assert torch.equal(told[first][1], told[second][1])
    assert not torch.equal(told[0][1], told[1][1])
    # By the order of the parameters: norm (2), up (2), down.weight, and what is on all ranks.
    cut = torch.tensor([False, False, True, True, True, False, False, False])
    squares = told[0][2].sum() + told[1][2][cut].sum()
    for norm, _, _ in told:
        assert norm == pytest.approx(float(squares.sqrt()), rel=1e-5)
