"""The effect of each key of the `optimizer` section on the weights, for elementwise types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import Leaves, engine_of, given_gradients, mean_gradients
from ranks import RankPools
from torch.optim import Optimizer

from hadal import comm
from hadal.config import load_config
from hadal.errors import ConfigError, OptimizerError
from hadal.optim.lion import Lion

from .plain import PlainAdam, PlainLion

SHAPES = ((5, 3), (), (7,), (2, 3, 4))
UPDATES = 3
BASE = {"train_micro_batch_size_per_gpu": 1}


def trained(section: dict[str, Any], stage: int = 2, **changes: Any) -> list[torch.Tensor]:
    """Return the weights after a few updates with given gradients."""
    model = Leaves(SHAPES)
    engine = engine_of(stage, model, optimizer=section, **changes)
    assert engine.optimizer.param_groups[0]["params"]
    dtype = next(model.parameters()).dtype
    for step in range(UPDATES):
        given = [each.to(dtype) for each in given_gradients(SHAPES, step, comm.get_rank())]
        engine.backward(engine(given))
        engine.step()
        assert all(leaf.grad is None for leaf in model.leaves)
    engine.destroy()
    return [leaf.detach().clone() for leaf in model.leaves]


def alone(kind: type[Optimizer], options: dict[str, Any]) -> list[torch.Tensor]:
    model = Leaves(SHAPES)
    optimizer = kind(model.parameters(), **options)
    for step in range(UPDATES):
        for leaf, mean in zip(model.leaves, mean_gradients(SHAPES, step), strict=True):
            leaf.grad = mean
        optimizer.step()
    return [leaf.detach() for leaf in model.leaves]


def are_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=2e-6, atol=2e-7) for a, b in pairs)


Case = tuple[str, dict[str, Any], type[Optimizer], dict[str, Any]]


def act(cases: list[Case], plain: Case) -> None:
    """Check that each case equals its reference, and differs from training without the key."""
    kind, params, reference, options = plain
    default = alone(reference, options)
    assert are_close(trained({"type": kind, "params": params}), default)
    for kind, params, reference, options in cases:
        found = trained({"type": kind, "params": params})
        assert are_close(found, alone(reference, options)), (kind, params)
        assert not are_close(found, default), (kind, params)


@pytest.mark.claims(
    "optimizer",
    "optimizer.type",
    "optimizer.params",
    "optimizer.params{type=Adam|AdamW}.lr",
    "optimizer.params{type=Adam|AdamW}.betas",
    "optimizer.params{type=Adam|AdamW}.eps",
    "optimizer.params{type=Adam|AdamW}.weight_decay",
    "optimizer.params{type=Adam|AdamW}.bias_correction",
    "optimizer.params{type=Adam|AdamW}.torch_adam",
    "optimizer.params{type=Adam|AdamW}.adam_w_mode",
    "optimizer.params{type=Adam|AdamW}.amsgrad",
)
def test_keys_of_adam(ranks: RankPools) -> None:
    adam, adamw = torch.optim.Adam, torch.optim.AdamW
    w = {"lr": 1e-3, "weight_decay": 0.0}
    cases: list[Case] = [
        ("AdamW", {"lr": 0.02}, adamw, {**w, "lr": 0.02}),
        ("adam", {"betas": [0.5, 0.6]}, adamw, {**w, "betas": (0.5, 0.6)}),
        ("Adam", {"eps": 0.1}, adamw, {**w, "eps": 0.1}),
        ("ADAM", {"weight_decay": 0.5}, adamw, {**w, "weight_decay": 0.5}),
        (
            "Adam",
            {"weight_decay": 0.5, "adam_w_mode": False},
            adam,
            {**w, "weight_decay": 0.5},
        ),
        # Type AdamW always decouples.
        (
            "AdamW",
            {"weight_decay": 0.5, "adam_w_mode": False},
            adamw,
            {**w, "weight_decay": 0.5},
        ),
        # Gradients that shrink: the largest second moment is not the present one.
        (
            "Adam",
            {"betas": [0.9, 0.1], "amsgrad": True},
            adamw,
            {**w, "betas": (0.9, 0.1), "amsgrad": True},
        ),
        ("AdamW", {"bias_correction": False}, PlainAdam, {"lr": 1e-3}),
        (
            "Adam",
            {"bias_correction": False, "adam_w_mode": False, "weight_decay": 0.5},
            PlainAdam,
            {"lr": 1e-3, "decoupled": False, "weight_decay": 0.5},
        ),
        # torch's class has a decay of its own where none is given.
        ("AdamW", {"torch_adam": True, "lr": 0.02}, adamw, {"lr": 0.02}),
    ]
    ranks(2).run(act, cases, ("AdamW", {}, adamw, w))
    unlike = ranks(1).run(trained_pair, {"lr": 0.02}, {"lr": 0.02, "torch_adam": True})[0]
    assert not are_close(*unlike)


def trained_pair(
    one: dict[str, Any], other: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return trained({"type": "AdamW", "params": one}), trained({"type": "AdamW", "params": other})


@pytest.mark.claims("optimizer.params{type=Adam|AdamW}.<torch keyword>")
def test_torchs_keywords_of_adam(ranks: RankPools) -> None:
    w = {"lr": 1e-3}
    up = (
        "AdamW",
        {"torch_adam": True, "maximize": True},
        torch.optim.AdamW,
        {**w, "maximize": True},
    )
    ranks(2).run(act, [up], ("AdamW", {"torch_adam": True}, torch.optim.AdamW, w))
    for keyword in ("foreach", "fused", "maximize", "capturable", "differentiable"):
        fault = fault_of({"type": "AdamW", "params": {keyword: True}})
        assert fault == (f"optimizer.params.{keyword}", "is torch's keyword; add torch_adam: true")


def count_own_steps(params: dict[str, Any]) -> int:
    """Return how often torch's own `step` runs in an engine's updates."""
    calls = []
    plain = torch.optim.AdamW.step
    torch.optim.AdamW.step = lambda *a, **k: (calls.append(1), plain(*a, **k))[1]  # type: ignore
    try:
        found = trained({"type": "AdamW", "params": {"torch_adam": True, **params}})
    finally:
        torch.optim.AdamW.step = plain  # type: ignore[method-assign]
    assert are_close(found, alone(torch.optim.AdamW, {"lr": 1e-3}))
    return len(calls)


@pytest.mark.claims("optimizer.params{type=Adam|AdamW}.<torch keyword>")
def test_the_implementation_in_torchs_keywords_is_used(ranks: RankPools) -> None:
    (pool,) = [ranks(1)]
    assert pool.run(count_own_steps, {"foreach": True}) == [UPDATES]
    assert pool.run(count_own_steps, {"fused": False}) == [UPDATES]
    assert pool.run(count_own_steps, {"fused": True}) == [0]
    assert pool.run(count_own_steps, {}) == [0]


def refused(section: dict[str, Any]) -> str:
    with pytest.raises(OptimizerError) as caught:
        trained(section)
    return str(caught.value)


def test_unsupported_keywords_are_refused_with_the_remedy(ranks: RankPools) -> None:
    params = {"torch_adam": True, "differentiable": True}
    path, told = fault_of({"type": "Adam", "params": params})
    assert path == "optimizer.params.differentiable"
    assert told.endswith("remove it")
    path, told = fault_of(
        {"type": "Adam", "params": {"torch_adam": True, "bias_correction": False}}
    )
    assert path == "optimizer.params.bias_correction"
    assert "leave torch_adam out" in told
    (told,) = ranks(1).run(refused, {"type": "SGD", "params": {"lr": 1, "differentiable": True}})
    assert "differentiable=True) cannot be used" in told
    if not torch.accelerator.is_available():
        params = {"torch_adam": True, "capturable": True}
        (told,) = ranks(1).run(refused, {"type": "AdamW", "params": params})
        assert "optimizer.params.capturable" in told
        assert "remove it" in told


@pytest.mark.claims(
    "optimizer.params{type=Lion}.lr",
    "optimizer.params{type=Lion}.betas",
    "optimizer.params{type=Lion}.weight_decay",
)
def test_keys_of_lion(ranks: RankPools) -> None:
    cases: list[Case] = [
        ("lion", {"lr": 0.02}, PlainLion, {"lr": 0.02}),
        ("LION", {"betas": [0.2, 0.3]}, PlainLion, {"lr": 1e-3, "betas": (0.2, 0.3)}),
        ("Lion", {"weight_decay": 0.5}, PlainLion, {"lr": 1e-3, "weight_decay": 0.5}),
    ]
    ranks(2).run(act, cases, ("Lion", {}, PlainLion, {"lr": 1e-3}))


@pytest.mark.claims(
    "optimizer.params{type=Adagrad}.lr",
    "optimizer.params{type=Adagrad}.eps",
    "optimizer.params{type=Adagrad}.weight_decay",
    "optimizer.params{type=Adagrad}.lr_decay",
    "optimizer.params{type=Adagrad}.initial_accumulator_value",
)
def test_keys_of_adagrad(ranks: RankPools) -> None:
    given: list[dict[str, Any]] = [
        {"lr": 0.02},
        {"eps": 0.1},
        {"weight_decay": 0.5},
        {"lr_decay": 0.5},
        {"initial_accumulator_value": 2.0},
    ]
    adagrad = torch.optim.Adagrad
    cases: list[Case] = [("adagrad", one, adagrad, one) for one in given]
    ranks(2).run(act, cases, ("Adagrad", {}, adagrad, {}))


@pytest.mark.claims("optimizer.params{type=<torch.optim class>}.<keyword>", "optimizer.type")
def test_any_class_of_torch_takes_its_own_keywords(ranks: RankPools) -> None:
    sgd, rmsprop = torch.optim.SGD, torch.optim.RMSprop
    momentum = {"lr": 1e-3, "momentum": 0.9, "nesterov": True}
    cases: list[Case] = [
        ("SGD", momentum, sgd, momentum),
        ("SGD", {"lr": 1e-3, "maximize": True}, sgd, {"lr": 1e-3, "maximize": True}),
        ("RMSprop", {"lr": 0.02, "centered": True}, rmsprop, {"lr": 0.02, "centered": True}),
    ]
    ranks(2).run(act, cases, ("SGD", {"lr": 1e-3}, sgd, {"lr": 1e-3}))
    path, told = fault_of({"type": "sgd", "params": {"lr": 1.0}})
    assert path == "optimizer.type"
    assert 'did you mean "SGD"' in told
    (told,) = ranks(1).run(refused, {"type": "SGD", "params": {"lr": 1.0, "betas": [0, 0]}})
    assert "betas" in told


# ---- keys that choose nothing --------------------------------------------------------------------


def notes_of(**keys: Any) -> tuple[str, ...]:
    return load_config({**BASE, **keys}).notes


def fault_of(section: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config({**BASE, "optimizer": section})
    (fault,) = caught.value.faults
    return fault.path, fault.message


def unmoved(cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]) -> None:
    """Check that the weights are the same with and without the key."""
    for with_key, without, rest in cases:
        both = trained(with_key, **rest), trained(without, **rest)
        assert are_close(*both), with_key


@pytest.mark.claims(
    "optimizer.params{type=Adam|AdamW}.set_grad_none",
    "optimizer.params{type=Lion}.set_grad_none",
    "optimizer.params{type=Adagrad}.amsgrad",
    "optimizer.legacy_fusion",
)
def test_keys_without_effect_are_reported(ranks: RankPools) -> None:
    cases = []
    for kind, key, value in (
        ("AdamW", "set_grad_none", False),
        ("Lion", "set_grad_none", False),
        ("Adagrad", "amsgrad", True),
    ):
        section = {"type": kind, "params": {key: value}}
        (note,) = notes_of(optimizer=section)
        assert note == f"optimizer.params.{key}: {str(value).lower()} has no effect"
        cases.append((section, {"type": kind}, {}))
    section = {"type": "AdamW", "legacy_fusion": True}
    assert notes_of(optimizer=section) == ("optimizer.legacy_fusion: true has no effect",)
    cases.append((section, {"type": "AdamW"}, {}))
    ranks(1).run(unmoved, cases)


@pytest.mark.claims("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
def test_no_optimizer_needs_to_be_allowed(ranks: RankPools) -> None:
    keys = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    assert notes_of(**keys) == (
        "zero_allow_untested_optimizer: true has no effect",
        "zero_force_ds_cpu_optimizer: false has no effect",
    )
    section = {"type": "RMSprop", "params": {"lr": 0.02}}
    ranks(2).run(act, [], ("RMSprop", {"lr": 0.02}, torch.optim.RMSprop, {"lr": 0.02}))
    ranks(2).run(unmoved_by, section, keys)


def unmoved_by(section: dict[str, Any], keys: dict[str, Any]) -> None:
    for stage in (1, 3):
        assert are_close(trained(section, stage, **keys), trained(section, stage))


@pytest.mark.claims("optimizer.params.max_grad_norm")
def test_the_old_place_of_clipping_names_the_new_one() -> None:
    for kind in ("AdamW", "Lion", "Adagrad", "SGD"):
        path, told = fault_of({"type": kind, "params": {"lr": 1e-3, "max_grad_norm": 1.0}})
        assert path == "optimizer.params.max_grad_norm"
        assert "gradient_clipping" in told


def dtypes_of_state(section: dict[str, Any], changes: dict[str, Any]) -> set[str]:
    model = Leaves(SHAPES)
    engine = engine_of(0, model, optimizer=section, **changes)
    given = given_gradients(SHAPES, 0, comm.get_rank())
    engine.backward(engine([each.to(next(model.parameters()).dtype) for each in given]))
    engine.step()
    assert engine.global_steps == 1
    found = {
        str(value.dtype)
        for held in engine.optimizer.state.values()
        for key, value in held.items()
        if key != "step"
    }
    engine.destroy()
    return found


@pytest.mark.claims(
    "optimizer.params{type=Adam|AdamW}.fp32_optimizer_states",
    "optimizer.params{type=Lion}.fp32_optimizer_states",
    "optimizer.params{type=Adagrad}.fp32_optimizer_states",
)
def test_state_of_16_bit_masters_is_fp32_unless_refused(ranks: RankPools) -> None:
    coarse = {"amp": {"enabled": True, "opt_level": "O3", "loss_scale": 1.0}}
    pool = ranks(1)
    for kind in ("AdamW", "Lion", "Adagrad"):
        plain: dict[str, Any] = {"type": kind, "params": {"lr": 1e-3}}
        said = {"type": kind, "params": {"lr": 1e-3, "fp32_optimizer_states": False}}
        assert pool.run(dtypes_of_state, plain, coarse) == [{"torch.float32"}]
        assert pool.run(dtypes_of_state, said, coarse) == [{"torch.float16"}]
        # Beside fp32 masters it is fp32 either way.
        assert pool.run(dtypes_of_state, said, {"bf16": {"enabled": True}}) == [{"torch.float32"}]


# ---- resuming from a checkpoint ------------------------------------------------------------------


def go_on(section: dict[str, Any], stage: int, folder: str) -> bool:
    """Check that training that is saved and loaded in the middle ends at the same bits."""
    outcomes = []
    for is_broken_off in (False, True):
        model = Leaves(SHAPES)
        engine = engine_of(stage, model, optimizer=section)
        for step in range(2 * UPDATES):
            if is_broken_off and step == UPDATES:
                engine.save_checkpoint(folder)
                engine.destroy()
                model = Leaves(SHAPES)
                engine = engine_of(stage, model, optimizer=section)
                engine.load_checkpoint(folder)
            engine.backward(engine(given_gradients(SHAPES, step, comm.get_rank())))
            engine.step()
        engine.destroy()
        outcomes.append([leaf.detach().clone() for leaf in model.leaves])
    return all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


@pytest.mark.fast_cells("AdamW")
@pytest.mark.parametrize(
    "section",
    [
        {"type": "Lion", "params": {"lr": 0.01}},
        {"type": "AdamW", "params": {"lr": 0.01, "bias_correction": False, "amsgrad": True}},
        {"type": "Adagrad", "params": {"lr": 0.1, "lr_decay": 0.1}},
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}},
    ],
    ids=lambda section: section["type"],
)
def test_training_resumes_bit_for_bit(
    section: dict[str, Any], ranks: RankPools, tmp_path: Path
) -> None:
    for stage in (0, 3):
        assert ranks(2).run(go_on, section, stage, str(tmp_path / str(stage))) == [True] * 2


# ---- optimizers that the program hands over ------------------------------------------------------


def bring(stage: int, as_callable: bool) -> bool:
    """Groups of the program's own optimizer keep their rates and decays, and take effect."""

    def make(parameters: Any) -> Optimizer:
        leaves = list(parameters)
        return Lion(
            [
                {"params": leaves[:2], "lr": 0.02, "weight_decay": 0.3},
                {"params": leaves[2:], "betas": (0.2, 0.5)},
            ],
            lr=0.001,
        )

    model, plain = Leaves(SHAPES), Leaves(SHAPES)
    wishes = {"optimizer": make if as_callable else make(model.parameters())}
    if as_callable:
        wishes["model_parameters"] = model.parameters()
    engine = engine_of(stage, model, wishes, optimizer=None)
    leaves = list(plain.leaves)
    reference = PlainLion(
        [
            {"params": leaves[:2], "lr": 0.02, "weight_decay": 0.3},
            {"params": leaves[2:], "betas": (0.2, 0.5)},
        ],
        lr=0.001,
    )
    for step in range(UPDATES):
        engine.backward(engine(given_gradients(SHAPES, step, comm.get_rank())))
        engine.step()
        for leaf, mean in zip(leaves, mean_gradients(SHAPES, step), strict=True):
            leaf.grad = mean
        reference.step()
        # A rate that the program changes acts in the next update.
        for optimizer in (engine.optimizer, reference):
            optimizer.param_groups[1]["lr"] *= 3
    engine.destroy()
    return are_close([leaf.detach() for leaf in model.leaves], [leaf.detach() for leaf in leaves])


@pytest.mark.parametrize("as_callable", [False, True])
def test_groups_of_the_programs_own_optimizer_take_effect(
    as_callable: bool, ranks: RankPools
) -> None:
    for stage in (0, 3):
        assert ranks(2).run(bring, stage, as_callable) == [True] * 2
