"""`benchmarks/scale.py`: what one rank holds and sends among many is what ZeRO promises."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import forks
import pytest

ROOT = Path(__file__).parents[2]
WORLDS, MANY = (2, 64), 64
WAYS = ("collectives", "pairs")
WIDTH, BLOCKS = 64, 2
MODEL = BLOCKS * (8 * WIDTH**2 + 7 * WIDTH)
# Elements of each bucket (a block) that only fill the last shards up, at most: 16 bytes for a rank.
PADDING = BLOCKS * MANY * 8
KINDS = ("weights", "master", "moments", "gradients")
# Bytes of each kind for a parameter, and from which stage on a rank holds only its share of them.
NBYTES = {"bf16": (2, 4, 8, 2), "fp32": (4, 0, 8, 4)}
CUT_FROM = (3, 1, 1, 2)
# Collectives of a block's size in a step. At stage 3 the last block of forward is the first of
# backward: by a plan it stays in between.
TRIPS = (2 * BLOCKS, 2 * BLOCKS, 2 * BLOCKS, 3 * BLOCKS - 1)
# Ranks meet at both ends of backward, at stage 3 also of forward, and before the update; the norm.
RENDEZVOUS = {"in_micro_step": (2, 2, 2, 4), "in_update": (2, 2, 2, 2)}
NODE = 8
NODES = MANY // NODE
# Bytes that leave a rank's node in a step, at stage 3 and in pairs, for each byte of a block. A
# gather or reduction over all ranks sends a shard to all of them but those of the node. In two hops
# a shard goes once to each other node. Of copies only the gradients' shards leave the node.
_ALL, _ONCE = (MANY - NODE) / MANY, (NODES - 1) / MANY
ACROSS = {
    "plain": TRIPS[3] * _ALL,
    "hpz": 2 * BLOCKS * _ALL,
    "hops": (TRIPS[3] - BLOCKS) * _ONCE + BLOCKS * _ALL,
    "mics": BLOCKS * 2 * (NODES - 1) / NODES / NODE,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The benchmark's row of a case; run once for each way, forked for its fake process group."""
    folder = tmp_path_factory.mktemp("scale")

    @cache
    def rows(way: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        file = folder / f"{way}.json"
        arguments = [f"--worlds={','.join(map(str, WORLDS))}", f"--width={WIDTH}"]
        arguments += [f"--blocks={BLOCKS}", "--repeat=0", f"--ways={way}", f"--json={file}"]
        if way == "pairs":
            arguments += [f"--node={NODE}", f"--routes={','.join(ACROSS)}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = forks.run([str(ROOT / "benchmarks/scale.py"), *arguments], env=env, timeout=300)
        assert done.returncode == 0, done.stderr
        keys = ("world", "stage", "dtype", "route")
        return {tuple(row[key] for key in keys): row for row in json.loads(file.read_text())}

    def row(way: str, world: int, stage: int, dtype: str, route: str = "plain") -> dict[str, Any]:
        return rows(way)[world, stage, dtype, route]

    return row


@pytest.mark.slow_cells(
    "collectives-2-0-bf16", "collectives-2-0-fp32", "pairs-2-0-bf16", "pairs-2-0-fp32"
)
@pytest.mark.parametrize("dtype", NBYTES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_holds_its_share_and_no_more(
    found, way: str, world: int, stage: int, dtype: str
) -> None:
    """Every kind of state, measured in storages, for either way of travelling."""
    held = found(way, world, stage, dtype)["held"]
    for kind, nbytes, cut_from in zip(KINDS, NBYTES[dtype], CUT_FROM, strict=True):
        share = world if stage >= cut_from else 1
        least, most = MODEL * nbytes // share, (MODEL + PADDING) * nbytes // share
        assert least <= held[kind] <= most, kind


@pytest.mark.parametrize("dtype", NBYTES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_sends_two_passes_or_three(
    found, way: str, world: int, stage: int, dtype: str
) -> None:
    """Ring-equivalent bytes of a step: the model twice, at stage 3 once more but for one block."""
    itemsize = NBYTES[dtype][0]
    nbytes = found(way, world, stage, dtype)["traffic"]["nbytes"]
    least = TRIPS[stage] * MODEL // BLOCKS * itemsize * (world - 1) // world
    most = TRIPS[stage] * (MODEL + PADDING) // BLOCKS * itemsize * (world - 1) // world
    assert least <= nbytes <= most


@pytest.mark.parametrize("stage", range(4))
def test_calls_do_not_grow_with_the_ranks(found, stage: int) -> None:
    """A collective for each bucket and pass, as many rendezvous, and no more work at start-up.

    In pairs there are world - 1 messages in the place of each collective.
    """
    few, many = (found("collectives", world, stage, "bf16") for world in WORLDS)
    # At stage 0 one all-reduce makes both trips.
    assert few["traffic"]["collectives"] == (TRIPS[stage] if stage else BLOCKS)
    assert few["traffic"]["collectives"] == many["traffic"]["collectives"]
    for count, expected in RENDEZVOUS.items():
        assert few[count] == many[count] == expected[stage]
    assert many["start_calls"] <= few["start_calls"]
    pairs = found("pairs", MANY, stage, "bf16")["traffic"]
    assert pairs["messages"] == TRIPS[stage] * (MANY - 1)


@pytest.mark.parametrize("dtype", NBYTES)
@pytest.mark.parametrize("route", ACROSS)
def test_what_leaves_a_node(found, route: str, dtype: str) -> None:
    """A second copy on each node, copies of everything, two hops: each sends what it promises."""
    across = found("pairs", MANY, 3, dtype, route)["traffic"]["across"] / NBYTES[dtype][0]
    least = ACROSS[route] * MODEL / BLOCKS
    assert least <= across <= ACROSS[route] * (MODEL + PADDING) / BLOCKS


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", WORLDS)
def test_the_arithmetic_of_degrees_is_what_is_measured(found, world: int, stage: int) -> None:
    """`benchmarks/degrees.py` has ZeRO's passes, and what leaves a node, as they are counted."""
    arithmetic = runpy.run_path(str(ROOT / "benchmarks/degrees.py"), run_name="degrees")
    wire = arithmetic["ring"](range(world), NODE, 2 * MODEL)
    passes = arithmetic["zero_passes"](stage, 1, BLOCKS)
    traffic = found("collectives", world, stage, "bf16")["traffic"]
    padded = (MODEL + PADDING) / MODEL
    for counted, said in ((traffic["nbytes"], sum(wire)), (traffic["across"], wire.between)):
        # Each collective's bytes are rounded down.
        assert said * passes - 4 * BLOCKS <= counted <= said * passes * padded
