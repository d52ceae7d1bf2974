"""A program with every kind of ranks of Megatron-DeepSpeed trains as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compat.test_moe_clients import layered
from moe.test_training import global_name
from ranks import RankPools
from torch import Tensor, nn

import hadal
from engine.parts import (
    CLIP,
    PARTS,
    ROWS,
    TOKENS,
    Megatron,
    Part,
    engine_over,
    megatron,
    mine,
    sequences_of,
    sgd,
    whole_model,
)
from hadal import comm
from hadal.compat.install import alias
from hadal.plugins.pipeline import LayerSpec, PipelineModule, PipeModelDataParallelTopology
from hadal.utils import safe_get_full_fp32_param

STAGES = [0, 1, 2, 3]
_CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Kinds(Megatron):
    """Ranks by slice of layers (the nearest), by piece of a sequence, and by reader."""

    def __init__(self) -> None:
        slices, others = comm.Ranks.world().in_blocks(PARTS)
        sequence, data = others.in_blocks(2)
        super().__init__(data, slices)
        self._others, self._sequence = others, sequence

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        return self._sequence.group

    def get_sequence_parallel_world_size(self) -> int:
        return self._sequence.size

    def get_sequence_parallel_rank(self) -> int:
        return self._sequence.rank

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        return self._others.group

    def get_sequence_data_parallel_world_size(self) -> int:
        return self._others.size

    def get_sequence_data_parallel_rank(self) -> int:
        return self._others.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1


def train_pieces(stage: int) -> None:
    """Two slices of layers, two pieces of each sequence, and the readers that are left."""
    mpu = Kinds()
    part, piece = mpu.get_model_parallel_rank(), mpu.get_sequence_parallel_rank()
    reader, readers = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    engine = engine_over(
        stage,
        Part(part),
        wishes={"mpu": mpu, "optimizer": sgd},
        train_batch_size=2 * ROWS * readers,
    )
    assert engine.gradient_accumulation_steps() == 2
    assert engine.topology.sharding.size == 2 * readers
    place = slice(piece * TOKENS // 2, (piece + 1) * TOKENS // 2)
    norms = []
    for step in range(6):
        inputs, targets = sequences_of(step, reader)
        difference = engine(inputs[:, place]) - targets[:, place]
        # Its part of the loss of whole sequences: the parts of all pieces add up to it.
        engine.backward(difference.square().sum() / targets.numel())
        engine.step()
        if step % 2:
            norms.append(engine.get_global_grad_norm())
    model = whole_model()
    optimizer, wanted = sgd(model.parameters()), []
    for update in range(3):
        optimizer.zero_grad()
        for step in (2 * update, 2 * update + 1):
            for each in range(readers):
                inputs, targets = sequences_of(step, each)
                ((model(inputs) - targets).square().mean() / (2 * readers)).backward()
        wanted.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    assert wanted[0] > CLIP
    assert norms == pytest.approx(wanted, rel=1e-5)
    for name, parameter in engine.module.named_parameters():
        whole = model.get_parameter(name).detach()
        whole = mine(whole, part, _CUT[name]) if name in _CUT else whole
        torch.testing.assert_close(safe_get_full_fp32_param(parameter), whole, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("stage", STAGES)
def test_slices_and_pieces_train_as_one_process(stage: int, ranks: RankPools) -> None:
    ranks(4).run(train_pieces, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_slices_pieces_and_readers_train_as_one_process(stage: int, ranks: RankPools) -> None:
    ranks(8).run(train_pieces, stage)


def train_experts(stage: int) -> None:
    """The same with two experts behind the slices, each on every other rank of a slice."""
    mpu = Kinds()
    part, piece = mpu.get_model_parallel_rank(), mpu.get_sequence_parallel_rank()
    reader, readers = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    expert = mpu.get_sequence_data_parallel_rank() % 2
    model = layered(Part(part), 2, expert)
    split = alias("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
    engine = engine_over(
        stage,
        model,
        wishes={
            "mpu": mpu,
            "model_parameters": split({"params": list(model.parameters()), "name": "all"}),
            "optimizer": sgd,
        },
        train_batch_size=2 * ROWS * readers,
    )
    place = slice(piece * TOKENS // 2, (piece + 1) * TOKENS // 2)
    norms = []
    for step in range(6):
        inputs, targets = sequences_of(step, reader)
        outputs, _ = engine(inputs[:, place])
        engine.backward((outputs - targets[:, place]).square().sum() / targets.numel())
        engine.step()
        if step % 2:
            norms.append(engine.get_global_grad_norm())
    whole = layered(whole_model(), 1, 0)
    optimizer, wanted = sgd(whole.parameters()), []
    for update in range(3):
        optimizer.zero_grad()
        for step in (2 * update, 2 * update + 1):
            for each in range(readers):
                inputs, targets = sequences_of(step, each)
                outputs, _ = whole(inputs)
                ((outputs - targets).square().mean() / (2 * readers)).backward()
        wanted.append(float(nn.utils.clip_grad_norm_(whole.parameters(), CLIP)))
        optimizer.step()
    assert wanted[0] > CLIP
    assert norms == pytest.approx(wanted, rel=1e-5)
    for name, parameter in engine.module.named_parameters():
        value, cut = whole.get_parameter(global_name(name, expert, 1)).detach(), name[6:]
        value = mine(value, part, _CUT[cut]) if cut in _CUT else value
        torch.testing.assert_close(safe_get_full_fp32_param(parameter), value, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_experts_with_them_train_as_one_process(stage: int, world: int, ranks: RankPools) -> None:
    ranks(world).run(train_experts, stage)


class Residual(nn.Module):
    """A block around its input; one slice of it on each rank of a layer."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, values: Tensor) -> Tensor:
        return values + self.block(values)


class Sliced(Residual):
    def __init__(self) -> None:
        super().__init__(Part(comm.get_rank() % PARTS))


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def train_stages(stage: int) -> None:
    """Two stages of two layers each, whose slices are the program's own, and the readers left."""
    megatron()  # the groups of slices, made by all ranks together before any computes
    readers = comm.get_world_size() // (2 * PARTS)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=PARTS, num_dp=readers)
    module = PipelineModule(
        [LayerSpec(Sliced) for _ in range(4)], topology=topology, loss_fn=mean_square
    )
    engine, *_ = hadal.initialize(
        model=module,
        optimizer=sgd,
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
        },
    )
    grid = engine.grid
    reader = grid.get_data_parallel_rank()
    assert grid.get_slice_parallel_rank() == comm.get_rank() % PARTS
    assert grid.get_model_parallel_world_size() == 2 * PARTS
    losses, norms = [], []
    for update in range(3):
        steps = (2 * update, 2 * update + 1)
        losses.append(float(engine.train_batch(iter([sequences_of(s, reader) for s in steps]))))
        norms.append(float(engine.get_global_grad_norm()))
    model = nn.Sequential(*(Residual(whole_model()) for _ in range(4)))
    optimizer, wanted, wanted_norms = sgd(model.parameters()), [], []
    for update in range(3):
        optimizer.zero_grad()
        found = [
            mean_square(model(inputs), targets)
            for step in (2 * update, 2 * update + 1)
            for inputs, targets in (sequences_of(step, each) for each in range(readers))
        ]
        loss = torch.stack(found).mean()
        loss.backward()
        wanted.append(loss.item())
        wanted_norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    assert wanted_norms[0] > CLIP
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert norms == pytest.approx(wanted_norms, rel=1e-5)
    for name, parameter in engine.module.named_parameters():
        cut = name.partition(".block.")[2]
        whole = model.get_parameter(name).detach()
        whole = mine(whole, comm.get_rank() % PARTS, _CUT[cut]) if cut in _CUT else whole
        torch.testing.assert_close(safe_get_full_fp32_param(parameter), whole, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.fast_cells("0")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_slices_in_stages_train_as_one_process(stage: int, ranks: RankPools) -> None:
    ranks(4).run(train_stages, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_slices_in_stages_of_readers_train_as_one_process(stage: int, ranks: RankPools) -> None:
    ranks(8).run(train_stages, stage)
