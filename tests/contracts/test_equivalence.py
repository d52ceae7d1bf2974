"""Same numbers: every stage trains as one process of plain PyTorch does.

The matrix of `cells.py`, each cell against the reference of `reference.py` (a parameter that got no
gradient anywhere in an update counts as having one of zero; see there). A pairwise cover runs
always, the full product with `--full` or HADAL_FULL=1. Compared after three updates: every weight
on every rank, each rank's losses, the reported norms and clip coefficients, and what evaluation
between updates saw.

How far a cell may stray:

fp32. Per tensor |w - w_ref| <= 1e-5 * max|w_ref - w_start|, the promise, plus `ULPS` units in the
last place of the weight itself. The latter is no allowance for Hadal but for fp32: each update
writes the weight twice (decay, then step), each write rounds to half a unit, so two writers whose
updates differ in the last bit may part by one unit per write.

16 bit. A gradient is rounded once per micro-step added and per rank reduced, once where the loss is
scaled, and once where it is clipped: n times, each by at most u = 2^-8 (bf16) or 2^-11 (fp16) of
the terms' magnitude. Rounding errors are independent, so they add up to sqrt(n) * u rather than
n * u. `Outcome.rounding` is how far a tensor would move if an error of the terms' whole magnitude
hit its largest gradient with the same sign in every update; the bound is its product with
sqrt(n) * u, plus u * |w| because the final weight is read in 16 bit. `bf16wide` accumulates and
reduces in fp32: the only roundings left are that of the scaled loss, and those of weights which
fall on the other side of a rounding boundary. Under `autocast` weights are fp32, and
read as such. All this is doubled (`FEEDBACK`): a weight that is off by a rounding also changes the
gradients of later updates, by as much again.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from cases import every
from ranks import RankPools

from . import cells, models
from .cells import (
    ALWAYS,
    COMPILATIONS,
    COMPILED,
    COVERED,
    FACTORS,
    LEVELS,
    accumulation_of,
    cell_named,
    cells_of_nodes,
    config_of,
    id_of,
    world_of,
)
from .cover import Cell, every_cell, pairwise_cover
from .models import Moment, batch_at, built, loss_of
from .reference import Outcome, norm_of, trained_by_reference
from .training import (
    OVERFLOWN,
    SCALES,
    SCALES_AT_0,
    SMALL_STEPS,
    trained_by_hadal,
    trained_by_small_steps,
    trained_compiled,
    trained_through_overflow,
)

ULPS = 2 * cells.UPDATES
FEEDBACK = 2
DEPTH = 4  # layers that an output passes; each may add an error of its own weights' size
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "bf16wide": 2.0**-8, "fp16": 2.0**-11, "autocast": 2.0**-8}
FP32_PROMISE = 1e-5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per cell, those of a world size together, so that one pool runs at a time."""
    if "cell" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full", default=False) or "HADAL_FULL" in os.environ
        chosen = list(every_cell(LEVELS) if full else pairwise_cover(COVERED))
        chosen += [cell for cell in cells_of_nodes() if cell not in chosen]
        chosen += [cell for cell in map(cell_named, sorted(ALWAYS)) if cell not in chosen]
        metafunc.parametrize("cell", sorted(chosen, key=world_of), ids=id_of)


@pytest.mark.claims("zero_optimization.stage")
def test_every_stage_trains_as_one_process_does(cell: Cell, ranks: RankPools) -> None:
    """The cell's model, trained by all ranks together, is what one process trains."""
    is_rounded = cell["precision"] == "autocast" and cell["model"] == "lstm"
    if is_rounded and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch runs no LSTM under autocast on a processor without AVX-512")
    expected = trained_by_reference(cell)
    for rank, got in enumerate(ranks(world_of(cell)).run(trained_by_hadal, cell)):
        faults = faults_of(cell, rank, got, expected)
        assert not faults, f"rank {rank} of {id_of(cell)}:\n" + "\n".join(faults)


@pytest.mark.fast_cells(
    "stage0-bf16-acc1-clip-w2-tied-tiny-adamw-usual-engine.compile",
    "stage3-fp32-acc1-clip-w2-checkpointed-tiny-sgd-usual-engine.compile",
)
@every(name=COMPILED, compilation=COMPILATIONS)
def test_a_compiled_model_trains_as_one_process_does(
    name: str, compilation: str, ranks: RankPools
) -> None:
    """Some cells once more, with graphs in the place of the model's own code."""
    cell = cell_named(name)
    expected = trained_by_reference(cell)
    runs = ranks(world_of(cell)).run(trained_compiled, cell, compilation)
    for rank, (got, graphs) in enumerate(runs):
        faults = faults_of(cell, rank, got, expected)
        assert not faults, f"rank {rank} of {name}, {compilation}:\n" + "\n".join(faults)
        assert graphs > 0


def faults_of(cell: Cell, rank: int, got: Outcome, expected: Outcome) -> list[str]:
    """Each thing that strays further than the module's docstring allows, in words."""
    faults = [] if got.skipped == 0 else [f"{got.skipped} updates were skipped"]
    if set(got.weights) != set(expected.weights):
        return [*faults, f"parameters differ: {set(got.weights) ^ set(expected.weights)}"]
    faults += weight_faults(cell, got, expected)
    faults += update_faults(cell, got, expected)
    faults += output_faults(cell, got.losses[rank], expected.losses[rank])
    for index, outputs in enumerate(expected.evaluations):
        values = got.evaluations[index].flatten().tolist()
        faults += output_faults(cell, values, outputs.flatten().tolist(), f"evaluation {index}: ")
    return faults


def weight_faults(cell: Cell, got: Outcome, expected: Outcome) -> list[str]:
    """The weights that ended elsewhere."""
    faults = []
    for name, value in expected.weights.items():
        error = (got.weights[name] - value).abs()
        # Written so that a NaN is a fault too.
        if not bool((error <= weight_tolerance(cell, name, expected)).all()):
            moved = (value - expected.start[name]).abs().max()
            share = error.max() / moved
            faults.append(f"{name}: off by {error.max():.3e}, {share:.1e} of its largest change")
    return faults


def update_faults(cell: Cell, got: Outcome, expected: Outcome) -> list[str]:
    """The norms and clip coefficients that were reported otherwise."""
    faults = []
    for index, norm in enumerate(expected.norms):
        allowed, reported = norm_tolerance(cell, index, expected), got.norms[index]
        if not abs(reported - norm) <= allowed:
            faults.append(f"update {index}: grad norm {reported:.8g}, expected {norm:.8g}")
        coefficient, reported = expected.coefficients[index], got.coefficients[index]
        if not abs(reported - coefficient) <= 2 * coefficient * allowed / norm:
            faults.append(f"update {index}: coefficient {reported}, expected {coefficient}")
    return faults


def output_faults(
    cell: Cell, got: list[float], expected: list[float], prefix: str = "loss "
) -> list[str]:
    """The losses, or elements of an output, that came out otherwise."""
    allowed = output_tolerance(cell)
    pairs = enumerate(zip(got, expected, strict=True))
    return [
        f"{prefix}{index}: {reported:.8g}, expected {value:.8g}"
        for index, (reported, value) in pairs
        if not abs(reported - value) <= allowed * max(1.0, abs(value))
    ]


def rounding_of(cell: Cell) -> float:
    """The relative error of a 16-bit gradient: sqrt(n) * u, and what it does to later ones."""
    wide = cell["precision"] == "bf16wide"
    times = 2 if wide else 2 + accumulation_of(cell) + world_of(cell)
    return FEEDBACK * math.sqrt(times) * UNIT_ROUNDOFF[cell["precision"]]


def weight_tolerance(cell: Cell, name: str, expected: Outcome) -> torch.Tensor:
    """The tolerance of each element of a weight."""
    value = expected.weights[name]
    if cell["precision"] == "fp32":
        moved = (value - expected.start[name]).abs().max() if value.numel() else 0.0
        return FP32_PROMISE * moved + ULPS * torch.finfo(torch.float32).eps * value.abs()
    read_in = cells.compute_dtype_of(cell)
    unit = torch.finfo(read_in).eps / 2
    drift = rounding_of(cell) * expected.rounding.get(name, 0.0)
    return drift + unit * value.abs() + 2.0**-24


def norm_tolerance(cell: Cell, index: int, expected: Outcome) -> float:
    """The tolerance of a reported norm."""
    if cell["precision"] == "fp32":
        return FP32_PROMISE * expected.norms[index]
    return rounding_of(cell) * expected.norm_rounding[index]


def output_tolerance(cell: Cell) -> float:
    """The tolerance of a loss or an output, relative to its size or to 1."""
    if cell["precision"] == "fp32":
        return FP32_PROMISE
    return DEPTH * rounding_of(cell)


# What the matrix does not ask: overflow, and whether masters are kept.


def test_an_overflow_is_skipped_the_same_way_at_every_stage(ranks: RankPools) -> None:
    """Skipped updates and weights do not depend on the stage; the scale has its two machines."""
    runs = {
        (stage, world_size): run
        for world_size in (1, 2)
        for stage in range(4)
        for run in ranks(world_size).run(trained_through_overflow, stage)
    }
    for place, run in runs.items():
        assert run["skipped"] == sum(OVERFLOWN), place
        assert run["scales"] == (SCALES if place[0] else SCALES_AT_0), place
        assert run["infinite"] == OVERFLOWN, place
        assert run["weight"] == pytest.approx(runs[0, 1]["weight"], rel=2**-10, abs=1e-4), place


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_masters_keep_more_digits_than_16_bit_weights(
    stage: int, world_size: int, precision: str, ranks: RankPools
) -> None:
    """Updates too small for a 16-bit weight add up, starting from the weight as it was given."""
    unit = {"bf16": 2.0**-7, "fp16": 2.0**-10}[precision]  # in the last place, just above 1
    # Cast, the start is 1. Masters cast first would end at 1 - unit; no masters, still at 1.
    start, step = 1 + 0.45 * unit, unit / SMALL_STEPS
    run = ranks(world_size).run(trained_by_small_steps, stage, precision, start, step)
    assert run == [[1 - 0.5 * unit] * 4] * world_size


# The rest of this file is about the reference and the matrix themselves.

PLAIN = {
    "stage": "stage0",
    "precision": "fp32",
    "accumulation": "acc3",
    "clipping": "clip",
    "world": "w3",
    "model": "plain",
    "keys": "tiny",
    "optimizer": "sgd",
    "wire": "usual",
}


def test_the_reference_is_one_big_batch() -> None:
    """Averaging over ranks and micro-steps is training on all their rows at once."""
    subject = models.SUBJECTS["plain"]
    model = built(subject)
    kind, settings = cells.optimizer_of(PLAIN)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
    norms = []
    for update in range(cells.UPDATES):
        batches = [
            batch_at(subject, Moment(rank, update, micro))
            for micro in range(3)
            for rank in range(3)
        ]
        inputs = torch.cat([batch.inputs for batch in batches])
        loss_of(model(inputs), torch.cat([batch.targets for batch in batches])).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cells.MAX_NORM)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    expected = trained_by_reference(PLAIN)
    assert norms == pytest.approx(expected.norms, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected.weights[name])


@pytest.mark.parametrize("model", LEVELS["model"])
@pytest.mark.parametrize("optimizer", LEVELS["optimizer"])
def test_clipping_clips_and_every_trained_weight_moves(model: str, optimizer: str) -> None:
    """No cell is true for want of anything happening in it."""
    expected = trained_by_reference({**PLAIN, "model": model, "optimizer": optimizer})
    assert max(expected.coefficients) < 1
    assert min(expected.norms) > 0
    frozen = {
        name for name, p in built(models.SUBJECTS[model]).named_parameters() if not p.requires_grad
    }
    for name, value in expected.weights.items():
        still = torch.equal(value, expected.start[name])
        assert still == (name in frozen or value.numel() == 0), name


@pytest.mark.parametrize("precision", UNIT_ROUNDOFF)
@pytest.mark.parametrize("optimizer", LEVELS["optimizer"])
def test_16_bit_bounds_are_far_below_the_update(precision: str, optimizer: str) -> None:
    """A bound as large as what training does would accept a model that was never trained."""
    cell = {**PLAIN, "precision": precision, "optimizer": optimizer, "clipping": "free"}
    expected = trained_by_reference(cell)
    drifts = {
        name: weight_tolerance(cell, name, expected).max()
        / (value - expected.start[name]).abs().max()
        for name, value in expected.weights.items()
    }
    assert max(drifts.values()) < 0.25, drifts


def test_every_departure_is_taken_by_some_cell() -> None:
    """The table of departures holds nothing that no cell needs any more."""
    for name, departure in cells.DEPARTURES.items():
        assert any(departure.applies(cell) for cell in every_cell(LEVELS)), name
        assert departure.reason


def test_a_cell_matches_its_name() -> None:
    """Levels of different factors add up to one configuration."""
    config = config_of({**PLAIN, "stage": "stage3"})
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["reduce_bucket_size"] == 200
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == cells.MAX_NORM
    assert set(PLAIN) == set(FACTORS)


def test_norm_of_nothing_is_zero() -> None:
    """An empty parameter does not break the norm."""
    assert norm_of([torch.zeros(0)]) == 0.0
