"""Lamb, compared with its formulas over whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import every
from engine.toys import Leaves, engine_of, given_gradients, mean_gradients, train
from hypothesis import given, strategies as st
from ranks import RankPools, on_ranks
from torch import Tensor

from hadal import comm
from hadal.comm import collectives
from hadal.errors import OptimizerError
from hadal.optim import lamb
from hadal.optim.build import build_optimizer
from hadal.optim.lamb import Lamb, LambStepper
from hadal.zero import sharing

SHAPES = ((5, 3), (), (7,), (0, 2), (1,), (2, 3, 4), (33,), (3,))
UPDATES = 4
WIDE = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}
DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
    "bias_correction_in": "rate",
    "eps_inside_sqrt": False,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
}


class Reference:
    """Lamb for one tensor, from its formulas, in float64."""

    def __init__(self, weight: Tensor, **options: Any) -> None:
        self.options = {**DEFAULTS, **options}
        self.weight = weight.double()
        self.m, self.v, self.count = torch.zeros_like(self.weight), 0, 0
        self.ratio = 1.0

    def step(self, gradient: Tensor) -> None:
        o, g = self.options, gradient.double()
        beta1, beta2 = o["betas"]
        self.count += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        m, v, lr = self.m, self.v, o["lr"]
        first, second = 1 - beta1**self.count, 1 - beta2**self.count
        if o["bias_correction"] and o["bias_correction_in"] == "moments":
            m, v = m / first, v / second
        elif o["bias_correction"]:
            lr *= second**0.5 / first
        root = (v + o["eps"]) ** 0.5 if o["eps_inside_sqrt"] else v**0.5 + o["eps"]
        update = m / root + o["weight_decay"] * self.weight
        weight_norm, update_norm = float(self.weight.norm()), float(update.norm())
        self.ratio = 1.0
        if weight_norm > 0 and update_norm > 0:
            self.ratio = min(max(weight_norm / update_norm, o["min_coeff"]), o["max_coeff"])
        self.weight = self.weight - lr * self.ratio * update


VARIANTS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "betas": (0.8, 0.95)},
    {"bias_correction": False, "weight_decay": 0.1},
    {"bias_correction_in": "moments", "weight_decay": 0.1},
    {"eps": 0.05},
    {"eps": 0.05, "eps_inside_sqrt": True},
    {"max_coeff": 0.1},
    {"min_coeff": 3.0},
]
GROUPS: list[dict[str, Any]] = [{}, {"lr": 0.004, "max_coeff": 0.15}, {"weight_decay": 0.2}]


def group_of(index: int) -> dict[str, Any]:
    return GROUPS[index % len(GROUPS)]


def grouped(leaves: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    groups = len(GROUPS)
    return [{**group, "params": leaves[n::groups]} for n, group in enumerate(GROUPS)]


def step_engine(stage: int, precision: str, options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = Leaves(SHAPES)
    with torch.no_grad():
        model.leaves[2].zero_()
    references = [
        Reference(leaf.detach(), **{"lr": 0.02, **options, **group_of(index)})
        for index, leaf in enumerate(model.leaves)
    ]
    optimizer = Lamb(grouped(list(model.leaves)), **{"lr": 0.02, **options})
    changes = WIDE if precision == "bf16" else {}
    engine = engine_of(stage, model, {"optimizer": optimizer}, optimizer=None, **changes)
    assert type(engine.stepper) is LambStepper
    for update in range(UPDATES):
        for one, mean in zip(references, mean_gradients(SHAPES, update), strict=True):
            one.step(mean)
        given = given_gradients(SHAPES, update, comm.get_rank())
        engine.backward(engine([gradient.to(dtype) for gradient in given]))
        engine.step()
    ratios = sorted(one.ratio for one in references)
    assert sorted(optimizer.get_lamb_coeffs()) == pytest.approx(ratios, rel=1e-4)
    engine.destroy()
    for index, (leaf, one) in enumerate(zip(model.leaves, references, strict=True)):
        found, expected = leaf.detach().double(), one.weight
        if precision == "bf16":
            # The weight is the master rounded once; the master itself strays as in fp32.
            allowed = 2.0**-8 * expected.abs() + 1e-5
        else:
            allowed = 2e-6 * expected.abs() + 2e-6
        assert bool(((found - expected).abs() <= allowed).all()), (stage, index, options)


@pytest.mark.claims(
    "optimizer.params{type=Lamb}.lr",
    "optimizer.params{type=Lamb}.betas",
    "optimizer.params{type=Lamb}.eps",
    "optimizer.params{type=Lamb}.eps_inside_sqrt",
    "optimizer.params{type=Lamb}.weight_decay",
    "optimizer.params{type=Lamb}.bias_correction",
    "optimizer.params{type=Lamb}.bias_correction_in",
    "optimizer.params{type=Lamb|OneBitLamb}.max_coeff",
    "optimizer.params{type=Lamb|OneBitLamb}.min_coeff",
)
@pytest.mark.parametrize("options", VARIANTS)
def test_the_formula(options: dict[str, Any]) -> None:
    """The keys of the section, on whole tensors."""
    model = Leaves(SHAPES)
    references = [Reference(leaf.detach(), **{"lr": 0.02, **options}) for leaf in model.leaves]
    # What the first of these options changes by itself.
    rest = dict(list(options.items())[1:])
    plain = Reference(model.leaves[0].detach(), **{"lr": 0.02, **rest})
    optimizer = build_optimizer(
        "Lamb",
        {"lr": 0.02, **options, "betas": list(options.get("betas", (0.9, 0.999)))},
        model.parameters(),
    )
    assert type(optimizer) is Lamb and optimizer.get_lamb_coeffs() == []
    for update in range(UPDATES):
        mean = given_gradients(SHAPES, update, 0)
        for leaf, one, gradient in zip(model.leaves, references, mean, strict=True):
            leaf.grad = gradient
            one.step(gradient)
        plain.step(mean[0])
        optimizer.step()
    ratios = [one.ratio for one in references]
    assert optimizer.get_lamb_coeffs() == pytest.approx(ratios, rel=1e-4)
    for leaf, one in zip(model.leaves, references, strict=True):
        assert torch.allclose(leaf.detach().double(), one.weight, rtol=2e-6, atol=2e-6)
    # It makes a difference, so a key that does nothing would be seen.
    assert bool(options) == (not torch.allclose(references[0].weight, plain.weight, atol=1e-5))


@pytest.mark.parametrize(
    ("params", "shares"),
    [({}, [0.3162, 0.2353, 0.2020, 0.1837]), ({"bias_correction_in": "moments"}, [1.0] * 4)],
)
def test_the_first_steps(params: dict[str, Any], shares: list[float]) -> None:
    """Under a constant gradient a corrected step is lr * ||w|| long, and a corrected rate shorter.

    By the factor sqrt(1 - beta2^t) / (1 - beta1^t), as the ratio cancels what the moments lack.
    """
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = build_optimizer("Lamb", {"lr": 0.01, **params}, [weight])
    for share in shares:
        weight.grad, before = torch.ones(8, 8), weight.detach().clone()
        optimizer.step()
        length = float((weight.detach() - before).norm() / (0.01 * before.norm()))
        assert length == pytest.approx(share, rel=1e-3)


def step_variants(stage: int, precision: str) -> None:
    for options in VARIANTS[1::2]:
        step_engine(stage, precision, options)


@pytest.mark.fast_cells("0-1", "2-3", "3-1")
@every(stage=[0, 1, 2, 3], world=[1, 2, 3])
def test_every_stage_steps_like_whole_tensors(stage: int, world: int, ranks: RankPools) -> None:
    ranks(world).run(step_variants, stage, "fp32")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_are_stepped_in_bf16_training(stage: int, ranks: RankPools) -> None:
    ranks(2).run(step_engine, stage, "bf16", {"weight_decay": 0.1})


@on_ranks(2)
def test_blocks_do_not_change_the_norms() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lamb, "block_numel", lambda _: 4)
        step_engine(2, "fp32", {"weight_decay": 0.1})


def count_sums(stage: int) -> list[int]:
    counts: list[int] = []
    whole = collectives.sum_

    def counting(tensor: Tensor, *rest: Any) -> None:
        if tensor.dim():  # the gradients' norm is none of Lamb's
            counts.append(tensor.numel())
        whole(tensor, *rest)

    model = Leaves(SHAPES)
    engine = engine_of(stage, model, optimizer={"type": "Lamb", "params": {}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "sum_", counting)
        for update in range(2):
            engine.backward(engine(given_gradients(SHAPES, update, comm.get_rank())))
            engine.step()
    engine.destroy()
    return counts


@pytest.mark.parametrize(("stage", "world", "sums"), [(0, 2, 0), (3, 1, 0), (1, 2, 2), (3, 2, 2)])
def test_one_small_sum_serves_an_update(
    stage: int, world: int, sums: int, ranks: RankPools
) -> None:
    for counts in ranks(world).run(count_sums, stage):
        assert counts == [2 * len(SHAPES)] * sums


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(1e-3, 1.0),
    st.floats(1.0, 1e3),
)
def test_the_ratio_stays_within_its_bounds(
    weight: float, update: float, low: float, high: float
) -> None:
    group = {"min_coeff": low, "max_coeff": high}
    sums = torch.tensor([[weight**2, update**2]], dtype=torch.float64)
    ratio = float(lamb._trust_ratios(sums, [group])[0])
    if sums[0, 0] == 0 or sums[0, 1] == 0:
        assert ratio == 1.0
    else:
        assert low <= ratio <= high
        assert ratio == pytest.approx(min(max(weight / update, low), high))


def test_a_place_of_the_correction_must_be_known() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(OptimizerError, match="is 'ratio'; expected one of 'rate', 'moments'"):
        Lamb([weight], bias_correction_in="ratio")
    optimizer = Lamb([weight], bias_correction_in="moments")
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["bias_correction_in"]  # as DeepSpeed saves it
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["bias_correction_in"] == "rate"


@pytest.mark.claims("optimizer.params{type=Lamb}.amsgrad")
def test_amsgrad_is_not_part_of_lamb() -> None:
    with pytest.raises(OptimizerError, match="does not support amsgrad; remove it"):
        build_optimizer("Lamb", {"amsgrad": True}, [torch.nn.Parameter(torch.ones(2))])
    build_optimizer("Lamb", {"amsgrad": False}, [torch.nn.Parameter(torch.ones(2))])


def train_under_a_schedule() -> tuple[list[str], list[float]]:
    """torch's schedules, which check for steps, and step hooks work with Lamb."""
    calls: list[str] = []
    model = Leaves(SHAPES)
    optimizer = Lamb(model.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = engine_of(2, model, {"optimizer": optimizer, "lr_scheduler": schedule}, optimizer=None)
    for update in range(2):
        engine.backward(engine(given_gradients(SHAPES, update, comm.get_rank())))
        engine.step()
    rates = engine.get_lr()
    engine.destroy()
    return calls, rates


def test_schedules_and_hooks_of_torch_see_each_update(ranks: RankPools) -> None:
    assert ranks(2).run(train_under_a_schedule) == [(["before", "after"] * 2, [0.125])] * 2


@on_ranks(2)
def test_lamb_trains_from_a_configuration() -> None:
    """Train from a configuration: losses fall."""
    engine = engine_of(2, optimizer={"type": "lamb", "params": {"lr": 0.05}})
    losses = train(engine, range(12))
    assert float(torch.stack(losses[-4:]).mean()) < float(torch.stack(losses[:4]).mean())
    engine.destroy()
