"""Checkpoints of a model in model-parallel parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from engine.parts import (
    PARTS,
    ROWS,
    WIDTH,
    Part,
    core,
    engine_over,
    megatron,
    mine,
    sequences_of,
    whole_model,
)
from engine.toys import assert_equal
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from hadal import comm
from hadal.checkpoint.export import get_fp32_state_dict_from_zero_checkpoint
from hadal.errors import CheckpointError
from hadal.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from hadal.zero.boxes import Box

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


@pytest.mark.slow
@every(dtype=list(KEYS), stage=[0, 1, 2, 3])
def test_parts_go_on_bit_for_bit_and_load_with_fewer_replicas(
    stage: int, dtype: str, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(4).run(go_on, str(tmp_path), stage, dtype)
    ranks(2).run(load_with_fewer_replicas, str(tmp_path), (stage + 2) % 4, dtype)


class Named(nn.Module):
    """A part of `Whole` that says which boxes of its tensors it has, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Part(comm.get_rank() % PARTS)
        dims, whole = {"up.weight": 0, "up.bias": 0, "down.weight": 1}, whole_model().state_dict()
        for name, parameter in self.inner.named_parameters():
            shape = tuple(whole[name].shape)
            box = Box.whole(name, shape)
            if name in dims:
                box = Box.cut(name, shape, dims[name], comm.get_rank() % PARTS, PARTS)
            parameter.hadal_box = box  # type: ignore[attr-defined]

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.inner(values)
        return out


def named_engine(stage: int, dtype: str, **changes: Any) -> Any:
    wishes = {"mpu": core(), "optimizer": adam}
    return engine_over(stage, Named(), wishes=wishes, **KEYS[dtype], **changes)


def whole_engine(stage: int, dtype: str) -> Any:
    changes = {"train_batch_size": None, **KEYS[dtype]}
    return engine_over(stage, whole_model(), wishes={"mpu": None, "optimizer": adam}, **changes)


def all_of(engine: Any) -> dict[str, Tensor]:
    """Weights, masters and both moments of each parameter."""
    found: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        plain = name.removeprefix("inner.")
        found[plain] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{plain}.{key}"] = safe_get_full_optimizer_state(parameter, key)
    weights = {f"{n.removeprefix('inner.')}.weights": v for n, v in engine.state_dict().items()}
    return found | weights


def my_part(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    dims, part = {"up.weight": 0, "up.bias": 0, "down.weight": 1}, comm.get_rank() % PARTS
    found = {}
    for name, value in whole.items():
        of = ".".join(name.split(".")[:2])
        found[name] = mine(value, part, dims[of]) if of in dims else value
    return found


def save_in_parts(folder: str, stage: int, dtype: str) -> None:
    engine = named_engine(stage, dtype)
    train(engine, range(4))
    engine.save_checkpoint(folder, "parts", client_state={"epoch": 3})
    found = all_of(engine)
    if comm.get_rank() < PARTS:
        torch.save(found, Path(folder, f"part{comm.get_rank()}.pt"))
    engine.destroy()


def load_whole(folder: str, stage: int, dtype: str) -> None:
    engine = whole_engine(stage, dtype)
    _, client_state = engine.load_checkpoint(folder, "parts")
    assert client_state == {"epoch": 3} and engine.global_steps == 2
    found = all_of(engine)
    for part in range(PARTS):
        saved = torch.load(Path(folder, f"part{part}.pt"))
        dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        for name, value in saved.items():
            of = ".".join(name.split(".")[:2])
            here = mine(found[name], part, dims[of]) if of in dims else found[name]
            assert torch.equal(here, value), name
    train(engine, range(4, 6))
    engine.save_checkpoint(folder, "whole")
    found = all_of(engine)
    if comm.get_rank() == 0:
        torch.save(found, Path(folder, "whole.pt"))
    engine.destroy()


def load_in_parts(folder: str, stage: int, dtype: str) -> None:
    engine = named_engine(stage, dtype)
    engine.load_checkpoint(folder, "whole")
    assert_equal(all_of(engine), my_part(torch.load(Path(folder, "whole.pt"))))
    assert engine.global_steps == 4
    train(engine, range(6, 8))
    engine.destroy()


@pytest.mark.fast_cells("fp16-2")
@every(dtype=list(KEYS), stage=[0, 1, 2, 3])
def test_parts_in_boxes_load_whole_and_back(
    stage: int, dtype: str, ranks: RankPools, tmp_path: Path
) -> None:
    """Two parts on four ranks, the whole model on two, and two parts on four again."""
    ranks(4).run(save_in_parts, str(tmp_path), stage, dtype)
    ranks(2).run(load_whole, str(tmp_path), (stage + 1) % 4, dtype)
    ranks(4).run(load_in_parts, str(tmp_path), (stage + 2) % 4, dtype)
    exact = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "parts")
    assert exact.keys() == whole_model().state_dict().keys()
    for part in range(PARTS):
        saved = torch.load(tmp_path / f"part{part}.pt")
        of_part = mine(exact["down.weight"], part, 1)
        assert torch.equal(of_part, saved["down.weight"])


class Alone:
    """Process groups where every rank holds the whole model."""

    def __init__(self) -> None:
        self._world, (self._one, _) = comm.Ranks.world(), comm.Ranks.world().in_blocks(1)
        for kind, ranks in (("data", self._world), ("model", self._one)):
            setattr(self, f"get_{kind}_parallel_group", lambda ranks=ranks: ranks.group)
            setattr(self, f"get_{kind}_parallel_rank", lambda ranks=ranks: ranks.rank)
            setattr(self, f"get_{kind}_parallel_world_size", lambda ranks=ranks: ranks.size)


@on_ranks(4)
def test_another_number_of_parts_is_refused_on_every_rank(tmp_path: Path) -> None:
    parts = engine_over(1, Part(comm.get_rank() % PARTS), train_batch_size=None)
    whole = engine_over(1, nn.Linear(WIDTH, WIDTH), wishes={"mpu": Alone()}, train_batch_size=None)
    parts.save_checkpoint(tmp_path, "parts")
    whole.save_checkpoint(tmp_path, "whole")
    for engine, tag, told in (
        (whole, "parts", "in 2 model-parallel parts, but this one has 1"),
        (parts, "whole", "with the model-parallel size that saved it"),
    ):
        before = engine.state_dict()
        with pytest.raises(CheckpointError, match=told):
            engine.load_checkpoint(tmp_path, tag)
        assert_equal(engine.state_dict(), before)
    parts.destroy(), whole.destroy()
