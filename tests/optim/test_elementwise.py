"""Steps in blocks, compared with plain torch on whole tensors: any optimizer, cut and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm import Ranks
from hadal.errors import OptimizerError
from hadal.optim import norm, workspace
from hadal.optim.elementwise import UncorrectedAdam
from hadal.optim.lion import Lion
from hadal.optim.norm import global_norm
from hadal.optim.step import FlatStepper
from hadal.zero.bucket import Bucket
from hadal.zero.gradients import Gradients
from hadal.zero.grouping import BucketPlan, Member
from hadal.zero.policy import Partition, Precision
from hadal.zero.sharing import Sharing

from .plain import PlainAdam, PlainLion

UPDATES = 3
BLOCK = 24
ALONE = Sharing.over(Ranks(group=None, rank=0, size=1, host_group=None))  # type: ignore[arg-type]
SHAPES = ((5, 7), (), (0, 2), (BLOCK,), (3, 2, 11), (1,))
TOLERANCE = {torch.float32: (2e-6, 1e-7), torch.float64: (1e-12, 1e-13)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut slices often, and never at the end of a parameter."""
    monkeypatch.setattr(workspace, "_CPU_BLOCK_NUMEL", BLOCK)


def values_of(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES
    ]


def leaves_of(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(values.to(dtype)) for values in values_of(1)]


def same_precision(dtype: torch.dtype) -> Precision:
    return Precision(compute=dtype, master=dtype, accumulate=dtype, reduce=dtype)


def grouped(leaves: list[nn.Parameter], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": leaves[n :: len(groups)]} for n, group in enumerate(groups)]


def laid_out(leaves: list[nn.Parameter], groups: int, precision: Precision) -> Gradients:
    """Return one bucket over the leaves, assigned to the groups in turn as by `grouped`."""
    members = [Member(f"leaf.{n}", leaf, n % groups) for n, leaf in enumerate(leaves)]
    bucket = Bucket(
        BucketPlan("leaves", Partition(), members, []), precision, ALONE, torch.device("cpu")
    )
    return Gradients(bucket)


def give(gradients: Gradients, leaves: list[nn.Parameter], given: list[Tensor]) -> None:
    gradients.clear()
    gradients.count_as_zero()
    views = dict(
        zip(gradients.bucket.parameters, gradients.bucket.views_of(gradients.mean), strict=True)
    )
    for leaf, value in zip(leaves, given, strict=True):
        views[leaf].copy_(value)


def stepped(
    made: Callable[[Any], Optimizer],
    groups: list[dict[str, Any]],
    precision: Precision,
    multiplier: float,
) -> tuple[list[Tensor], Optimizer]:
    """Return the leaves after some updates in blocks, with changing learning rates."""
    leaves = leaves_of(precision.compute)
    optimizer = made(grouped(leaves, groups))
    gradients = laid_out(leaves, len(groups), precision)
    stepper = FlatStepper(optimizer, [gradients])
    for number in range(UPDATES):
        give(gradients, leaves, values_of(10 + number))
        stepper.step(multiplier)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    return [leaf.detach() for leaf in leaves], optimizer


def expected(
    made: Callable[[Any], Optimizer],
    groups: list[dict[str, Any]],
    dtype: torch.dtype,
    multiplier: float,
) -> list[Tensor]:
    """Return the leaves after the optimizer's own steps on whole tensors."""
    leaves = leaves_of(dtype)
    optimizer = made(grouped(leaves, groups))
    for number in range(UPDATES):
        for leaf, gradient in zip(leaves, values_of(10 + number), strict=True):
            leaf.grad = gradient.to(dtype) * multiplier
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    return [leaf.detach() for leaf in leaves]


def assert_close(found: list[Tensor], wanted: list[Tensor], rtol: float, atol: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=rtol, atol=atol)


# ---- every built-in optimizer --------------------------------------------------------------------

DECAYS = st.sampled_from([0.0, 0.1])
BETAS = st.sampled_from([(0.9, 0.999), (0.5, 0.8), (0.0, 0.9)])
FLAGS = st.booleans()
ADAM = st.fixed_dictionaries(
    {"betas": BETAS, "weight_decay": DECAYS, "amsgrad": FLAGS, "maximize": FLAGS}
)
# By name: what steps in blocks, what it is compared with, and the settings that both take.
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "Adam": (torch.optim.Adam, torch.optim.Adam, ADAM),
    "AdamW": (torch.optim.AdamW, torch.optim.AdamW, ADAM),
    "Adam without correction": (
        lambda p, **s: UncorrectedAdam(p, decoupled_weight_decay=False, **s),
        lambda p, **s: PlainAdam(p, decoupled=False, **s),
        ADAM,
    ),
    "AdamW without correction": (UncorrectedAdam, PlainAdam, ADAM),
    "Lion": (Lion, PlainLion, st.fixed_dictionaries({"betas": BETAS, "weight_decay": DECAYS})),
    "Adagrad": (
        torch.optim.Adagrad,
        torch.optim.Adagrad,
        st.fixed_dictionaries(
            {
                "lr_decay": DECAYS,
                "weight_decay": DECAYS,
                "initial_accumulator_value": DECAYS,
                "maximize": FLAGS,
            }
        ),
    ),
    "SGD": (
        torch.optim.SGD,
        torch.optim.SGD,
        st.fixed_dictionaries(
            {"momentum": DECAYS, "dampening": DECAYS, "weight_decay": DECAYS, "maximize": FLAGS}
        ),
    ),
    "SGD by Nesterov": (
        torch.optim.SGD,
        torch.optim.SGD,
        st.fixed_dictionaries({"momentum": st.just(0.9), "nesterov": st.just(True)}),
    ),
}
# Gradients are divided by 2**16 under a loss scale, and by anything where they are clipped.
MULTIPLIERS = st.sampled_from([1.0, 2.0**-16, 0.37])


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(list(TOLERANCE)), multiplier=MULTIPLIERS)
def test_blocks_update_weights_like_whole_tensors(name, data, dtype, multiplier):
    made, reference, options = KINDS[name]
    chosen = data.draw(options)
    groups = data.draw(
        st.sampled_from([[{}], [{}, {"lr": 0.03, "weight_decay": 0.2}], [{"lr": 0.0}, {}, {}]])
    )
    found, optimizer = stepped(
        lambda p: made(p, lr=0.01, **chosen), groups, same_precision(dtype), multiplier
    )
    loop = {"foreach": False} if "foreach" in optimizer.defaults else {}
    wanted = expected(lambda p: reference(p, lr=0.01, **chosen, **loop), groups, dtype, multiplier)
    assert_close(found, wanted, *TOLERANCE[dtype])


@pytest.mark.parametrize("made", [Lion, UncorrectedAdam])
def test_own_optimizers_step_without_an_engine(made):
    groups = [{}, {"lr": 0.03}]

    def make(parameters: Any) -> Optimizer:
        optimizer: Optimizer = made(parameters, lr=0.01, weight_decay=0.1)
        return optimizer

    def hooked(parameters: Any) -> Optimizer:
        optimizer = make(parameters)
        optimizer.register_step_pre_hook(lambda *_: calls.append(1))
        return optimizer

    calls: list[int] = []
    blocks, _ = stepped(make, groups, same_precision(torch.float64), 0.37)
    at_once, _ = stepped(hooked, groups, same_precision(torch.float64), 0.37)
    assert len(calls) == UPDATES
    assert_close(blocks, expected(make, groups, torch.float64, 0.37), 1e-12, 1e-13)
    assert_close(at_once, blocks, 1e-12, 1e-13)


def test_a_closure_is_called_and_its_loss_returned():
    leaf = nn.Parameter(torch.ones(3))

    def closure() -> float:
        leaf.sum().backward()
        return 7.0

    assert Lion([leaf], lr=0.5).step(closure) == 7.0
    assert torch.equal(leaf.detach(), torch.full((3,), 0.5))


@pytest.mark.parametrize(
    "settings_given", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}]
)
@pytest.mark.parametrize("made", [Lion, UncorrectedAdam])
def test_own_optimizers_refuse_numbers_out_of_range(made, settings_given):
    with pytest.raises(ValueError, match=r"-1|1\.0|-0\.1"):
        made([nn.Parameter(torch.ones(1))], **settings_given)


# ---- dtypes --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STATEFUL = {
    "Adam": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "Lion": lambda p: Lion(p, lr=0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("accumulate", [BF16, F32])
@pytest.mark.parametrize(
    ("master", "state"), [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16), (F16, F16)]
)
def test_state_is_kept_in_its_own_dtype(name, accumulate, master, state):
    compute = F16 if master == F16 else BF16
    precision = Precision(
        compute=compute, master=master, accumulate=accumulate, reduce=F32, state=state
    )
    found, optimizer = stepped(STATEFUL[name], [{}], precision, 0.37)
    kept = [
        value
        for held in optimizer.state.values()
        for key, value in held.items()
        if key != "step" and isinstance(value, Tensor)
    ]
    assert {value.dtype for value in kept} == {state}
    assert all(float(value.abs().sum()) > 0 for value in kept)
    # Every update rounds the weights and, by as much, what the state says of the next one.
    exact = expected(STATEFUL[name], [{}], torch.float64, 0.37)
    assert_close(found, exact, 2**-7, 0.01)


def test_fp32_moments_with_a_bf16_master_keep_more_digits():
    """Second moments of tiny gradients vanish in bf16's rounding, but not in fp32."""
    found = {}
    for state in (BF16, F32):
        precision = Precision(compute=BF16, master=BF16, accumulate=BF16, reduce=BF16, state=state)
        leaf = nn.Parameter(torch.ones(64, dtype=BF16))
        optimizer = torch.optim.AdamW([leaf], lr=0.0, betas=(0.9, 0.999), weight_decay=0.0)
        gradients = laid_out([leaf], 1, precision)
        stepper = FlatStepper(optimizer, [gradients])
        for _ in range(400):
            give(gradients, [leaf], [torch.ones(64)])
            stepper.step(1.0)
        (held,) = optimizer.state.values()
        found[state] = float(held["exp_avg_sq"][0])
    assert found[F32] == pytest.approx(1 - 0.999**400, rel=1e-3)
    assert found[BF16] < 0.8 * found[F32]


def test_existing_state_is_cast_to_the_configured_dtype():
    leaves = leaves_of(BF16)
    optimizer = torch.optim.AdamW(leaves, lr=0.01)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    precision = Precision(compute=BF16, master=F32, accumulate=BF16, reduce=BF16)
    gradients = laid_out(leaves, 1, precision)
    stepper = FlatStepper(optimizer, [gradients])
    give(gradients, leaves, values_of(10))
    stepper.step(1.0)
    (held,) = optimizer.state.values()
    assert held["exp_avg"].dtype == F32
    assert int(held["step"]) == 2


@pytest.mark.parametrize(
    "made",
    [
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=False),
    ],
)
def test_only_steps_in_blocks_keep_state_in_another_dtype(made):
    leaves = leaves_of(BF16)
    optimizer = made(leaves)
    precision = Precision(compute=BF16, master=BF16, accumulate=BF16, reduce=BF16, state=F32)
    gradients = laid_out(leaves, 1, precision)
    give(gradients, leaves, values_of(10))
    with pytest.raises(
        OptimizerError, match=r"requires torch.float32; use Adam, AdamW, Adagrad, Lion"
    ):
        FlatStepper(optimizer, [gradients]).step(1.0)


@pytest.mark.parametrize("choice", [{"foreach": True}, {"fused": False}, {"fused": True}, {}])
def test_a_requested_implementation_is_used(choice, monkeypatch):
    calls: list[str] = []
    plain = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda *a, **k: (calls.append("step"), plain(*a, **k))[1]
    )
    groups: list[dict[str, Any]] = [{}]
    found, _ = stepped(
        lambda p: torch.optim.AdamW(p, lr=0.01, **choice), groups, same_precision(F32), 0.37
    )
    assert len(calls) == (UPDATES if choice in ({"foreach": True}, {"fused": False}) else 0)
    wanted = expected(lambda p: torch.optim.AdamW(p, lr=0.01), groups, F32, 0.37)
    assert_close(found, wanted, *TOLERANCE[F32])


@pytest.mark.parametrize("name", STATEFUL)
def test_an_infinite_norm_leaves_nan_where_gradients_are_infinite_only(name):
    """Clipping by an infinite norm multiplies by 0."""
    leaf = nn.Parameter(torch.ones(8))
    optimizer = STATEFUL[name]([leaf])
    gradients = laid_out([leaf], 1, same_precision(F32))
    give(gradients, [leaf], [torch.tensor([1.0, math.inf, -2.0, 3.0, 0.0, 1e30, -1.0, 2.0])])
    FlatStepper(optimizer, [gradients]).step(0.0)
    is_finite = torch.isfinite(leaf.detach()).tolist()
    assert is_finite == [True, name == "Lion", *[True] * 6]


# ---- the norm ------------------------------------------------------------------------------------


@given(
    st.integers(0, 300),
    st.sampled_from([BF16, F16, F32, torch.float64]),
    st.sampled_from([1e-4, 1.0, 100.0]),
)
def test_the_norm_is_exact_to_float32(numel, dtype, scale):
    leaf = nn.Parameter((scale * torch.randn(numel, dtype=torch.float64)).to(dtype))
    gradients = laid_out([leaf], 1, same_precision(dtype))
    give(gradients, [leaf], [leaf.detach().clone()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "ROW_NUMEL", 16)
        patch.setattr(norm, "_CPU_BLOCK_NUMEL", 50)
        found = float(global_norm([gradients, gradients], ALONE))
    assert found == pytest.approx(math.sqrt(2) * float(leaf.detach().double().norm()), rel=1e-6)
    assert float(global_norm([gradients], ALONE)) == pytest.approx(found / math.sqrt(2), rel=1e-6)


def test_norms_of_long_rows_are_exact():
    """A single float32 sum of a million equal squares is wrong in the fourth digit."""
    leaf = nn.Parameter(torch.full((1 << 20,), 1 / 3))
    gradients = laid_out([leaf], 1, same_precision(F32))
    give(gradients, [leaf], [leaf.detach().clone()])
    exact = float(leaf.detach().double().norm())
    assert float(global_norm([gradients], ALONE)) == pytest.approx(exact, rel=2e-6)
