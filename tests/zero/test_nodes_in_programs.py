"""Programs on nodes: what holds of any engine holds with copies of weights, or of all states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from engine import toys
from engine.test_topology import cut_sequences
from engine.toys import engine_of
from ranks import RankPools, on_ranks
from torch import Tensor

import hadal
from hadal import comm
from hadal.comm import Ranks
from hadal.errors import ConfigError, UsageError
from hadal.utils import safe_get_full_optimizer_state

from .nodes import HOPS, HPZ, MICS, node_engine, nodes_of
from .test_gathering import (
    CUT,
    DROPS,
    LIMITS,
    blocks,
    one_step,
    raise_and_retry,
    random_rows,
    train_along,
)
from .test_runtime import PLANS, train_along as train_branches
from .test_state import (
    read_gradients,
    read_moments,
    read_values,
    write_gradients,
    write_inside_gathered,
    write_moments,
    write_values,
)


@pytest.mark.fast_cells("3")
@pytest.mark.parametrize("seed", range(6))
def test_any_paths_train_as_plain_torch_does(seed: int, ranks: RankPools) -> None:
    routes = [HPZ, MICS, {**HPZ, **HOPS}][seed % 3]
    settings = {**LIMITS[(seed + 1) % 5], **routes}
    ranks(4).run(on_nodes, train_along, random_rows(seed, 4, 4), settings)


ROUTES = {"hpz": HPZ, "mics": MICS}


@pytest.mark.fast_cells("one rank is late-hpz")
@every(plan=list(PLANS), route=list(ROUTES))
def test_gradients_that_come_late_or_not_at_all(plan: str, route: str, ranks: RankPools) -> None:
    rows = [(*row, *row[::-1]) for row in PLANS[plan]]
    ranks(4).run(under, ROUTES[route], train_branches, rows, 3)


@pytest.mark.fast_cells("mics")
@pytest.mark.parametrize("settings", [HPZ, MICS], ids=["hpz", "mics"])
def test_small_parameters_that_stay_whole(settings: dict[str, Any], ranks: RankPools) -> None:
    persistent = {**settings, "stage3_param_persistence_threshold": 20}
    rows = [(*row, *row[::-1]) for row in PLANS["by rank"]]
    ranks(4).run(under, persistent, train_branches, rows, 3)
    for check in (read_gradients, write_gradients):
        ranks(4).run(under, persistent, check, 3, {}, 2)


def own_the_boundary(settings: dict[str, Any]) -> None:
    """Gradients of copies meet in the step if no backward is known to be the last."""
    zero = {**toys.TINY, **settings}
    keys = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
    engine = engine_of(3, zero_optimization={"stage": 3, **zero}, **keys)
    updates = [[0, 1], [2, 3], [4, 5]]
    for micro_steps in updates:
        for step in micro_steps:
            toys.backward(engine, step)
        engine.step()
    toys.assert_close(engine.state_dict(), toys.alone(toys.model_of(), updates))
    engine.destroy()


def test_the_boundary_may_be_unknown(ranks: RankPools) -> None:
    ranks(4).run(own_the_boundary, MICS)


@pytest.mark.fast_cells("mics")
@pytest.mark.parametrize("settings", [HPZ, MICS, {**HPZ, **HOPS}], ids=["hpz", "mics", "hops"])
def test_a_forward_that_raises_under_a_plan(settings: dict[str, Any], ranks: RankPools) -> None:
    ranks(4).run(on_nodes, raise_and_retry, (1,), {**DROPS, **settings})


def on_nodes(check: Callable[..., None], *args: Any) -> None:
    with nodes_of(2):
        check(*args)


def under(settings: dict[str, Any], check: Callable[..., None], *args: Any) -> None:
    """Run a check of engines whose settings it chooses itself under these settings too."""
    before = dict(toys.TINY)
    toys.TINY.update(settings)
    try:
        on_nodes(check, *args)
    finally:
        toys.TINY.clear()
        toys.TINY.update(before)


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_what_stands_behind_a_parameter(route: str, ranks: RankPools) -> None:
    for check, *args in (
        (read_values, 3, {}, True),
        (read_gradients, 3, {}, 3),
        (read_moments, 3, {}, True),
        (write_values, 3, {}, False),
        (write_inside_gathered, 3),
        (write_gradients, 3, {}, 2),
        (write_moments, 3, False),
    ):
        ranks(4).run(under, ROUTES[route], check, *args)


@pytest.mark.fast_cells("mics")
@pytest.mark.parametrize("settings", [HPZ, MICS], ids=["hpz", "mics"])
def test_ranks_that_share_a_sequence(settings: dict[str, Any], ranks: RankPools) -> None:
    ranks(4).run(under, settings, cut_sequences, 3, 2, "key")


# ---- created sharded ----------------------------------------------------------------------------


def born(arguments: dict[str, Any], size: int | None, zero: dict[str, Any]) -> list[Tensor]:
    if size is not None:
        near, _ = Ranks.world().in_blocks(size)
        arguments = {**arguments, "zero_param_parallel_group": near.group}
    with hadal.zero.Init(**arguments):
        model = blocks()
    engine = node_engine(model, **zero)
    for step in range(4):
        one_step(engine, step)
    weights = list(engine.state_dict().values())
    engine.destroy()
    return weights


@pytest.mark.fast_cells("4-zero3")
@pytest.mark.parametrize(("size", "zero"), [(2, HPZ), (None, HPZ), (None, MICS), (4, {})])
def test_models_are_born_sharded_all_the_same(size: Any, zero: Any, ranks: RankPools) -> None:
    config = {"zero_optimization": {"stage": 3, **zero}}
    found = ranks(4).run(born, {"config_dict_or_path": config}, size, zero)
    expected = ranks(4).run(born, {"enabled": False}, None, zero)
    assert all(map(torch.equal, found[3], expected[0]))


def test_a_group_at_birth_must_be_the_one_of_the_key(ranks: RankPools) -> None:
    for error in ranks(4).raises(born, {}, 2, {}):
        assert isinstance(error, UsageError)
        assert "zero_optimization.zero_hpz_partition_size 2" in str(error)


@on_ranks(4)
def test_a_group_at_birth_must_be_a_block() -> None:
    _, across = Ranks.world().in_blocks(2)
    with pytest.raises(UsageError, match=r"expected a block of consecutive ranks"):
        hadal.zero.Init(zero_param_parallel_group=across.group)


@on_ranks(4)
def test_mics_init_is_a_name_of_init() -> None:
    """The older door, with its arguments in its own order."""
    config = {"zero_optimization": {"stage": 3, **MICS}}
    with hadal.zero.MiCS_Init(None, None, None, True, config_dict_or_path=config):
        model = blocks()
    assert "sharded over the ranks" in repr(model.blocks[0].weight)
    engine = node_engine(model, **MICS)
    one_step(engine, 0)
    engine.destroy()


# ---- what does not fit -----------------------------------------------------------------------


def wrong_nodes(sizes: list[int | None], zero: dict[str, Any]) -> None:
    with nodes_of(sizes[comm.get_rank()]):
        engine_of(3, blocks(), zero_optimization={**CUT, **zero})


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([3] * 4, "nodes of 3 ranks do not divide the blocks of 4"),
        ([None] * 4, "rank 1: None"),
        ([2, 2, 1, None], "rank 2: 1, rank 3: None"),
    ],
)
def test_nodes_that_do_not_fit_are_told(sizes: Any, told: str, ranks: RankPools) -> None:
    for error in ranks(4).raises(wrong_nodes, sizes, HOPS):
        assert isinstance(error, ConfigError)
        assert error.faults[0].path == "zero_optimization.mics_hierarchical_params_gather"
        assert told in error.faults[0].message


def go_on(zero: dict[str, Any], folder: str) -> None:
    engine = node_engine(**zero)
    for step in range(4):
        one_step(engine, step)
    engine.save_checkpoint(folder)
    for step in range(4, 8):
        one_step(engine, step)
    expected = list(engine.state_dict().values())
    engine.destroy()
    again = node_engine(**zero)
    one_step(again, 9)
    again.eval()
    again.load_checkpoint(folder)
    for step in range(4, 8):
        one_step(again, step)
    assert all(map(torch.equal, again.state_dict().values(), expected))
    again.destroy()


def load_elsewhere(zero: dict[str, Any], folder: str) -> int:
    """A checkpoint of several copies loads where there is one, and where there are others."""
    states, nbytes = [], 0
    for other in (zero, {}, {"mics_shard_size": 4 // zero.get("mics_shard_size", 4)}):
        engine = node_engine(**other)
        engine.load_checkpoint(folder)
        states.append([*engine.state_dict().values()])
        moments = [safe_get_full_optimizer_state(p, "exp_avg") for p in engine.parameters()]
        states[-1] += [one for one in moments if one is not None]
        engine.destroy()
    for state in states[1:]:
        assert all(map(torch.equal, state, states[0]))
        assert len(state) == len(states[0])
    for path in Path(folder).rglob("*.safetensors"):
        nbytes += path.stat().st_size
    return nbytes


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_training_goes_on_from_a_checkpoint(route: str, ranks: RankPools, tmp_path: Any) -> None:
    ranks(4).run(go_on, ROUTES[route], str(tmp_path / "these"))
    nbytes = ranks(4).run(load_elsewhere, ROUTES[route], str(tmp_path / "these"))[0]
    # Several copies are written once.
    ranks(4).run(go_on, {}, str(tmp_path / "plain"))
    plain = sum(path.stat().st_size for path in (tmp_path / "plain").rglob("*.safetensors"))
    assert abs(nbytes - plain) < 0.05 * plain
