"""Muon, compared with its formulas on singular values instead of Newton-Schulz products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from engine.toys import Leaves, assert_equal, engine_of, given_gradients, mean_gradients
from hypothesis import given, settings, strategies as st
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from hadal import comm
from hadal.errors import ConfigError, OptimizerError
from hadal.optim.build import build_optimizer
from hadal.optim.muon import Muon, MuonStepper, muon_groups, orthogonalized
from hadal.optim.whole import WholeParameters

WIDE = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}
SHAPES = {
    "square": (4, 4),
    "tokenEmbedding": (6, 4),
    "tall": (9, 2),
    "bias": (7,),
    "wide": (2, 11),
    "LM_head": (6, 4),
    "empty": (0, 2),
    "convolution": (4, 3, 2),
    "scale": (),
    "one": (1, 1),
}
MATRICES = ["square", "tall", "wide", "empty", "convolution", "one"]
UPDATES = 3


class Named(Leaves):
    """A model with the parameters of `SHAPES` under their names."""

    def __init__(self) -> None:
        super().__init__(list(SHAPES.values()))
        for name, leaf in zip(SHAPES, self.leaves, strict=True):
            self.register_parameter(name, leaf)
        named = [self._parameters[name] for name in SHAPES]
        del self.leaves
        self._order = named

    @property
    def leaves(self) -> list[Any]:  # type: ignore[override]
        return self._order


def svd_orthogonalized(matrix: Tensor) -> Tensor:
    """Apply five steps of the quintic iteration to the singular values, in float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


class Reference:
    """One tensor under Muon or Adam, in float64."""

    def __init__(self, weight: Tensor, use_muon: bool, options: dict[str, Any]) -> None:
        self.o = {"weight_decay": 0.0, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-10}
        self.o |= {"lr": 0.02 if use_muon else 3e-4, **options}
        own = options.get("muon_lr" if use_muon else "adam_lr")
        self.o["lr"] = self.o["lr"] if own is None else own
        self.use_muon, self.weight, self.count = use_muon, weight.double(), 0
        self.m, self.v = torch.zeros_like(self.weight), torch.zeros_like(self.weight)

    def step(self, gradient: Tensor) -> None:
        o, g = self.o, gradient.double()
        self.count += 1
        self.weight = self.weight * (1 - o["lr"] * o["weight_decay"])
        if not self.use_muon:
            beta1, beta2 = o["betas"]
            self.m = beta1 * self.m + (1 - beta1) * g
            self.v = beta2 * self.v + (1 - beta2) * g * g
            m, v = self.m / (1 - beta1**self.count), self.v / (1 - beta2**self.count)
            self.weight = self.weight - o["lr"] * m / (v.sqrt() + o["eps"])
        elif g.numel():
            momentum = o["momentum"]
            self.m = momentum * self.m + (1 - momentum) * g
            ahead = (1 - momentum) * g + momentum * self.m
            flat = ahead.reshape(len(ahead), -1)
            rows, columns = flat.shape
            update = svd_orthogonalized(flat).reshape(g.shape)
            self.weight = self.weight - o["lr"] * max(1, rows / columns) ** 0.5 * update


OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.05, "ns_method": "standard", "weight_decay": 0.1},
    {"lr": 0.05, "muon_lr": 0.1, "momentum": 0.5, "betas": (0.5, 0.8)},
    {"adam_lr": 0.01, "eps": 0.1},
]


def references_of(model: Named, options: dict[str, Any]) -> dict[str, Reference]:
    return {
        name: Reference(p.detach(), name in MATRICES, options)
        for name, p in model.named_parameters()
    }


def json_of(options: dict[str, Any]) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in options.items()}


def train_engine(stage: int, precision: str, options: dict[str, Any]) -> Any:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = Named()
    references = references_of(model, options)
    section = {"type": "muon", "params": json_of(options)}
    engine = engine_of(stage, model, optimizer=section, **(WIDE if precision == "bf16" else {}))
    assert type(engine.stepper) is MuonStepper
    shapes = list(SHAPES.values())
    for update in range(UPDATES):
        means = mean_gradients(shapes, update)
        for one, mean in zip(references.values(), means, strict=True):
            one.step(mean)
        given = given_gradients(shapes, update, comm.get_rank())
        engine.backward(engine([gradient.to(dtype) for gradient in given]))
        engine.step()
    return engine, model, references


def train_as_the_reference(stage: int, precision: str, options: dict[str, Any]) -> None:
    engine, model, references = train_engine(stage, precision, options)
    engine.destroy()
    for name, parameter in model.named_parameters():
        found, expected = parameter.detach().double(), references[name].weight
        # Products in float32 stray from the singular values by what five steps make of 1e-7.
        allowed = 1e-5 + 1e-5 * expected.abs()
        if precision == "bf16":
            allowed = allowed + 2.0**-8 * expected.abs()
        assert bool(((found - expected).abs() <= allowed).all()), (stage, name, options)


@pytest.mark.fast_cells("0-1", "2-3", "3-1")
@pytest.mark.claims(
    "optimizer.params{type=Muon}.lr",
    "optimizer.params{type=Muon}.momentum",
    "optimizer.params{type=Muon}.weight_decay",
    "optimizer.params{type=Muon}.muon_lr",
    "optimizer.params{type=Muon}.adam_lr",
    "optimizer.params{type=Muon}.betas",
    "optimizer.params{type=Muon}.eps",
    "optimizer.params{type=Muon}.ns_method",
)
@every(stage=[0, 1, 2, 3], world=[1, 2, 3])
@on_ranks("world")
def test_every_stage_steps_like_one_process(stage: int) -> None:
    for options in OPTIONS:
        train_as_the_reference(stage, "fp32", options)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_are_stepped_in_bf16_training(stage: int, ranks: RankPools) -> None:
    ranks(2).run(train_as_the_reference, stage, "bf16", {"weight_decay": 0.1})


# ---- the iteration ------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10_000))
def test_both_methods_are_the_quintic_iteration(rows: int, columns: int, seed: int) -> None:
    # In float64: a Gram matrix squares what float32 rounds, where singular values lie far apart.
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    expected = svd_orthogonalized(matrix)
    for method in ("standard", "gram"):
        found = orthogonalized(matrix, method)
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9), method


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_singular_values_come_near_one(method: str) -> None:
    matrix = torch.randn(24, 60, generator=torch.Generator().manual_seed(1)) * 1e-3
    values = torch.linalg.svdvals(orthogonalized(matrix, method))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_matrix_of_low_rank_or_of_zeros_stays_finite(method: str) -> None:
    generator = torch.Generator().manual_seed(2)
    thin = torch.randn(40, 2, generator=generator) @ torch.randn(2, 50, generator=generator)
    values = torch.linalg.svdvals(orthogonalized(thin, method))
    assert 0.6 < float(values[1]) <= float(values[0]) < 1.3
    assert float(values[2]) < 1e-2
    assert torch.equal(orthogonalized(torch.zeros(3, 5), method), torch.zeros(3, 5))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        engine_of(0, Named(), optimizer={"type": "Muon", "params": {"ns_method": "cubic"}})
    (fault,) = caught.value.faults
    assert fault.path == "optimizer.params.ns_method"
    assert '"gram", "standard" or null' in fault.message
    with pytest.raises(OptimizerError, match="'cubic'; expected one of None, 'gram', 'standard'"):
        Muon([], ns_method="cubic")


# ---- which parameters ---------------------------------------------------------------------------


def test_matrices_are_known_by_shape_and_name() -> None:
    model = Named()
    names = {parameter: name for name, parameter in model.named_parameters()}
    muon, adam = muon_groups(model.parameters(), names)
    assert [names[p] for p in muon["params"]] == MATRICES
    assert muon["use_muon"]
    assert not adam["use_muon"]
    assert len(muon["params"]) + len(adam["params"]) == len(SHAPES)
    assert [len(g["params"]) for g in muon_groups(model.named_parameters(), names)] == [6, 4]


def test_the_callers_groups_are_divided_and_keep_their_options() -> None:
    model = Named()
    names = {parameter: name for name, parameter in model.named_parameters()}
    first, second = list(model.parameters())[:4], list(model.parameters())[4:]
    groups = muon_groups(
        [
            {"params": first, "weight_decay": 0.5},
            {"params": second[3], "use_muon": False, "lr": 0.7},
            {"params": second[0]},
        ],
        names,
    )
    made = build_optimizer("Muon", {"lr": 0.1}, groups).param_groups
    assert [g["use_muon"] for g in made] == [True, False, False, True]
    assert [g["lr"] for g in made] == [0.1, 0.1, 0.7, 0.1]
    assert [g["weight_decay"] for g in made] == [0.5, 0.5, 0.0, 0.0]


def test_rates_fall_back_to_each_other() -> None:
    model = Named()
    names = {parameter: name for name, parameter in model.named_parameters()}

    def rates(**params: float) -> list[float]:
        groups = muon_groups(model.parameters(), names)
        return [g["lr"] for g in build_optimizer("Muon", params, groups).param_groups]

    assert rates() == [0.02, 3e-4]
    assert rates(lr=0.1) == [0.1, 0.1]
    assert rates(lr=0.1, muon_lr=0.2) == [0.2, 0.1]
    assert rates(adam_lr=0.0) == [0.02, 0.0]


def test_groups_without_use_muon_are_refused() -> None:
    vector = nn.Parameter(torch.ones(3))
    with pytest.raises(OptimizerError, match="use_muon None: use True for matrices"):
        Muon([vector])
    with pytest.raises(OptimizerError, match=r"shape \(3,\).*use_muon False"):
        Muon([{"params": [vector], "use_muon": True}])


# ---- offloading ---------------------------------------------------------------------------------


def shared_state(stage: int) -> tuple[int, int, list[int]]:
    """Return the elements of momentum and of Adam's moments, and the matrices this rank owns."""
    engine, _, _ = train_engine(stage, "fp32", {})
    optimizer = engine.optimizer
    state = [optimizer.state[p] for g in optimizer.param_groups for p in g["params"]]
    momentum = [s["momentum_buffer"].numel() for s in state if "momentum_buffer" in s]
    moments = sum(s["exp_avg"].numel() for s in state if "exp_avg" in s)
    engine.destroy()
    return sum(momentum), moments, momentum


@pytest.mark.parametrize("stage", [1, 3])
def test_state_is_distributed(stage: int, ranks: RankPools) -> None:
    """Each matrix has one owner, and vectors are cut evenly."""
    results = ranks(2).run(shared_state, stage)
    matrices = [16, 18, 22, 24, 1]
    assert sorted(numel for _, _, owned in results for numel in owned) == sorted(matrices)
    assert abs(results[0][0] - results[1][0]) <= max(matrices)
    assert sum(moments for _, moments, _ in results) >= 24 + 24 + 7 + 1


def train_a_little(engine: Any, updates: range) -> None:
    for update in updates:
        gradients = given_gradients(list(SHAPES.values()), update, comm.get_rank())
        engine.backward(engine([g.to(engine.module.square.dtype) for g in gradients]))
        engine.step()


def go_on(stage: int, precision: dict[str, Any], folder: str) -> None:
    def fresh() -> Any:
        section = {"type": "Muon", "params": {"lr": 0.05}}
        return engine_of(stage, Named(), optimizer=section, **precision)

    through = fresh()
    train_a_little(through, range(3))
    through.save_checkpoint(folder)
    train_a_little(through, range(3, 6))
    expected = through.state_dict()
    through.destroy()
    again = fresh()
    train_a_little(again, range(7, 9))  # what it knew before must not matter
    again.load_checkpoint(folder)
    train_a_little(again, range(3, 6))
    assert_equal(again.state_dict(), expected)
    again.destroy()


@pytest.mark.fast_cells("fp32")
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_training_resumes_from_a_checkpoint(
    precision: dict[str, Any], ranks: RankPools, tmp_path: Path
) -> None:
    for stage in (0, 1, 3):
        ranks(2).run(go_on, stage, precision, str(tmp_path / str(stage)))


def test_a_model_without_hidden_matrices() -> None:
    """A model without hidden matrices is stepped by Adam alone."""
    wholes = WholeParameters(torch.optim.SGD([torch.zeros(1)]))
    wholes.add([])
    wholes.to_owners(1.0)
    wholes.to_shards()
    assert not wholes.values
