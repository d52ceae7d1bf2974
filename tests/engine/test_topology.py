"""Which ranks share sequences, and which groupings cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools
from torch import nn
from torch.utils.data import TensorDataset

import hadal
from engine.parts import (
    CLIP,
    PARTS,
    ROWS,
    TOKENS,
    WIDTH,
    Megatron,
    Part,
    core,
    megatron,
    sequences_of,
    sgd,
)
from engine.toys import assert_close, engine_of
from hadal import comm
from hadal.config import load_config
from hadal.engine.topology import communicators_of
from hadal.errors import ConfigError, MismatchError, NotBuiltYetError, UsageError

STAGES = [0, 1, 2, 3]

# ---- ranks that share a sequence ----------------------------------------------------------------


def tokens_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, WIDTH))


def train_alone(readers: int, accumulation: int, updates: int) -> tuple[nn.Module, list[float]]:
    """One process on whole sequences: the mean over everything, clipped."""
    model = tokens_model()
    optimizer, norms = sgd(model.parameters()), []
    for update in range(updates):
        optimizer.zero_grad()
        for micro in range(accumulation):
            for reader in range(readers):
                inputs, targets = sequences_of(accumulation * update + micro, reader)
                loss = (model(inputs) - targets).square().mean()
                (loss / (readers * accumulation)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return model, norms


class Ulysses:
    """The interface of a Ulysses-only model-parallel unit."""

    def __init__(self, size: int) -> None:
        self._ranks, _ = comm.Ranks.world().in_blocks(size)

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        return self._ranks.group

    def get_sequence_parallel_world_size(self) -> int:
        return self._ranks.size

    def get_sequence_parallel_rank(self) -> int:
        return self._ranks.rank


def cut_sequences(stage: int, shared: int, way: str) -> None:
    world, rank = comm.get_world_size(), comm.get_rank()
    readers, reader, place = world // shared, rank // shared, rank % shared
    wishes: dict[str, Any] = {"optimizer": sgd}
    keys: dict[str, Any] = {}
    model = tokens_model()
    if way == "key":
        keys = {"sequence_parallel_size": shared, "data_parallel_size": readers}
    elif way == "mesh_param":
        wishes["mesh_param"] = (readers, shared)
    else:
        wishes["mpu"] = Ulysses(shared)
        with hadal.zero.Init(mpu=wishes["mpu"]):
            model = tokens_model()
    engine = engine_of(
        stage,
        model,
        wishes,
        optimizer=None,
        gradient_clipping=CLIP,
        gradient_accumulation_steps=2,
        train_micro_batch_size_per_gpu=ROWS,
        **keys,
    )
    assert engine.train_batch_size() == ROWS * 2 * readers
    topology = engine.topology
    assert topology.sharding.size == world
    assert topology.sequence_parallel.numbers == tuple(
        range(reader * shared, (reader + 1) * shared)
    )
    assert topology.data_parallel.numbers == tuple(range(place, world, shared))
    norms = []
    for step in range(6):
        inputs, targets = sequences_of(step, reader)
        mine = slice(place * TOKENS // shared, (place + 1) * TOKENS // shared)
        difference = engine(inputs[:, mine]) - targets[:, mine]
        # My part of the loss of whole sequences: the parts of all ranks add up to it.
        engine.backward(difference.square().sum() / targets.numel())
        engine.step()
        if step % 2:
            norms.append(engine.get_global_grad_norm())
    plain, expected = train_alone(readers, 2, 3)
    assert expected[0] > CLIP
    assert norms == pytest.approx(expected, rel=1e-5)
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    assert engine.global_samples == 3 * engine.train_batch_size()
    engine.destroy()


@pytest.mark.fast_cells("2-2-key-0", "2-2-key-1", "2-2-key-2")
@pytest.mark.claims("sequence_parallel_size", "data_parallel_size", "train_batch_size")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("world", "shared", "way"),
    [(2, 2, "key"), (4, 2, "mesh_param"), (4, 4, "mpu"), (4, 2, "key")],
)
def test_parts_of_a_sequence_train_like_the_whole(
    stage: int, world: int, shared: int, way: str, ranks: RankPools
) -> None:
    ranks(world).run(cut_sequences, stage, shared, way)


def read(shared: int) -> list[int]:
    data = TensorDataset(torch.arange(12), torch.randn(12, WIDTH))
    engine = engine_of(
        1,
        tokens_model(),
        {"training_data": data},
        sequence_parallel_size=shared,
        train_micro_batch_size_per_gpu=2,
    )
    taken = [n for numbers, _ in engine.training_dataloader for n in numbers.tolist()]
    engine.destroy()
    return taken


@pytest.mark.claims("sequence_parallel_size")
def test_ranks_of_one_sequence_read_the_same_samples(ranks: RankPools) -> None:
    first, second, third, fourth = ranks(4).run(read, 2)
    assert first == second
    assert third == fourth
    assert sorted(first + third) == list(range(12))


# ---- what is refused ----------------------------------------------------------------------------


def without_a_method() -> None:
    class Lame(Megatron):
        get_data_parallel_rank = None
        get_model_parallel_group = None

    engine_of(1, wishes={"mpu": Lame(*vars(megatron()).values())})


def nothing_known() -> None:
    engine_of(1, wishes={"mpu": object()})


def of_another_size() -> None:
    class Large(Megatron):
        def get_model_parallel_world_size(self) -> int:
            return 3

    engine_of(1, wishes={"mpu": Large(*vars(megatron()).values())})


def mesh_of_another_size() -> None:
    engine_of(1, wishes={"mesh_param": (4, 2)})


def mesh_of_one_size() -> None:
    engine_of(1, wishes={"mesh_param": 4})


def mpu_and_mesh() -> None:
    engine_of(1, wishes={"mpu": megatron(), "mesh_param": (2, 2)})


def keys_against_the_mpu() -> None:
    engine_of(1, wishes={"mpu": megatron()}, sequence_parallel_size=2)


def sizes_against_the_mpu() -> None:
    engine_of(1, wishes={"mpu": megatron()}, train_batch_size=5)


def with_stages() -> None:
    engine_of(1, wishes={"mpu": core(pipeline_model_parallel=2)})


def with_contexts() -> None:
    engine_of(1, wishes={"mpu": core(context_parallel=2)})


def of_other_ranks() -> None:
    class Moved(Megatron):
        def get_data_parallel_rank(self) -> int:
            return 1 - self._data.rank

    engine_of(1, wishes={"mpu": Moved(*vars(megatron()).values())})


def other_keys_in_one_part() -> None:
    model = Part(comm.get_rank() % PARTS)
    engine_of(1, model, {"mpu": megatron()}, gradient_clipping=0.5 + comm.get_rank() % PARTS)


def wrong_in_one_part() -> None:
    model = Part(comm.get_rank() % PARTS)
    if comm.get_rank() == 3:
        model.extra = nn.Parameter(torch.ones(3))
    engine_of(1, model, {"mpu": megatron()})


def different_sizes() -> None:
    engine_of(1, sequence_parallel_size=1 + comm.get_rank() // 2)


def born_over_all() -> None:
    with hadal.zero.Init():
        model = Part(comm.get_rank() % PARTS)
    engine_of(3, model, {"mpu": megatron()})


@pytest.mark.parametrize(
    ("mistake", "kind", "told"),
    [
        (without_a_method, UsageError, "get_data_parallel_rank, get_model_parallel_group"),
        (nothing_known, UsageError, "get_data_parallel_group, get_data_parallel_world_size"),
        (of_another_size, UsageError, "3 model-parallel ranks are 6, and there are 4"),
        (mesh_of_another_size, UsageError, "whose product is the 4 ranks"),
        (mesh_of_one_size, UsageError, "expected (data_parallel, sequence_parallel)"),
        (mpu_and_mesh, UsageError, "pass one"),
        (keys_against_the_mpu, ConfigError, "sequence_parallel_size"),
        (sizes_against_the_mpu, ConfigError, "5 is not divisible by 3 (micro-batch) x 2 ranks"),
        (with_stages, UsageError, "get_pipeline_model_parallel_group"),
        (with_contexts, NotBuiltYetError, "get_context_parallel_world_size() is 2"),
        (of_other_ranks, UsageError, "but get_data_parallel_rank() and _world_size() report rank"),
        (other_keys_in_one_part, MismatchError, "0.5 on rank 0 and 1.5 on rank 1"),
        (wrong_in_one_part, MismatchError, "extra is nothing on rank 1 and (3,)"),
        (different_sizes, MismatchError, "different groupings"),
        (born_over_all, UsageError, "pass hadal.zero.Init the same mpu="),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_groups_that_cannot_be(
    mistake: Callable[[], None], kind: type[Exception], told: str, ranks: RankPools
) -> None:
    for error in ranks(4).raises(mistake):
        assert isinstance(error, kind), repr(error)
        assert told in str(error)


def test_communicators_of_ranks_that_do_not_exist() -> None:
    """tests/npu/test_memory.py compares what four ranks really use."""

    def purposes(experts: tuple[int, ...] = (), **sections: Any) -> dict[str, int]:
        raw = {"train_micro_batch_size_per_gpu": 1, **sections}
        found = communicators_of(load_config(raw, world_size=64), 64, 8, experts)
        return {one.purpose: one.ranks for one in found}

    def at_stage_3(**keys: Any) -> dict[str, Any]:
        return {"zero_optimization": {"stage": 3, **keys}}

    assert purposes() == {"all ranks": 64}
    assert purposes(**at_stage_3()) == {"all ranks": 64, "reductions": 64}
    hops = at_stage_3(mics_shard_size=16, mics_hierarchical_params_gather=True)
    assert purposes(**hops) == {
        "all ranks": 64,
        "one copy": 16,
        "the same shard": 4,
        "reductions": 16,
        "gathers inside nodes": 8,
        "gathers across nodes": 2,
    }
    coded = purposes(**at_stage_3(zero_quantized_gradients=True, zero_hpz_partition_size=8))
    assert [*coded] == [
        "all ranks",
        "the second copy",
        "reductions",
        "coded gradients inside nodes",
        "coded gradients across nodes",
    ]
    parts = purposes((1, 4), tensor_parallel={"autotp_size": 2}, zero_optimization={"stage": 1})
    assert parts == {
        "all ranks": 64,
        "slices of layers": 2,
        "the same parameters": 32,
        "tokens to experts": 4,
        "the same experts": 8,
    }
