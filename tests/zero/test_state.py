"""Masters, gradients and optimizer state of one parameter, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.toys import (
    alone,
    assert_close,
    backward,
    batch_of,
    engine_of,
    loss_of,
    model_of,
    train as train_engine,
)
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from hadal import comm, utils
from hadal.errors import UsageError
from hadal.zero import GatheredParameters

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 64.0}}
# The precision, and whether the optimizer gets whole parameters.
KINDS = [({}, True), (BF16, False)]


class WholeAdam(torch.optim.AdamW):
    """Adam of a name that is not known to be elementwise: it gets whole parameters."""


def engine(stage: int, settings: dict[str, Any], whole: bool = False) -> Any:
    if not whole:
        return engine_of(stage, **settings)
    wishes = {"optimizer": lambda group: WholeAdam(group, lr=0.01, weight_decay=0.0)}
    return engine_of(stage, wishes=wishes, optimizer=None, **settings)


def named(trained: Any) -> dict[str, nn.Parameter]:
    return dict(trained.module.named_parameters())


def mean_gradients(model: nn.Module, steps: range) -> dict[str, Tensor]:
    """The gradients of one process on all ranks' batches of several micro-steps."""
    world = comm.get_world_size()
    for step in steps:
        for rank in range(world):
            inputs, targets = batch_of(step, rank)
            (loss_of(model(inputs), targets) / (world * len(steps))).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def local_joins_full(get: Callable[..., Tensor], local: Tensor, full: Tensor) -> None:
    """The ranks' fragments, end to end, are the whole, as often as there are copies of it."""
    assert local.dim() == 1
    joined = torch.cat(comm.collectives.gather_objects(local, comm.Ranks.world()))
    assert torch.equal(joined, full.reshape(-1).repeat(joined.numel() // full.numel()))


# ---- reading --------------------------------------------------------------------------------


def read_values(stage: int, settings: dict[str, Any], whole: bool) -> None:
    trained = engine(stage, settings, whole)
    for name, parameter in named(trained).items():
        # The master is exact from the start, whatever the weights are cast to.
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), start_of(name))
    train_engine(trained, range(2))
    whole_state = trained.state_dict()
    if not settings:
        assert_close(whole_state, alone(model_of(), [[0], [1]]))
    for name, parameter in named(trained).items():
        full = utils.safe_get_full_fp32_param(parameter)
        assert (full.shape, full.dtype) == (parameter.shape, torch.float32)
        assert torch.equal(full.to(parameter.dtype), whole_state[name])
        assert not torch.equal(full, start_of(name))
        local_joins_full(full, utils.safe_get_local_fp32_param(parameter), full)
        full.fill_(7.0)  # a copy
        assert not bool((utils.safe_get_full_fp32_param(parameter) == 7.0).any())
    trained.destroy()
    assert utils.safe_get_full_fp32_param(next(iter(trained.module.parameters()))) is None


def start_of(name: str) -> Tensor:
    return model_of().get_parameter(name).detach()


@pytest.mark.slow_cells("3-bf16-flat")
@pytest.mark.parametrize(("settings", "whole"), KINDS, ids=["fp32-whole", "bf16-flat"])
@pytest.mark.parametrize("stage", range(4))
def test_fp32_values(stage: int, settings: dict[str, Any], whole: bool, ranks: RankPools) -> None:
    ranks(2).run(read_values, stage, settings, whole)


def read_gradients(stage: int, settings: dict[str, Any], accumulation: int) -> None:
    trained = engine(stage, {**settings, "gradient_accumulation_steps": accumulation})
    parameters = named(trained)
    assert utils.safe_get_full_grad(parameters["0.weight"]) is None
    assert utils.safe_get_local_grad(parameters["0.weight"]) is None
    for micro in range(accumulation):
        backward(trained, micro)
        expected = mean_gradients(model_of(), range(micro + 1))
        for name, parameter in parameters.items():
            full = utils.safe_get_full_grad(parameter)
            assert (full.shape, full.dtype) == (parameter.shape, torch.float32)
            wanted = expected[name] * (micro + 1) / accumulation
            close = {"rtol": 0.1, "atol": 0.02} if settings else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(full, wanted, **close)
            local_joins_full(full, utils.safe_get_local_grad(parameter), full)
        trained.step()
    assert utils.safe_get_full_grad(parameters["0.weight"]) is None
    if not settings:  # looking has changed nothing
        assert_close(trained.state_dict(), alone(model_of(), [list(range(accumulation))]))
    trained.destroy()


@pytest.mark.slow_cells("1-accumulated", "2-accumulated", "3-accumulated", "3-fp16")
@pytest.mark.parametrize(
    ("settings", "accumulation"),
    [({}, 1), ({}, 3), (BF16, 1), (FP16, 2)],
    ids=["fp32", "accumulated", "bf16", "fp16"],
)
@pytest.mark.parametrize("stage", range(4))
def test_gradients(
    stage: int, settings: dict[str, Any], accumulation: int, ranks: RankPools
) -> None:
    ranks(2).run(read_gradients, stage, settings, accumulation)


def read_moments(stage: int, settings: dict[str, Any], whole: bool) -> None:
    trained = engine(stage, settings, whole)
    parameters = named(trained)
    assert utils.safe_get_full_optimizer_state(parameters["0.weight"], "exp_avg") is None
    backward(trained, 0)
    gradients = {name: utils.safe_get_full_grad(p) for name, p in parameters.items()}
    trained.step()
    for name, parameter in parameters.items():
        for key, expected in (
            ("exp_avg", 0.1 * gradients[name]),
            ("exp_avg_sq", 0.001 * gradients[name] ** 2),
        ):
            full = utils.safe_get_full_optimizer_state(parameter, key)
            assert (full.shape, full.dtype) == (parameter.shape, torch.float32)
            torch.testing.assert_close(full, expected, rtol=1e-4, atol=1e-7)
            local_joins_full(full, utils.safe_get_local_optimizer_state(parameter, key), full)
        assert float(utils.safe_get_full_optimizer_state(parameter, "step")) == 1.0
    with pytest.raises(
        UsageError, match=r"'moment' for 0\.weight; it has exp_avg, exp_avg_sq, step"
    ):
        utils.safe_get_full_optimizer_state(parameters["0.weight"], "moment")
    trained.destroy()


@pytest.mark.fast_cells("1-bf16-flat")
@pytest.mark.parametrize(("settings", "whole"), KINDS, ids=["fp32-whole", "bf16-flat"])
@pytest.mark.parametrize("stage", range(4))
def test_optimizer_state(
    stage: int, settings: dict[str, Any], whole: bool, ranks: RankPools
) -> None:
    ranks(2).run(read_moments, stage, settings, whole)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_factored_state(stage: int) -> None:
    """State that is not kept for each element comes as it is, from the rank that has it."""
    wishes = {"optimizer": lambda group: torch.optim.Adafactor(group, lr=0.01)}
    trained = engine_of(stage, wishes=wishes, optimizer=None)
    train_engine(trained, range(1))
    weight = trained.module[0].weight
    rows = utils.safe_get_full_optimizer_state(weight, "row_var")
    assert rows.numel() == weight.shape[0]
    with pytest.raises(UsageError, match=r"is not elementwise"):
        utils.safe_set_full_optimizer_state(weight, rows, "row_var")
    trained.destroy()


# ---- writing --------------------------------------------------------------------------------


def write_values(stage: int, settings: dict[str, Any], whole: bool) -> None:
    """New values are in master and weight at once, on all ranks, and training goes on from them."""
    trained = engine(stage, settings, whole)
    parameters, rank = named(trained), comm.get_rank()
    generator = torch.Generator().manual_seed(9)
    value = torch.randn(9, 6, generator=generator)
    utils.safe_set_full_fp32_param(parameters["0.weight"], value + rank)  # rank 0's count
    assert torch.equal(utils.safe_get_full_fp32_param(parameters["0.weight"]), value)
    local = utils.safe_get_local_fp32_param(parameters["3.weight"])
    utils.safe_set_local_fp32_param(parameters["3.weight"], local + 1.0)
    with GatheredParameters(trained.module.parameters()):
        cast = parameters["0.weight"].dtype
        assert torch.equal(parameters["0.weight"].detach(), value.to(cast))
        assert torch.equal(parameters["3.weight"].detach(), (start_of("3.weight") + 1).to(cast))
    untouched = utils.safe_get_full_fp32_param(parameters["2.weight"])
    assert torch.equal(untouched, start_of("2.weight"))
    plain = model_of()
    with torch.no_grad():
        plain[0].weight.copy_(value)
        plain[3].weight.add_(1.0)
    train_engine(trained, range(2))
    if not settings:
        assert_close(trained.state_dict(), alone(plain, [[0], [1]]))
    trained.destroy()


@pytest.mark.slow_cells("3-fp32-whole")
@pytest.mark.parametrize(("settings", "whole"), KINDS, ids=["fp32-whole", "bf16-flat"])
@pytest.mark.parametrize("stage", range(4))
def test_writing_values(
    stage: int, settings: dict[str, Any], whole: bool, ranks: RankPools
) -> None:
    ranks(2).run(write_values, stage, settings, whole)


def write_inside_gathered(stage: int) -> None:
    trained = engine(stage, {})
    weight = trained.module[0].weight
    with GatheredParameters(weight):
        utils.safe_set_full_fp32_param(weight, torch.full((9, 6), 0.5))
        assert bool((weight == 0.5).all())
    assert bool((utils.safe_get_full_fp32_param(weight) == 0.5).all())
    with GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        if comm.get_rank() == 1:
            weight.fill_(0.25)
    assert bool((utils.safe_get_full_fp32_param(weight) == 0.25).all())
    trained.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_writing_beside_gathered_parameters(stage: int, ranks: RankPools) -> None:
    ranks(2).run(write_inside_gathered, stage)


def write_gradients(stage: int, settings: dict[str, Any], accumulation: int) -> None:
    """The update is made with the gradients that were put in."""
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    trained = engine(stage, {**settings, **sgd, "gradient_accumulation_steps": accumulation})
    parameters = named(trained)
    with pytest.raises(UsageError, match=r"0\.weight has no gradient to replace"):
        utils.safe_set_full_grad(parameters["0.weight"], torch.ones(9, 6))
    before = {name: utils.safe_get_full_fp32_param(p) for name, p in parameters.items()}
    for micro in range(accumulation):
        backward(trained, micro)
        if micro < accumulation - 1:
            # In the midst of an accumulation what comes later is added.
            utils.safe_set_full_grad(parameters["3.bias"], torch.full((4,), 0.5))
            trained.step()
    if accumulation == 1:
        utils.safe_set_full_grad(parameters["3.bias"], torch.full((4,), 0.5))
    utils.safe_set_full_grad(parameters["0.weight"], torch.full((9, 6), 0.25))
    local = utils.safe_get_local_grad(parameters["3.weight"])
    utils.safe_set_local_grad(parameters["3.weight"], torch.full_like(local, 0.125))
    assert torch.equal(utils.safe_get_full_grad(parameters["0.weight"]), torch.full((9, 6), 0.25))
    doubled = [parameters["0.bias"], parameters["2.weight"]]
    wanted = [2 * utils.safe_get_full_grad(p) for p in doubled]
    utils.safe_update_full_grad_vectorized(doubled, lambda gradient, _: 2 * gradient)
    for parameter, expected in zip(doubled, wanted, strict=True):
        torch.testing.assert_close(utils.safe_get_full_grad(parameter), expected, rtol=0.01, atol=0)
    biases = utils.safe_get_full_grad(parameters["3.bias"])
    if accumulation == 1:
        assert torch.equal(biases, torch.full((4,), 0.5))
    trained.step()
    for name, step in (("0.weight", 0.25), ("3.weight", 0.125), ("3.bias", biases)):
        after = utils.safe_get_full_fp32_param(parameters[name])
        torch.testing.assert_close(after, before[name] - step, rtol=1e-5, atol=1e-5)
    trained.destroy()


@pytest.mark.parametrize(
    ("settings", "accumulation"), [({}, 1), ({}, 2), (FP16, 1)], ids=["fp32", "accumulated", "fp16"]
)
@pytest.mark.parametrize("stage", range(4))
def test_writing_gradients(
    stage: int, settings: dict[str, Any], accumulation: int, ranks: RankPools
) -> None:
    ranks(2).run(write_gradients, stage, settings, accumulation)


def write_moments(stage: int, whole: bool) -> None:
    """The next update is made with the moments that were put in."""
    trained = engine(stage, {}, whole)
    parameters = named(trained)
    with pytest.raises(UsageError, match=r"has no state for 0\.weight yet"):
        utils.safe_set_full_optimizer_state(parameters["0.weight"], torch.ones(9, 6), "exp_avg")
    train_engine(trained, range(1))
    plain = model_of()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    mean_gradients(plain, range(1))
    optimizer.step()
    value = torch.linspace(-1, 1, 54).view(9, 6)
    for parameter, target in ((parameters["0.weight"], plain[0].weight),):
        utils.safe_set_full_optimizer_state(parameter, value + comm.get_rank(), "exp_avg")
        optimizer.state[target]["exp_avg"].copy_(value)
    local = utils.safe_get_local_optimizer_state(parameters["3.weight"], "exp_avg_sq")
    utils.safe_set_local_optimizer_state(parameters["3.weight"], local * 4.0, "exp_avg_sq")
    optimizer.state[plain[3].weight]["exp_avg_sq"].mul_(4.0)
    with pytest.raises(UsageError, match=r"'step' of 0\.weight is not elementwise"):
        utils.safe_set_full_optimizer_state(parameters["0.weight"], torch.ones(()), "step")
    optimizer.zero_grad()
    mean_gradients(plain, range(1, 2))
    optimizer.step()
    train_engine(trained, range(1, 2))
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    assert_close(trained.state_dict(), expected)
    trained.destroy()


@pytest.mark.parametrize("whole", [False, True], ids=["flat", "whole"])
@pytest.mark.parametrize("stage", range(4))
def test_writing_optimizer_state(stage: int, whole: bool, ranks: RankPools) -> None:
    ranks(2).run(write_moments, stage, whole)


# ---- what is odd ----------------------------------------------------------------------------


class Odd(nn.Module):
    """A frozen weight, a 0-dim one, an empty one, and one that only rank 0 ever uses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.frozen = nn.Parameter(torch.randn(6, 4, generator=generator), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.sometimes = nn.Parameter(torch.ones(4))
        self.never = nn.Parameter(torch.ones(7))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs @ self.frozen * self.scale
        return outputs * self.sometimes if comm.get_rank() == 0 else outputs


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_odd_parameters(stage: int) -> None:
    trained = engine_of(stage, Odd(), gradient_accumulation_steps=2)
    odd = trained.module
    inputs, targets = batch_of(0)
    trained.backward(loss_of(trained(inputs), targets))
    whole = trained.state_dict()
    assert torch.equal(utils.safe_get_full_fp32_param(odd.frozen), whole["frozen"])
    assert utils.safe_get_full_grad(odd.frozen) is None
    assert utils.safe_get_full_optimizer_state(odd.frozen, "exp_avg") is None
    assert utils.safe_get_full_fp32_param(odd.scale).shape == ()
    assert utils.safe_get_full_fp32_param(odd.empty).shape == (0, 3)
    assert bool(utils.safe_get_full_grad(odd.sometimes).count_nonzero() == 4)
    assert bool(utils.safe_get_full_grad(odd.never).count_nonzero() == 0)
    assert utils.safe_get_full_grad(odd.scale).shape == ()
    frozen = torch.ones(6, 4)
    utils.safe_set_full_fp32_param(odd.frozen, frozen)
    utils.safe_set_full_grad(odd.sometimes, torch.full((4,), 3.0))
    assert torch.equal(utils.safe_get_full_grad(odd.sometimes), torch.full((4,), 3.0))
    assert torch.equal(trained.state_dict()["frozen"], frozen)
    for bad in (torch.ones(5), "ones"):
        with pytest.raises(UsageError, match=r"sometimes expects a tensor of shape \(4,\)"):
            utils.safe_set_full_fp32_param(odd.sometimes, bad)
    stranger = nn.Parameter(torch.ones(2))
    assert utils.safe_get_full_fp32_param(stranger) is None
    assert utils.safe_get_full_grad(stranger) is None
    assert utils.safe_get_full_optimizer_state(stranger, "exp_avg") is None
    with pytest.raises(UsageError, match=r"no engine holds"):
        utils.safe_set_full_fp32_param(stranger, torch.ones(2))
    trained.destroy()


def a_wrong_shape_on_one_rank(stage: int) -> None:
    trained = engine(stage, {})
    shape = (9, 6) if comm.get_rank() == 0 else (6, 9)
    with pytest.raises(UsageError, match=r"rank 1: safe_set_full_fp32_param"):
        utils.safe_set_full_fp32_param(trained.module[0].weight, torch.ones(shape))
    trained.destroy()


def test_a_fault_of_one_rank_is_told_to_all(ranks: RankPools) -> None:
    ranks(2).run(a_wrong_shape_on_one_rank, 3)


@on_ranks(2)
def test_before_initialize() -> None:
    """`zero.Init` holds parameters too."""
    with hadal.zero.Init():
        model = model_of()
    assert torch.equal(utils.safe_get_full_fp32_param(model[0].weight), start_of("0.weight"))
    utils.safe_set_full_fp32_param(model[0].weight, torch.full((9, 6), 2.0))
    assert utils.safe_get_full_grad(model[0].weight) is None
    trained = engine_of(3, model)
    assert bool((trained.state_dict()["0.weight"] == 2.0).all())
    trained.destroy()


def test_names() -> None:
    for name in utils.__all__:
        assert callable(getattr(utils, name))
    with pytest.raises(AttributeError, match=r"safe_get_all"):
        utils.safe_get_all  # noqa: B018
    assert set(utils.__all__) <= set(dir(utils))
