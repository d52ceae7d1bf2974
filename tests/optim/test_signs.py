"""1-bit Adam, 1-bit Lamb and 0/1 Adam in an engine, compared with their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import every
from engine.toys import Leaves, engine_of
from ranks import RankPools, on_ranks
from torch import Tensor

from hadal import comm
from hadal.zero.bucket import Bucket
from optim.papers import PAPERS, Paper

SHAPES = ((5, 3), (), (7,), (0, 2), (1,), (2, 3, 4), (33,), (3,), (40, 40))
UPDATES = 12
WARM_UP = 3
SOONER: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": WARM_UP},
    "OneBitLamb": {"freeze_step": WARM_UP, "coeff_beta": 0.5},
    "ZeroOneAdam": {
        "var_freeze_step": 5,
        "var_update_scaler": 2,
        "local_step_scaler": 1,
        "local_step_clipper": 3,
    },
}
KINDS = tuple(SOONER)
# A variance of few updates is tiny where these brought little, and what is divided by its root
# would show every rounding.
FIRST = {"lr": 0.02, "eps": 1e-3}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    },
    "fp16": {
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    },
}


def gradients_of(update: int, rank: int) -> list[Tensor]:
    """Return gradients exact in all dtypes, odd on rank 0 only, so that no mean is zero."""
    generator = torch.Generator().manual_seed(100 * update + rank)
    made = [torch.randint(-60, 61, shape, generator=generator) for shape in SHAPES]
    return [(2 * one + (rank == 0)) / 64 for one in made]


def engine_with(kind: str, options: dict[str, Any], **changes: Any) -> Any:
    params = {**FIRST, **SOONER[kind], **options}
    return engine_of(0, Leaves(SHAPES), optimizer={"type": kind, "params": params}, **changes)


def laid(bucket: Bucket, values: list[Tensor], leaves: list[torch.nn.Parameter]) -> Tensor:
    """Return one value for each leaf, laid out as in a bucket."""
    flat = torch.zeros(bucket.layout.numel)
    for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
        index = next(number for number, leaf in enumerate(leaves) if leaf is parameter)
        flat[slot.offset : slot.stop] = values[index].flatten()
    return flat


def papers_of(engine: Any, kind: str, options: dict[str, Any]) -> dict[Bucket, Paper]:
    buckets = [one.bucket for one in engine._parts.runtime.gradients]
    params = {**FIRST, **SOONER[kind], **options}
    size = comm.get_world_size()
    return {b: PAPERS[kind](b.layout, b.master.detach(), size, params) for b in buckets}


def step_together(
    engine: Any,
    papers: dict[Bucket, Paper],
    update: int,
    clips: float = 1.0,
    lr: float | None = None,
) -> None:
    """Make one update of the engine and of the reference, and compare."""
    if lr is not None:
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
    rank, leaves = comm.get_rank(), list(engine.module.leaves)
    of_ranks = [gradients_of(update, one) for one in range(comm.get_world_size())]
    dtype = leaves[0].dtype
    engine.backward(engine([one.to(dtype) for one in of_ranks[rank]]))
    engine.step()
    for bucket, paper in papers.items():
        paper.step([laid(bucket, one, leaves) * clips for one in of_ranks], lr)
        found, known = bucket.master.detach(), paper.weights[rank]
        allowed = 2e-5 * known.abs() + 2e-5
        assert bool(((found - known).abs() <= allowed).all()), (bucket.name, update)
        assert torch.equal(bucket.full, found.to(bucket.full.dtype))


def as_in_the_paper(kind: str, precision: str, options: dict[str, Any]) -> None:
    engine = engine_with(kind, options, **PRECISIONS[precision])
    papers = papers_of(engine, kind, options)
    assert len(papers) > 1
    for update in range(UPDATES):
        step_together(engine, papers, update)
        if kind == "OneBitLamb":
            ratios = sorted(ratio for paper in papers.values() for ratio in paper.ratios)
            found = engine.optimizer.get_lamb_coeffs()
            assert sorted(found) == pytest.approx(ratios, rel=1e-3)
    engine.destroy()


@pytest.mark.fast_cells("OneBitAdam-1", "OneBitAdam-4")
@every(kind=list(KINDS), world=[1, 2, 3, 4])
def test_each_update_is_that_of_the_paper(ranks: RankPools, kind: str, world: int):
    ranks(world).run(as_in_the_paper, kind, "fp32", {"weight_decay": 0.1})


@pytest.mark.fast_cells("OneBitLamb-fp16")
@every(kind=list(KINDS), precision=["bf16", "fp16"])
def test_in_16_bits(ranks: RankPools, kind: str, precision: str):
    ranks(2).run(as_in_the_paper, kind, precision, {})


@pytest.mark.fast_cells("OneBitLamb")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_at_changing_learning_rates(kind: str) -> None:
    """Use another rate for each update: the sum between two exchanges scales the movement."""
    engine = engine_with(kind, {"weight_decay": 0.1})
    papers = papers_of(engine, kind, {"weight_decay": 0.1})
    for update in range(UPDATES):
        step_together(engine, papers, update, lr=0.02 / (1 + update % 4))
    engine.destroy()


VARIANTS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (KINDS, {"lr": 0.005}),
    (KINDS, {"betas": (0.7, 0.95)}),
    (KINDS, {"eps": 0.05}),
    (KINDS, {"eps_inside_sqrt": True, "eps": 0.05}),
    (KINDS, {"weight_decay": 0.3}),
    (("OneBitAdam", "OneBitLamb"), {"freeze_step": 5}),
    (("OneBitLamb",), {"max_coeff": 0.5}),
    (("OneBitLamb",), {"min_coeff": 3.0}),
    (("OneBitLamb",), {"coeff_beta": 0.9}),
    (("OneBitLamb",), {"factor_max": 0.9}),
    (("OneBitLamb",), {"factor_min": 1.06, "factor_threshold": 0.3}),
    (("OneBitLamb",), {"factor_threshold": 0.01}),
    (("ZeroOneAdam",), {"var_freeze_step": 7}),
    (("ZeroOneAdam",), {"var_update_scaler": 1}),
    (("ZeroOneAdam",), {"local_step_scaler": 2}),
    (("ZeroOneAdam",), {"local_step_clipper": 2, "var_freeze_step": 2}),
]


def a_key_acts(kind: str, options: dict[str, Any]) -> None:
    """Check that options act as in the paper, and otherwise without the first one."""
    engine = engine_with(kind, options)
    papers = papers_of(engine, kind, options)
    without = papers_of(engine, kind, dict(list(options.items())[1:]))
    for update in range(UPDATES):
        step_together(engine, papers, update)
        leaves = list(engine.module.leaves)
        of_ranks = [gradients_of(update, one) for one in range(comm.get_world_size())]
        for bucket, paper in without.items():
            paper.step([laid(bucket, one, leaves) for one in of_ranks])
    moved = [(b.master - paper.weights[0]).abs().max() for b, paper in without.items()]
    assert float(max(moved)) > 1e-4, options
    engine.destroy()


@pytest.mark.slow
@pytest.mark.claims(
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.lr",
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.betas",
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.eps",
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.eps_inside_sqrt",
    "optimizer.params{type=OneBitAdam|ZeroOneAdam|OneBitLamb}.weight_decay",
    "optimizer.params{type=OneBitAdam|OneBitLamb}.freeze_step",
    "optimizer.params{type=ZeroOneAdam}.var_freeze_step",
    "optimizer.params{type=ZeroOneAdam}.var_update_scaler",
    "optimizer.params{type=ZeroOneAdam}.local_step_scaler",
    "optimizer.params{type=ZeroOneAdam}.local_step_clipper",
    "optimizer.params{type=OneBitLamb}.coeff_beta",
    "optimizer.params{type=OneBitLamb}.factor_max",
    "optimizer.params{type=OneBitLamb}.factor_min",
    "optimizer.params{type=OneBitLamb}.factor_threshold",
    "optimizer.params{type=Lamb|OneBitLamb}.max_coeff",
    "optimizer.params{type=Lamb|OneBitLamb}.min_coeff",
)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_every_key_acts_as_in_the_paper(kind: str) -> None:
    for kinds, options in VARIANTS:
        if kind in kinds:
            a_key_acts(kind, options)
