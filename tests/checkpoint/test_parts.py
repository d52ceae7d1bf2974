"""Checkpoints of a model in model-parallel parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import diagonal
from engine.parts import PARTS, ROWS, WIDTH, Part, core, engine_over, megatron, sequences_of
from engine.toys import assert_equal
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm
from hadal.errors import CheckpointError
from hadal.utils import safe_get_full_fp32_param

KEYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}},
}


class Dropping(nn.Module):
    """A model that draws numbers from the rank's own generator in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part(comm.get_rank() % PARTS)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.part(nn.functional.dropout(values, 0.2))
        return out


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def engine_in(stage: int, dtype: str, **changes: Any) -> Any:
    # Ranks that hold parts of one model see the same samples, and drop the same of them.
    torch.manual_seed(comm.get_rank() // PARTS)
    wishes = {"mpu": core(), "optimizer": adam}
    return engine_over(stage, Dropping(), wishes=wishes, **KEYS[dtype], **changes)


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs, targets = sequences_of(step, comm.get_rank() // PARTS)
        dtype = next(engine.module.parameters()).dtype
        loss = (engine(inputs.to(dtype)).float() - targets).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masters_of(engine: Any) -> dict[str, Tensor]:
    return {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}


def go_on(folder: str, stage: int, dtype: str) -> None:
    first = engine_in(stage, dtype)
    train(first, range(4))
    first.save_checkpoint(folder)
    masters = masters_of(first)
    if comm.get_rank() < PARTS:
        torch.save(masters, Path(folder, f"part{comm.get_rank()}.pt"))
    losses = train(first, range(4, 8))
    second = engine_in(stage, dtype)
    second.load_checkpoint(folder)
    assert train(second, range(4, 8)) == losses
    assert second.loss_scale == first.loss_scale
    assert_equal(second.state_dict(), first.state_dict())
    assert_equal(masters_of(second), masters_of(first))
    first.destroy(), second.destroy()


def load_with_fewer_replicas(folder: str, stage: int, dtype: str) -> None:
    assert megatron().get_data_parallel_world_size() == 1
    engine = engine_in(stage, dtype, train_batch_size=ROWS * 2)
    engine.load_checkpoint(folder)
    wanted = torch.load(Path(folder, f"part{comm.get_rank()}.pt"))
    assert_equal(masters_of(engine), wanted)
    assert engine.global_steps == 2
    assert len(set(train(engine, range(4, 6)))) == 2
    engine.destroy()


@diagonal(dtype=list(KEYS), stage=[0, 1, 2, 3])
def test_parts_go_on_bit_for_bit_and_load_with_fewer_replicas(
    stage: int, dtype: str, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(4).run(go_on, str(tmp_path), stage, dtype)
    ranks(2).run(load_with_fewer_replicas, str(tmp_path), (stage + 2) % 4, dtype)


class Alone:
    """Process groups where every rank holds the whole model."""

    def __init__(self) -> None:
        self._world, (self._one, _) = comm.Ranks.world(), comm.Ranks.world().in_blocks(1)
        for kind, ranks in (("data", self._world), ("model", self._one)):
            setattr(self, f"get_{kind}_parallel_group", lambda ranks=ranks: ranks.group)
            setattr(self, f"get_{kind}_parallel_rank", lambda ranks=ranks: ranks.rank)
            setattr(self, f"get_{kind}_parallel_world_size", lambda ranks=ranks: ranks.size)


def change_the_parts(folder: str) -> None:
    parts = engine_over(1, Part(comm.get_rank() % PARTS), train_batch_size=None)
    whole = engine_over(1, nn.Linear(WIDTH, WIDTH), wishes={"mpu": Alone()}, train_batch_size=None)
    parts.save_checkpoint(folder, "parts")
    whole.save_checkpoint(folder, "whole")
    for engine, tag, told in (
        (whole, "parts", "in 2 model-parallel parts, but this one has 1"),
        (parts, "whole", "with the model-parallel size that saved it"),
    ):
        before = engine.state_dict()
        with pytest.raises(CheckpointError, match=told):
            engine.load_checkpoint(folder, tag)
        assert_equal(engine.state_dict(), before)
    parts.destroy(), whole.destroy()


def test_another_number_of_parts_is_refused_on_every_rank(ranks: RankPools, tmp_path: Path) -> None:
    ranks(4).run(change_the_parts, str(tmp_path))
