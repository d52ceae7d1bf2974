"""Which ranks share what: sequences, and the parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hadal
from engine.toys import TINY, assert_close, engine_of
from hadal import comm
from hadal.errors import ConfigError, MismatchError, UsageError

STAGES = [0, 1, 2, 3]
ROWS, TOKENS, WIDTH = 2, 5, 6
CLIP = 0.1


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """A factor in the gradient is a factor in its step, unlike Adam's."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


# ---- ranks that share a sequence ----------------------------------------------------------------


def tokens_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, WIDTH))


def sequences_of(step: int, reader: int) -> tuple[Tensor, Tensor]:
    """Whole sequences of one data-parallel reader: (rows, tokens, width), and their targets."""
    generator = torch.Generator().manual_seed(100 * step + reader)
    shape = (ROWS, TOKENS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


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
    """What a Ulysses-only model-parallel unit offers."""

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
    if way == "key":
        keys = {"sequence_parallel_size": shared, "data_parallel_size": readers}
    elif way == "mesh_param":
        wishes["mesh_param"] = (readers, shared)
    else:
        wishes["mpu"] = Ulysses(shared)
    engine = engine_of(
        stage,
        tokens_model(),
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


# ---- parts of a model ---------------------------------------------------------------------------

HIDDEN, PARTS = 8, 2


@cache
def megatron() -> Any:
    """Four ranks: 0 and 1 hold a model in two parts, 2 and 3 hold it again."""
    model, data = comm.Ranks.world().in_blocks(PARTS)
    return Megatron(data, model)


class Megatron:
    """What Megatron's parallel state offers: exactly these six methods."""

    def __init__(self, data: comm.Ranks, model: comm.Ranks) -> None:
        self._data, self._model = data, model

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data.group

    def get_data_parallel_world_size(self) -> int:
        return self._data.size

    def get_data_parallel_rank(self) -> int:
        return self._data.rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model.group

    def get_model_parallel_world_size(self) -> int:
        return self._model.size

    def get_model_parallel_rank(self) -> int:
        return self._model.rank


class Copied(torch.autograd.Function):
    """Into the parts: the gradients of all parts add up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=megatron().get_model_parallel_group())
        return gradient


class Summed(torch.autograd.Function):
    """Out of the parts: their values add up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=megatron().get_model_parallel_group())
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(values))))


def whole_model() -> Whole:
    torch.manual_seed(6)
    return Whole()


class Part(nn.Module):
    """One part of `Whole`: some rows of `up`, the columns of `down` that belong to them."""

    def __init__(self, part: int) -> None:
        super().__init__()
        whole = whole_model()
        mine = slice(part * HIDDEN // PARTS, (part + 1) * HIDDEN // PARTS)
        self.norm = whole.norm
        self.up = nn.Parameter(whole.up.weight.detach()[mine].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach()[mine].clone())
        self.down = nn.Parameter(whole.down.weight.detach()[:, mine].clone())
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        self.up.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.up_bias.model_parallel = True  # type: ignore[attr-defined]
        self.down.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.bias.tensor_model_parallel = False  # type: ignore[attr-defined]

    def forward(self, values: Tensor) -> Tensor:
        values = Copied.apply(self.norm(values))
        hidden = torch.tanh(nn.functional.linear(values, self.up, self.up_bias))
        return Summed.apply(nn.functional.linear(hidden, self.down)) + self.bias


def part_of(state: dict[str, Tensor], part: int) -> dict[str, Tensor]:
    mine = slice(part * HIDDEN // PARTS, (part + 1) * HIDDEN // PARTS)
    return {
        "up": state["up.weight"][mine],
        "up_bias": state["up.bias"][mine],
        "down": state["down.weight"][:, mine],
        "bias": state["down.bias"],
        "norm.weight": state["norm.weight"],
        "norm.bias": state["norm.bias"],
    }


def engine_over(stage: int, model: nn.Module, **changes: Any) -> Any:
    wishes = {"mpu": megatron(), **changes.pop("wishes", {"optimizer": sgd})}
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "optimizer": None,
        # Two data-parallel ranks take part in it, so that a whole of 4 is seen to be wrong.
        "train_batch_size": ROWS * 2 * 2,
        **changes,
    }
    return engine_of(stage, model, wishes, **settings)


def train_parts(stage: int, born: bool) -> None:
    data, part = comm.get_rank() // PARTS, comm.get_rank() % PARTS
    if born:
        with hadal.zero.Init(mpu=megatron()):
            model = Part(part)
    else:
        model = Part(part)
        if data == 1:
            # The first data-parallel rank's values are given to the others.
            nn.init.zeros_(model.up)
            nn.init.zeros_(model.norm.weight)
    engine = engine_over(stage, model)
    assert engine.gradient_accumulation_steps() == 2
    assert engine.topology.sharding.numbers == (part, part + PARTS)
    assert engine.topology.model_parallel_size == PARTS
    norms = []
    for step in range(6):
        inputs, targets = sequences_of(step, data)
        engine.backward((engine(inputs) - targets).square().mean())
        engine.step()
        if step % 2:
            norms.append(engine.get_global_grad_norm())
    plain, expected = whole_model(), []
    optimizer = sgd(plain.parameters())
    for update in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            for reader in range(2):
                inputs, targets = sequences_of(2 * update + micro, reader)
                ((plain(inputs) - targets).square().mean() / 4).backward()
        expected.append(float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP)))
        optimizer.step()
    assert expected[0] > CLIP
    assert norms == pytest.approx(expected, rel=1e-5)
    found, wanted = engine.state_dict(), part_of(dict(plain.state_dict()), part)
    assert_close({name: found[name] for name in wanted}, wanted)
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("born", [False, True], ids=["given", "born sharded"])
def test_parts_of_a_model_train_like_the_whole(stage: int, born: bool, ranks: RankPools) -> None:
    ranks(4).run(train_parts, stage, born)


def overflow_in_one_part(stage: int, is_marked: bool) -> None:
    part = comm.get_rank() % PARTS
    engine = engine_over(
        stage, Part(part), fp16={"enabled": True, "loss_scale": 1.0}, gradient_clipping=0.0
    )
    before = engine.state_dict()
    for _ in range(2):
        loss = engine(torch.ones(ROWS, WIDTH, dtype=torch.float16)).float().mean()
        # The norm counts what is not marked as a part on the first rank alone.
        parameter = engine.module.up if is_marked else engine.module.bias
        with hadal.zero.GatheredParameters(parameter):
            blown = parameter.float().sum() * torch.inf
        engine.backward(loss + blown if part == 1 else loss)
        engine.step()
    assert engine.overflow
    assert engine.skipped_steps == 1
    for name, value in engine.state_dict().items():
        assert torch.equal(value, before[name])
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "not marked"])
def test_what_overflows_in_one_part_is_skipped_in_all(
    stage: int, is_marked: bool, ranks: RankPools
) -> None:
    ranks(4).run(overflow_in_one_part, stage, is_marked)


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
        (mpu_and_mesh, UsageError, "give one"),
        (keys_against_the_mpu, ConfigError, "sequence_parallel_size"),
        (sizes_against_the_mpu, ConfigError, "5 is no multiple of 3 per device x 2 ranks"),
        (different_sizes, MismatchError, "different groupings"),
        (born_over_all, UsageError, "give hadal.zero.Init the mpu="),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_groups_that_cannot_be(
    mistake: Callable[[], None], kind: type[Exception], told: str, ranks: RankPools
) -> None:
    for error in ranks(4).raises(mistake):
        assert isinstance(error, kind), repr(error)
        assert told in str(error)


def modify_beyond() -> None:
    engine = engine_over(3, Part(comm.get_rank() % PARTS))
    with pytest.raises(UsageError, match=r"expected 0\.\.1"):
        hadal.zero.GatheredParameters(engine.module.up, modifier_rank=2)
    with hadal.zero.GatheredParameters(engine.module.up, modifier_rank=1), torch.no_grad():
        engine.module.up.fill_(comm.get_rank())
    # Rank 1 of those that share the first part is rank 2 of the world.
    assert bool((engine.state_dict()["up"] == 2 + comm.get_rank() % PARTS).all())
    engine.destroy()


def test_a_modifier_is_one_of_those_that_share_a_part(ranks: RankPools) -> None:
    assert TINY["stage3_param_persistence_threshold"] == 0
    ranks(4).run(modify_beyond)
