"""Parameters of other strides than contiguous ones keep them: those in channels_last, say."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from cases import every
from engine.toys import TINY, assert_equal, engine_of
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from hadal import comm, utils
from hadal.errors import MismatchError, ModelError
from hadal.optim.elementwise import UncorrectedAdam
from hadal.optim.lamb import Lamb
from hadal.optim.lion import Lion
from hadal.zero.place import place_of

BF16 = {"bf16": {"enabled": True}}
LAST = torch.channels_last


class Turned(nn.Module):
    """A linear layer whose weight lies column by column, and a table that does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 7).t())
        self.table = nn.Embedding(5, 7)
        self.table.weight = nn.Parameter(torch.randn(7, 5).t())

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.table(torch.arange(len(inputs)) % 5)
        return inputs.mean((2, 3)) @ self.weight.t() + rows


def net(memory_format: torch.memory_format = LAST) -> nn.Sequential:
    """With a depthwise and a 1x1 convolution, whose strides are those of two formats."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 1, bias=False),
        Turned(),
        nn.Linear(7, 2),
    )
    if memory_format is not LAST:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.contiguous()
    return model.to(memory_format=memory_format)


def batch(step: int) -> Tensor:
    """The same for every rank, and so few values that sums of gradients are exact enough."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=LAST)


def loss_of(model: Any, step: int) -> Tensor:
    return model(batch(step).to(next(model.parameters()).dtype)).float().square().mean()


def train(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(loss_of(engine, step))
        engine.step()


def trained_alone(steps: range) -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return dict(model.state_dict())


def strides_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: parameter.stride() for name, parameter in model.named_parameters()}


def watched(model: nn.Sequential, strides: dict[str, tuple[int, ...]]) -> list[str]:
    """Compare strides whenever a module runs and a gradient comes; names of what has come."""
    came: list[str] = []

    def ran(module: nn.Module, _: Any, output: Tensor) -> None:
        for name, parameter in model.named_parameters():
            if any(parameter is own for own in module.parameters(recurse=False)):
                assert parameter.stride() == strides[name]
        if isinstance(module, nn.Conv2d):
            assert output.is_contiguous(memory_format=LAST)

    def brought(name: str, parameter: nn.Parameter) -> None:
        came.append(name)
        gradient = parameter.grad
        is_table = "table" in name  # torch makes those of tables row by row
        long = [dim for dim, length in enumerate(gradient.shape) if length > 1]
        found = [gradient.stride(dim) for dim in long]
        assert is_table or found == [strides[name][dim] for dim in long], name

    for module in model.modules():
        module.register_forward_hook(ran)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: brought(name, p))
    return came


@pytest.mark.fast_cells("2-fp32")
@pytest.mark.parametrize("settings", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world")
def test_training_keeps_strides(settings: dict[str, Any]) -> None:
    """The same bits at every stage, and gradients come as their places lie."""
    expected = trained_alone(range(3))
    first: dict[str, Tensor] = {}
    for stage in range(4):
        model = net()
        strides = strides_of(model)
        assert strides["0.weight"] == (27, 1, 9, 3)
        assert strides["2.weight"] == (9, 1, 3, 1)
        assert strides["3.weight"] == (8, 1, 8, 8)
        assert strides["4.weight"] == (1, 7)
        came = watched(model, strides)
        engine = engine_of(stage, model, **settings)
        train(engine, range(3))
        assert set(came) == set(strides)
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        first = first or state
        assert_equal(state, first)
        if not settings:
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        engine.destroy()
        assert strides_of(model) == strides
        assert_equal({**model.state_dict()}, first)


# ---- one parameter -------------------------------------------------------------------------------


class WholeAdam(torch.optim.AdamW):
    """Adam of a name that is not known to be elementwise: it gets whole parameters."""


def whole_adam(group: Any) -> WholeAdam:
    return WholeAdam(group, lr=0.01, weight_decay=0.0)


def engine(stage: int, whole: bool, model: nn.Module | None = None, **settings: Any) -> Any:
    model = net() if model is None else model
    if not whole:
        return engine_of(stage, model, **settings)
    return engine_of(stage, model, {"optimizer": whole_adam}, optimizer=None, **settings)


@pytest.mark.fast_cells("3-True")
@every(stage=range(4), whole=[False, True])
@on_ranks(2)
def test_access_gives_logical_values(stage: int, whole: bool) -> None:
    world = comm.get_world_size()
    trained = engine(stage, whole)
    plain = net()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    loss_of(plain, 0).backward()
    trained.backward(loss_of(trained, 0))
    pairs = list(zip(trained.module.parameters(), plain.parameters(), strict=True))
    for mine, other in pairs:
        assert torch.equal(utils.safe_get_full_fp32_param(mine), other)
        full = utils.safe_get_full_grad(mine)
        torch.testing.assert_close(full, other.grad)
        utils.safe_set_full_grad(mine, full * 2)
        assert torch.equal(utils.safe_get_full_grad(mine), full * 2)
        other.grad.copy_(full * 2)
        local = utils.safe_get_local_grad(mine)
        utils.safe_set_local_grad(mine, local)
        assert torch.equal(utils.safe_get_full_grad(mine), full * 2)
    adam.step()
    trained.step()
    for mine, other in pairs:
        torch.testing.assert_close(utils.safe_get_full_fp32_param(mine), other.detach())
        for key in ("exp_avg", "exp_avg_sq"):
            state = utils.safe_get_full_optimizer_state(mine, key)
            torch.testing.assert_close(state, adam.state[other][key])
            new = torch.arange(float(state.numel())).view(state.shape)
            utils.safe_set_full_optimizer_state(mine, new, key)
            assert torch.equal(utils.safe_get_full_optimizer_state(mine, key), new)
            local = utils.safe_get_local_optimizer_state(mine, key)
            utils.safe_set_local_optimizer_state(mine, local, key)
            assert torch.equal(utils.safe_get_full_optimizer_state(mine, key), new)
        new = torch.arange(float(other.numel())).view(other.shape)
        utils.safe_set_full_fp32_param(mine, new)
        utils.safe_set_local_fp32_param(mine, utils.safe_get_local_fp32_param(mine))
        assert torch.equal(utils.safe_get_full_fp32_param(mine), new)
        with hadal.zero.GatheredParameters([mine]):
            assert torch.equal(mine, new)
            assert mine.stride() == other.stride()
        place = place_of(mine)
        parts = comm.collectives.gather_objects(
            utils.safe_get_local_fp32_param(mine), comm.Ranks.world()
        )
        joined = torch.cat(parts if place.is_cut else parts[:1])
        in_memory = new.permute(place.slot.order or tuple(range(new.dim()))).reshape(-1)
        assert torch.equal(joined, in_memory) or world == 1
    trained.destroy()


# ---- created sharded -----------------------------------------------------------------------------


@pytest.mark.fast_cells("built")
@pytest.mark.parametrize("where", ["built", "inside", "outside", "gathered"])
@on_ranks(2)
def test_models_born_sharded_may_be_converted(where: str) -> None:
    expected = trained_alone(range(2))
    config = {"zero_optimization": {"stage": 3, **TINY}}
    with hadal.zero.Init(config_dict_or_path=config):
        model = net(torch.contiguous_format) if where != "built" else net()
        if where == "inside":
            model = model.to(memory_format=LAST)
    if where == "outside":
        model = model.to(memory_format=LAST)
    if where == "gathered":
        with hadal.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            model = model.to(memory_format=LAST)
    trained = engine_of(3, model)
    train(trained, range(2))
    with hadal.zero.GatheredParameters(list(model.parameters())):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        convolutions = {name: model.get_parameter(f"{name}.weight") for name in "023"}
        wanted = {"0": (27, 1, 9, 3), "2": (9, 1, 3, 1), "3": (8, 1, 8, 8)}
        assert {name: p.stride() for name, p in convolutions.items()} == wanted
    trained.destroy()


# ---- beside training -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_copies_keep_strides(stage: int) -> None:
    trained = engine(stage, whole=False)
    weights = [trained.module[0].weight, trained.module[4].weight]
    with hadal.zero.GatheredParameters(weights):
        for weight in weights:
            for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
                assert torch.equal(copied, weight)
                assert copied.stride() == weight.stride()
    trained.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_what_is_trained_later_keeps_strides(stage: int) -> None:
    model = net()
    strides = strides_of(model)
    model[0].requires_grad_(False)
    trained = engine_of(stage, model)
    train(trained, range(1))
    model[0].requires_grad_(True)
    before = utils.safe_get_full_fp32_param(model[0].weight)
    trained.optimizer.add_param_group({"params": list(model[0].parameters())})
    assert torch.equal(utils.safe_get_full_fp32_param(model[0].weight), before)
    train(trained, range(1, 2))
    assert not torch.equal(utils.safe_get_full_fp32_param(model[0].weight), before)
    trained.destroy()
    assert strides_of(model) == strides


def rows() -> None:
    """A table whose rows do not lie in a row each."""
    states = []
    for sparse in (False, True):
        trained = engine_of(2, net(), sparse_gradients=sparse)
        train(trained, range(2))
        states.append({name: value.clone() for name, value in trained.state_dict().items()})
        trained.destroy()
    assert_equal(*states)


def test_gradients_of_tables_may_travel_as_rows(ranks: RankPools) -> None:
    ranks(2).run(rows)


@pytest.mark.parametrize("kind", [Lamb, Lion, UncorrectedAdam])
@pytest.mark.parametrize("is_like", [True, False], ids=["alike", "row by row"])
def test_optimizers_of_our_own_step_by_themselves(kind: Any, is_like: bool) -> None:
    found = []
    for memory_format in (torch.contiguous_format, LAST):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=memory_format))
        optimizer = kind([weight], lr=0.01)
        for _ in range(2):
            gradient = torch.randn(4, 3, 2, 2)
            weight.grad = gradient.contiguous(memory_format=memory_format) if is_like else gradient
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(found[0], found[1])


# ---- refused -------------------------------------------------------------------------------------


def one_weight(weight: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].weight = nn.Parameter(weight)
    return model


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4).expand(4, 4),
        torch.zeros(7).as_strided((4, 4), (1, 1)),
        torch.zeros(4, 8)[:, :4],
        torch.zeros(4, 8)[:, ::2],
    ],
    ids=["expanded", "overlapping", "cut", "spaced"],
)
def test_what_fills_no_memory_is_refused_by_name(weight: Tensor) -> None:
    model = one_weight(weight)
    with pytest.raises(ModelError, match=r"parameter 0\.weight of shape \(4, 4\) has strides") as e:
        engine_of(0, model)
    assert "parameter.data = parameter.contiguous()" in str(e.value)
    weight = model[0].weight
    weight.data = weight.contiguous()
    engine_of(0, model).destroy()


@on_ranks(2)
def test_strides_must_be_the_same_on_every_rank() -> None:
    weight = torch.arange(16.0).view(4, 4)
    with pytest.raises(MismatchError, match=r"0\.weight is .*strides \(1, 4\)"):
        engine_of(0, one_weight(weight if comm.get_rank() else weight.t()))
