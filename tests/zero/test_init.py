"""zero.Init: created sharded, with the values that building outside gives."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from contracts.test_memory import held_nbytes
from engine.toys import TINY, assert_equal, engine_of, model_of, train
from ranks import RankPools, on_ranks
from torch import nn
from torch.nn.utils import parametrizations

import hadal
from hadal import comm, utils
from hadal.comm.pending import UnreadSends
from hadal.errors import (
    ConfigError,
    MismatchError,
    ModelError,
    NotBuiltYetError,
    ShardedAccessError,
    UsageError,
)
from hadal.zero import GatheredParameters, sharded_init
from hadal.zero.sharded_init import InitBucket


class Applied(nn.Module):
    """Initialises its children when they are all there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.scale = nn.Parameter(torch.ones(4))
        self.apply(self.start)

    def start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)
            module.weight.data[0].zero_()


class ByParent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 6)
        self.other = nn.Linear(6, 4)
        nn.init.xavier_uniform_(self.one.weight)
        nn.init.orthogonal_(self.other.weight, gain=0.5)
        with torch.no_grad():
            self.one.bias.copy_(self.one.weight.sum(1))
            self.other.bias[1:3] = 2.0
            self.other.weight.data *= 3.0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.copied = nn.Parameter(self.embedding.weight.detach().clone() * 2)
        nn.init.normal_(self.head.weight)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 3)  # copies the layer


def data_normal() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model[0].weight.data.normal_()
    model[1][0].bias.data.uniform_(-1, 1)
    return model


def data_assigned() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = torch.randn(4, 4)
    return model


def odd_shapes() -> nn.Module:
    module = nn.Module()
    module.scalar = nn.Parameter(torch.tensor(2.0))
    module.one = nn.Parameter(torch.ones(1))
    module.empty = nn.Parameter(torch.ones(0, 3))
    module.precise = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
    module.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    module.whole = nn.Parameter(torch.arange(4), requires_grad=False)
    return module


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.LSTM(3, 4, 2))


MODELS = [Applied, ByParent, Tied, encoder, data_normal, data_assigned, odd_shapes, convolution]


def built(make: Callable[[], nn.Module], context: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with context:
        return make()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with GatheredParameters(model.parameters()):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@on_ranks("world")
def test_start_weights_are_those_of_building_outside(make: Callable[[], nn.Module]) -> None:
    inside = built(make, hadal.zero.Init(), seed=11 + comm.get_rank())
    outside = built(make, contextlib.nullcontext(), seed=11)
    large = [p for p in inside.parameters() if p.is_floating_point() and p.numel() > 1]
    assert large
    for parameter in large:
        assert parameter.untyped_storage().nbytes() < parameter.numel() * parameter.itemsize or (
            bool(parameter.isnan().all())
        )
    names = [name for name, _ in inside.named_parameters()]
    assert names == [name for name, _ in outside.named_parameters()]  # ties are kept
    for mine, plain in zip(inside.parameters(), outside.parameters(), strict=True):
        assert (mine.shape, mine.dtype) == (plain.shape, plain.dtype)
        assert mine.requires_grad == plain.requires_grad
    parameters = dict(outside.named_parameters())
    found = values_of(inside)
    for name, value in parameters.items():
        assert torch.equal(found[name], value.detach()), name


@pytest.mark.claims("zero_optimization.override_module_apply")
@on_ranks(2)
def test_apply_finds_whole_weights_inside_init() -> None:
    """Functions given to `Module.apply` inside `Init` see whole values, asked for or not."""
    states = []
    for says in (True, False):
        config = {"zero_optimization": {"stage": 3, "override_module_apply": says}}
        model = built(Applied, hadal.zero.Init(config_dict_or_path=config), seed=11)
        engine, _, _, _ = hadal.initialize(
            model=model, config={"train_micro_batch_size_per_gpu": 1, **config}
        )
        states.append(engine.state_dict())
        engine.destroy()
    for name, value in built(Applied, contextlib.nullcontext(), seed=11).state_dict().items():
        assert torch.equal(states[0][name], value), name
        assert torch.equal(states[1][name], value), name


class Watched(nn.Module):
    """Notes how many bytes its parameters take while it is being built."""

    WIDTH, DEPTH = 64, 12

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.layers = nn.ModuleList()
        for _ in range(self.DEPTH):
            self.layers.append(nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH), nn.ReLU()))
            self.note()
        for layer in self.layers:
            nn.init.normal_(layer[0].weight)
        self.after = nbytes_of(self)

    def note(self) -> None:
        self.peak = max(self.peak, nbytes_of(self))


def nbytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameter storages, without gathering them."""
    with torch._C.DisableTorchFunction():
        storages = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
        return sum(p.untyped_storage().nbytes() for p in storages.values())


@on_ranks(2)
def test_no_more_than_a_few_modules_are_ever_whole() -> None:
    layer = 4 * (Watched.WIDTH**2 + Watched.WIDTH)
    with hadal.zero.Init():
        model = Watched()
    assert model.peak <= layer
    placeholders = 16 * Watched.DEPTH
    assert model.after <= 8 * layer + placeholders < Watched.DEPTH * layer
    assert nbytes_of(model) <= placeholders
    with hadal.zero.Init(enabled=False):
        assert nbytes_of(Watched()) >= Watched.DEPTH * layer


def is_cut(parameter: nn.Parameter) -> bool:
    return nbytes_of(nn.ParameterList([parameter])) < parameter.numel() * parameter.itemsize


@on_ranks(2)
def test_options() -> None:
    with hadal.zero.Init(dtype=torch.bfloat16):
        half = model_of()
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    expected = model_of().bfloat16()
    assert_equal(values_of(half), dict(expected.state_dict()))

    with hadal.zero.Init(enabled=False):
        plain = model_of()
    assert not any(is_cut(parameter) for parameter in plain.parameters())

    with hadal.zero.Init():
        with hadal.zero.Init():
            inner = model_of()
        outer = model_of()
    assert is_cut(inner[0].weight)
    assert is_cut(outer[0].weight)
    after = model_of()
    assert not is_cut(after[0].weight)

    existing = model_of()
    hadal.zero.Init(module=existing)
    assert is_cut(existing[0].weight)
    assert_equal(values_of(existing), dict(model_of().state_dict()))

    with pytest.raises(KeyError), hadal.zero.Init():
        raise KeyError("mine")
    assert not is_cut(model_of()[0].weight)

    for tier in ("cpu", "none", None):  # here all of them are where it computes
        with hadal.zero.Init(remote_device=tier, pin_memory=True):
            resting = model_of()
        assert is_cut(resting[0].weight)
    for option in ({"param_swapper": object()},):
        with pytest.raises(NotBuiltYetError, match=next(iter(option))):
            hadal.zero.Init(**option)
        hadal.zero.Init(enabled=False, **option)
    with pytest.raises(UsageError, match=r"offload_param\.nvme_path"):
        hadal.zero.Init(remote_device="nvme")
    nvme = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}}
    with pytest.raises(UsageError, match='pass remote_device="nvme", or leave it out'):
        hadal.zero.Init(remote_device="cpu", config=nvme)
    with pytest.raises(UsageError, match="expected None, 'none', 'cpu' or 'nvme'"):
        hadal.zero.Init(remote_device="disk")
    with pytest.raises(UsageError, match="config_dict_or_path and config, which are synonyms"):
        hadal.zero.Init(config={}, config_dict_or_path={})


@pytest.mark.fast_cells("1-bf16", "2-fp32", "3-fp32")
@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_it_trains_as_a_model_built_outside(stage: int, settings: dict[str, Any]) -> None:
    states = []
    for context in (hadal.zero.Init(), contextlib.nullcontext()):
        with context:
            model = model_of()
        engine = engine_of(stage, model, **settings)
        losses = train(engine, range(3))
        states.append({**engine.state_dict(), "losses": torch.stack(losses)})
        engine.destroy()
    assert_equal(*states)


class Built(nn.Module):
    """A block whose parts are created, and sharded, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(33, 31)
        self.other = nn.Linear(31, 20)


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize(("world", "zero"), [(2, {}), (3, {}), (4, {"mics_shard_size": 2})])
@on_ranks("world")
def test_ranks_receive_only_elements_of_their_new_shards(
    zero: dict[str, Any], cast: torch.dtype | None
) -> None:
    """Counts the elements that other ranks send to this one in `initialize`."""
    torch.manual_seed(0)
    with hadal.zero.Init():
        model = nn.ModuleList(Built() for _ in range(2))
    model = model.to(cast)
    received, exchange = [], sharded_init.start_exchange_in_pieces

    def counting(outgoing: Any, incoming: Any, like: Any, ranks: Any, label: str) -> Any:
        other = (one for r, pieces in incoming.items() if r != ranks.rank for one in pieces)
        received.extend(one.numel() for one in other)
        return exchange(outgoing, incoming, like, ranks, label)

    refused = AssertionError("gathers all")
    with (
        patch.object(sharded_init, "start_exchange_in_pieces", counting),
        patch.object(sharded_init, "start_all_gather", side_effect=refused),
    ):
        engine = engine_of(3, model, zero_optimization={**zero, "stage": 3, **WITHOUT_WHOLE})
    shards = sum(bucket.shard.numel() for bucket in engine._parts.runtime.buckets)
    assert 0 < sum(received) <= shards, (received, shards)
    torch.manual_seed(0)
    plain = nn.ModuleList(Built() for _ in range(2))
    assert_equal(engine.state_dict(), plain.to(cast).float().state_dict())
    engine.destroy()


WITHOUT_WHOLE = {"stage3_param_persistence_threshold": 0}


class Scaled(nn.Module):
    """A weight and a bias of one birth; the bias is trained beside a scale that was not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scales = nn.ParameterList([torch.ones(1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scales[0]


@on_ranks(2)
def test_parameters_of_one_birth_may_part_ways() -> None:
    states = []
    for context in (hadal.zero.Init(), contextlib.nullcontext()):
        torch.manual_seed(4)
        with context:
            model = nn.Sequential(Scaled(), Scaled())
        zero = {"stage": 3, "stage3_param_persistence_threshold": 10}
        engine = engine_of(3, model, zero_optimization=zero, bf16={"enabled": True})
        loss = engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
        states.append({**engine.state_dict(), "loss": loss.detach()})
        engine.destroy()
    assert_equal(*states)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_weights_may_be_tied_after_birth(stage: int) -> None:
    """A weight that another one replaces is dropped, as Hugging Face's tying does."""
    with hadal.zero.Init():
        model = nn.ModuleDict({"a": nn.Embedding(6, 6), "b": nn.Linear(6, 6, bias=False)})
    model["b"].weight = model["a"].weight
    engine = engine_of(
        stage, nn.Sequential(model["a"], model["b"]), zero_optimization={"stage": stage, **TINY}
    )
    for _ in range(2):
        engine.backward(engine(torch.arange(6)).square().mean())
        engine.step()
    state = engine.state_dict()
    assert torch.equal(state["0.weight"], state["1.weight"])
    engine.destroy()


# ---- GatheredParameters inside the context ----------------------------------------------------


class Started(nn.Module):
    """Initialises a layer inside `GatheredParameters`, beside a parameter of its own."""

    def __init__(self, layer: Callable[[], nn.Module], modifier: int | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 8))
        self.layer = layer()
        with GatheredParameters([self.layer.weight], modifier_rank=modifier):
            nn.init.normal_(self.layer.weight, std=0.02)
            self.layer.weight.data[1:3].mul_(2.0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("world", "modifier"), [(1, 0), (2, 0), (2, None)])
@on_ranks("world")
def test_children_may_be_gathered_and_initialised_inside(
    modifier: int | None, dtype: torch.dtype | None
) -> None:
    def make(layer: Callable[[], nn.Module]) -> nn.Module:
        model = nn.Sequential(
            Started(layer, modifier), *(layer() for _ in range(sharded_init._STAY_WHOLE))
        )
        for part in (*model[1:], model[0].layer):
            nn.init.normal_(part.weight)  # with the last one, more than stay gathered
        with GatheredParameters(model.parameters(), modifier_rank=modifier):
            for parameter in model.parameters():
                parameter.data.mul_(2.0)
        return model

    # Only the modifier's random numbers count; without one, all ranks make the same changes.
    seed = 11 + (0 if modifier is None else comm.get_rank())
    for layer in (lambda: nn.Linear(8, 8), lambda: nn.Embedding(9, 8), lambda: nn.LayerNorm(8)):
        inside = built(partial(make, layer), hadal.zero.Init(dtype=dtype), seed)
        outside = built(partial(make, layer), contextlib.nullcontext(), 11).to(dtype)
        assert all(is_cut(parameter) for parameter in inside.parameters())
        assert_equal(values_of(inside), dict(outside.state_dict()))


def older_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated
        return nn.utils.weight_norm(layer)


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "older weight_norm": older_weight_norm,
}


class Parametrized(nn.Module):
    def __init__(self, kind: str, where: str) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        torch.manual_seed(5)
        if where == "replaced":
            with GatheredParameters(self.layer.weight, modifier_rank=0):
                self.layer = PARAMETRIZED[kind](self.layer)
        elif where == "in place":
            with GatheredParameters(self.layer.weight):
                PARAMETRIZED[kind](self.layer)
        elif where == "bare":
            PARAMETRIZED[kind](self.layer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.tanh(self.layer(inputs)))
        return outputs


@pytest.mark.parametrize("kind", PARAMETRIZED)
@on_ranks(2)
def test_layers_may_be_parametrized(kind: str) -> None:
    states = []
    for where in ("outside", "replaced", "in place", "bare", "after"):
        context = contextlib.nullcontext() if where == "outside" else hadal.zero.Init()
        torch.manual_seed(2)
        with context:
            model = Parametrized(kind, "bare" if where == "outside" else where)
        if where == "after":
            torch.manual_seed(5)
            with GatheredParameters(model.layer.weight, modifier_rank=0):
                PARAMETRIZED[kind](model.layer)
        engine = engine_of(3, model)
        losses = train(engine, range(2))
        state = {**engine.state_dict(), "losses": torch.stack(losses)}
        states.append(dict(sorted(state.items())))
        engine.destroy()
    for found in states[1:]:
        assert_equal(found, states[0])


# ---- used before `initialize` -----------------------------------------------------------------


class Reader(nn.Module):
    """Reads a child's weight for its head; notes how much of it is in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.scale = nn.Parameter(torch.ones(6))
        self.largest = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) * self.scale
            self.largest = max(self.largest, nbytes_of(self))
        return torch.nn.functional.linear(hidden, self.embedding.weight)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world")
def test_a_model_may_be_called_before_initialize(dtype: torch.dtype | None) -> None:
    ids = torch.arange(8)
    for move in (nn.Module.train, nn.Module.half, nn.Module.float):
        inside = move(built(Reader, hadal.zero.Init(dtype=dtype), seed=4))
        plain = move(built(Reader, contextlib.nullcontext(), seed=4).to(dtype))
        with torch.no_grad():
            assert torch.equal(inside(ids), plain(ids))
            # The last layer, what the model itself reads, and placeholders.
            assert inside.largest < nbytes_of(plain) / 2
            # One of those that have been freed.
            assert torch.equal(inside.layers[0](plain.scale), plain.layers[0](plain.scale))
            with GatheredParameters(inside.scale, modifier_rank=0):
                inside.scale.mul_(2.0)
            plain.scale.mul_(2.0)
            assert torch.equal(inside(ids), plain(ids))
    engine = engine_of(3, inside)
    with torch.no_grad():
        assert torch.allclose(engine(ids), plain.float()(ids), atol=0 if dtype is None else 0.1)
    engine.destroy()


@on_ranks(2)
def test_gradients_before_initialize_are_right() -> None:
    inside = built(Reader, hadal.zero.Init(), seed=4)
    plain = built(Reader, contextlib.nullcontext(), seed=4)
    sharded_init.keeper._has_warned = False
    with patch.object(sharded_init._log, "warning") as warning:
        for model in (inside, plain):
            model(torch.arange(8)).square().mean().backward()
    (call,) = warning.call_args_list
    assert "call it under torch.no_grad()" in call.args[0]
    for (name, mine), other in zip(inside.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name


class Calling(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that a layer computes."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __len__(self) -> int:
        return 1

    @torch.no_grad()
    def __getitem__(self, index: int) -> torch.Tensor:
        result: torch.Tensor = self.layer(torch.ones(6, dtype=torch.bfloat16))
        return result


def refuse_before() -> list[str]:
    model = built(Reader, hadal.zero.Init(dtype=torch.bfloat16), seed=4)
    weight, layer = model.embedding.weight, model.layers[0]
    acts: list[Callable[[], object]] = [
        lambda: weight.sum(),
        lambda: torch.nn.functional.linear(torch.ones(1, 6, dtype=torch.bfloat16), weight),
        lambda: weight.data.float().norm(),
        lambda: weight.to(torch.float64).tolist(),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: copy.deepcopy(model.state_dict()),
        lambda: nn.init.normal_(layer.weight),
        lambda: layer.weight.data.zero_(),
    ]
    found = []
    for act in acts:
        with pytest.raises(ShardedAccessError) as caught:
            act()
        found.append(str(caught.value))
    # A worker process cannot take part in gathers.
    loader = torch.utils.data.DataLoader(Calling(layer), num_workers=1, timeout=60)
    with pytest.raises(ShardedAccessError, match=r"parameter Linear\[0\] was read"):
        list(loader)
    for text in (repr(weight), repr(weight.data)):
        assert "sharded over the ranks" in text
        assert "nan" not in text
    # The dtype or the shape of a placeholder is no value.
    assert torch.ones(2).to(weight).dtype == weight.to(torch.bfloat16).dtype == torch.bfloat16
    assert weight.type() == "torch.BFloat16Tensor"
    assert nn.functional.pad(weight.data, (0, 0)).shape == weight.shape
    return found


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        output: torch.Tensor = self.experts[index](inputs)
        return output


@on_ranks(2)
def test_ranks_that_differ_before_initialize_are_told() -> None:
    inside = built(Routed, hadal.zero.Init(), seed=4)
    plain = built(Routed, contextlib.nullcontext(), seed=4)
    rank, inputs = comm.get_rank(), torch.ones(2, 6)
    with torch.no_grad():
        with pytest.raises(MismatchError, match=r"Linear reads Linear before initialize, but rank"):
            inside(inputs, rank)
        with GatheredParameters(inside.parameters()):
            assert torch.equal(inside(inputs, rank), plain(inputs, rank))
        assert torch.equal(inside(inputs, 1), plain(inputs, 1))


def test_reads_before_initialize_outside_of_calls_are_errors(ranks: RankPools) -> None:
    for rank, told in enumerate(ranks(2).run(refuse_before)):
        for line in told[:-2]:
            assert line.startswith(f"rank {rank}: parameter ")
            assert "was read (" in line
            assert "hadal.zero.GatheredParameters([parameter])" in line
        for line in told[-2:]:
            assert f"rank {rank}: parameter Linear[0] was written to while" in line


# ---- the dtype ------------------------------------------------------------------------------


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 8.0}}


@pytest.mark.fast_cells("fp16")
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [(BF16, torch.bfloat16), (FP16, torch.float16)],
    ids=["bf16", "fp16"],
)
@on_ranks(2)
def test_the_configuration_gives_the_dtype(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Parameters say the configured dtype, and start training from the values as given."""
    outside = Applied()
    states = []
    for context in (hadal.zero.Init(config_dict_or_path=settings), contextlib.nullcontext()):
        torch.manual_seed(5)
        with context:
            model = Applied()
        if isinstance(context, hadal.zero.Init):
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert is_cut(model.layers[0].weight)
            assert_equal(
                values_of(model),
                {name: value.to(dtype) for name, value in plain_state(outside, 5).items()},
            )
            # An initialisation sees, and leaves, values as exact as outside.
            assert dtypes_in_apply(model) == {torch.float32}
        torch.manual_seed(6)
        model.apply(model.start)
        engine = engine_of(3, model, **settings)
        states.append({n: utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()})
        assert {p.dtype for p in model.parameters()} == {dtype}
        engine.destroy()
    assert_equal(*states)
    assert not torch.equal(states[0]["layers.0.weight"], states[0]["layers.0.weight"].to(dtype))


def dtypes_in_apply(model: nn.Module) -> set[torch.dtype]:
    seen: set[torch.dtype] = set()
    model.apply(lambda module: seen.update(p.data.dtype for p in module.parameters(recurse=False)))
    return seen


def plain_state(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return dict(type(model)().state_dict())


@on_ranks(2)
def test_writes_reach_the_exact_values() -> None:
    with hadal.zero.Init(dtype=torch.bfloat16):
        model = model_of()
    weight, first = model[0].weight, model_of()[0].weight.detach()
    with GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        assert torch.equal(weight, first.bfloat16())
        if comm.get_rank() == 1:
            weight[0] = 0.5
    engine = engine_of(3, model, **BF16)
    master = utils.safe_get_full_fp32_param(weight)
    assert bool((master[0] == 0.5).all())
    assert torch.equal(master[1:], first[1:])  # what was left alone stays exact
    engine.destroy()


@on_ranks(2)
def test_contexts_nest() -> None:
    """Modules belong to the innermost context that is enabled."""
    with hadal.zero.Init(dtype=torch.bfloat16):
        with hadal.zero.Init(dtype=torch.float16):
            inner = model_of()
        with hadal.zero.Init(enabled=False, dtype=torch.float64):
            outer = model_of()
    assert {p.dtype for p in inner.parameters()} == {torch.float16}
    assert {p.dtype for p in outer.parameters()} == {torch.bfloat16}
    autos = {"fp16": {"enabled": "auto"}, "zero_optimization": {"reduce_bucket_size": "auto"}}
    with hadal.zero.Init(config={**autos, "train_batch_size": "auto", "scheduler": {"type": "?"}}):
        plain = model_of()
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage"):
        hadal.zero.Init(config={"zero_optimization": {"stage": 7}})


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_initialize_may_be_called_inside(stage: int) -> None:
    """The context still holds the last few modules whole, and the engine takes them over."""
    with hadal.zero.Init():
        model = model_of()
        engine = engine_of(stage, model)
    steps = range(2)
    assert train(engine, steps) == train(engine_of(stage, model_of()), steps)


# ---- moved, cast or frozen before `initialize` ----------------------------------------------


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to(device)": lambda model: model.to("cpu"),
    "to(cpu:0)": lambda model: model.to(torch.device("cpu", 0)),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to(dtype, device)": lambda model: model.to(torch.device("cpu", 0), torch.bfloat16),
    "by layers": lambda model: [layer.double() for layer in model],
    "data": lambda model: [setattr(p, "data", p.data.bfloat16()) for p in model.parameters()],
    "double": lambda model: model.double(),
    "there and back": lambda model: model.to(torch.device("cpu", 0)).to("cpu"),
    "requires_grad_": lambda model: model[0].requires_grad_(False),
}


def move_before(move: str, settings: dict[str, Any]) -> None:
    """A model created sharded does as one that was built plainly and moved in the same way."""
    states, dtypes, trained = [], [], []
    for context in (hadal.zero.Init(), contextlib.nullcontext()):
        with context:
            model = model_of()
        MOVES[move](model)
        if isinstance(context, hadal.zero.Init):
            assert all(is_cut(p) or move == "data" for p in model.parameters())
            with GatheredParameters(model.parameters()):
                pass  # nor does a look from outside undo it
        given = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
        if isinstance(context, hadal.zero.Init):
            assert_equal(values_of(model), states_of_plain(move))
        engine = engine_of(3, model, **settings)
        losses = train(engine, range(3))
        masters = {n: utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
        whole = {n: v for n, v in masters.items() if v is not None}
        states.append({**engine.state_dict(), **whole, "losses": torch.stack(losses)})
        dtypes.append(given)
        trained.append({name: p.dtype for name, p in model.named_parameters()})
        engine.destroy()
    assert dtypes[0] == dtypes[1]
    assert trained[0] == trained[1]
    assert_equal(*states)


def states_of_plain(move: str) -> dict[str, torch.Tensor]:
    model = model_of()
    MOVES[move](model)
    return dict(model.state_dict())


@pytest.mark.fast_cells("1-bf16")
@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_it_may_be_moved_or_cast_before_initialize(
    world: int, settings: dict[str, Any], ranks: RankPools
) -> None:
    for move in MOVES:
        ranks(world).run(move_before, move, settings)


@on_ranks(2)
def test_values_stay_exact_where_only_the_place_changes() -> None:
    """A cast or move keeps the given values, beneath those that are shown."""
    for move, dtype in (("to(cpu:0)", torch.float32), ("half", torch.float16)):
        with hadal.zero.Init(dtype=torch.bfloat16):
            model = model_of()
        MOVES[move](model)
        engine = engine_of(3, model, **BF16)
        for name, value in model_of().state_dict().items():
            master = utils.safe_get_full_fp32_param(dict(model.named_parameters())[name])
            assert torch.equal(master, value.to(dtype).float()), (move, name)
        engine.destroy()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_values_that_would_be_lost_are_refused(dtype: torch.dtype | None) -> None:
    with hadal.zero.Init(dtype=dtype):
        model = model_of()
    model[3].weight.data = torch.ones(4, 9)
    with pytest.raises(
        ModelError, match=r"rank \d: parameter 3\.weight was created .*modifier_rank=0"
    ):
        engine_of(3, model)


# ---- from meta, and over some of the ranks --------------------------------------------------


def materialise(model: nn.Module) -> None:
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()


@pytest.mark.parametrize("where", ["inside", "assigned", "block by block"])
@on_ranks(2)
def test_models_on_meta_may_be_materialised(where: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9)))

    with torch.device("meta"):
        expected = make()
    torch.manual_seed(3)
    materialise(expected)
    torch.manual_seed(3)
    if where == "inside":
        with hadal.zero.Init():
            with torch.device("meta"):
                model = make()
            materialise(model)
    elif where == "assigned":
        with hadal.zero.Init(), torch.device("meta"):
            model = make()
        model.load_state_dict(expected.state_dict(), assign=True)
        hadal.zero.Init(module=model)
    else:
        with hadal.zero.Init(), torch.device("meta"):
            model = make()
        for block in model:
            materialise(block)
            hadal.zero.Init(module=block)
    assert all(is_cut(parameter) for parameter in model.parameters())
    assert_equal(values_of(model), dict(expected.state_dict()))
    engine = engine_of(3, model)
    assert_equal(engine.state_dict(), dict(expected.state_dict()))
    engine.destroy()


class Mpu:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group


@on_ranks(3)
def test_ranks_of_a_group() -> None:
    """Each group has a model of its own, cut over its ranks; its first rank's values count."""
    rank = comm.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = groups[rank // 2]
    for options in ({"data_parallel_group": mine}, {"mpu": Mpu(mine)}):
        torch.manual_seed(10 * (rank // 2) + rank)
        with hadal.zero.Init(**options):
            model = nn.Sequential(nn.Linear(6, 6))
        assert is_cut(model[0].weight)
        torch.manual_seed((0, 0, 12)[rank])
        assert_equal(values_of(model), dict(nn.Sequential(nn.Linear(6, 6)).state_dict()))
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


# ---- memory ---------------------------------------------------------------------------------


WIDTH, DEPTH = 128, 24


class Weighed(nn.Linear):
    """Notes what all tensors of this rank take, at the worst moment: before it is cut."""

    peak = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        Weighed.peak = max(Weighed.peak, held_nbytes())


def build_deep(sends: int, dtype: torch.dtype | None) -> tuple[int, int]:
    sharded_init.keeper.sends = UnreadSends(sends)
    gc.collect()
    already, Weighed.peak = held_nbytes(), 0
    with hadal.zero.Init(dtype=dtype):
        model = nn.Sequential(*(nn.Sequential(Weighed(), nn.ReLU()) for _ in range(DEPTH)))
    gc.collect()
    numel = sum(parameter.numel() for parameter in model.parameters())
    held = held_nbytes()
    del model
    gc.collect()
    assert numel == DEPTH * (WIDTH**2 + WIDTH)
    sharded_init.keeper.sends = UnreadSends(sharded_init.UNREAD_NBYTES)
    return Weighed.peak - already, held - already


@pytest.mark.fast_cells("2-dtype1")
@pytest.mark.parametrize(("layers_leaving", "dtype"), [(0, None), (2, torch.bfloat16)])
def test_the_peak_is_the_shards_and_the_largest_module(
    layers_leaving: int, dtype: torch.dtype | None, ranks: RankPools
) -> None:
    """And what rank 0 keeps for those that have not taken it yet; whatever dtype is shown."""
    layer = 4 * (WIDTH**2 + WIDTH)
    small = 64 * 1024  # bytes: placeholders, the generator's state, padding
    sends = layers_leaving * layer
    for world in (2, 3):
        for peak, held in ranks(world).run(build_deep, sends, dtype):
            shards = DEPTH * layer / world
            assert shards <= held <= shards + small
            assert peak <= shards + layer + sends + small < DEPTH * layer


# ---- what is filled --------------------------------------------------------------------------


class Filled(nn.Module):
    """Initialised after its children are cut, by operations that need nothing of what was there."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.norm = nn.LayerNorm(3)
        first, second, third = self.layers
        nn.init.normal_(first.weight, std=0.3)
        nn.init.zeros_(first.bias)
        nn.init.kaiming_uniform_(second.weight)  # its bias stays what it was
        with torch.no_grad():
            third.weight.uniform_(-1, 1)
            if reads:
                third.weight.add_(third.bias[:, None])  # one of them has not been there so far
            self.norm.weight.copy_(torch.arange(3.0))
        nn.init.constant_(self.norm.bias, 2.0)


def fill(reads: bool, config: dict[str, Any] | None) -> None:
    """Compares the values with those of building outside; without `reads` nothing is gathered."""
    rank = comm.get_rank()
    torch.manual_seed(11 + rank)
    gathers = []
    begin = InitBucket.start_gather

    def counting(self: InitBucket, given: torch.Tensor) -> Any:
        gathers.append(self.name)
        return begin(self, given)

    with patch.object(InitBucket, "start_gather", counting), hadal.zero.Init(config=config):
        model = Filled(reads=reads)
    assert len(gathers) == reads
    after = torch.rand(1)
    torch.manual_seed(11 + rank)
    Filled(reads=reads)
    assert torch.equal(after, torch.rand(1))
    torch.manual_seed(11)
    wanted = Filled(reads=reads)
    with GatheredParameters(list(model.parameters())):
        for (name, value), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(value, other.to(value.dtype)), name


@pytest.mark.parametrize("reads", [False, True])
def test_what_is_filled_is_not_gathered(reads: bool, ranks: RankPools) -> None:
    bf16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    for config in (None, bf16):
        ranks(2).run(fill, reads, config)
