"""Saving at any stage and number of ranks, and loading at any other: every value is in place."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine.toys import TINY, engine_of, loss_of
from hypothesis import given, strategies as st
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm
from hadal.checkpoint import loading
from hadal.checkpoint.contents import WEIGHT, SavedSlice
from hadal.checkpoint.stored import slices_between
from hadal.offload import direct
from hadal.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state
from hadal.zero.place import place_of

Numbers = tuple[int, ...]
KEYS = ("exp_avg", "exp_avg_sq")
BF16 = {"bf16": {"enabled": True}}


class Odd(nn.Module):
    """A model with tied, frozen, 0-dim and empty parameters, a buffer, and prime sizes."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 11)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(11, 11, bias=False)
        self.tied = nn.Linear(11, 11, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(11, 5)
        self.frozen.bias.requires_grad_(False)
        self.last = nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.0 + seed))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        with torch.no_grad():
            self.frozen.bias.add_(seed)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(self.norm(inputs)).tanh())
        return self.last(self.frozen(self.tied(hidden))) * self.scale + self.nothing.sum()


def trained(engine: Any, steps: range) -> None:
    """Train on the same samples on every rank: the mean is the same for any number of ranks."""
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(3, 6, generator=generator)
        loss = loss_of(engine(inputs.to(dtype)), torch.randn(3, 4, generator=generator))
        engine.backward(loss)
        engine.step()


def values_of(engine: Any) -> dict[str, Tensor]:
    """Return all values by name, whole: for engines of one rank or stage 0."""
    values = {f"weight.{name}": value for name, value in engine.state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        place = place_of(parameter)
        values[f"master.{name}"] = place.joined(place.cut(place.master()))
        if place.bucket.trainable and parameter.numel():
            for key in KEYS:
                values[f"{key}.{name}"] = place.joined(
                    safe_get_local_optimizer_state(parameter, key)
                )
    return values


def check(engine: Any, expected: dict[str, Tensor], *, exact: bool = True) -> None:
    """Compare this rank's values with whole values, by name."""

    def same(found: Tensor, name: str) -> bool:
        wanted = expected[name].reshape(-1)
        if not exact:
            return torch.allclose(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
        return torch.equal(found, wanted)

    for name, value in engine.state_dict().items():
        assert same(value.reshape(-1), f"weight.{name}"), name
    for name, parameter in engine.module.named_parameters():
        place = place_of(parameter)
        start, stop = place.bounds(place.ranks.rank)
        found = {"master": safe_get_local_fp32_param(parameter)}
        if place.bucket.trainable and start < stop:
            found |= {key: safe_get_local_optimizer_state(parameter, key) for key in KEYS}
            state = place.state_slice().state
            assert float(state["step"]) == engine.global_steps
        for kind, value in found.items():
            wanted = expected[f"{kind}.{name}"].reshape(-1)[start:stop].to(value.dtype)
            if exact:
                assert torch.equal(value, wanted), (kind, name)
            else:
                assert torch.allclose(value, wanted, rtol=2e-2, atol=2e-2), (kind, name)


def engine_at(stage: int, seed: int = 3, **changes: Any) -> Any:
    return engine_of(stage, Odd(seed), **{**BF16, **changes})


def save_at_every_stage(folder: str, stages: Numbers) -> None:
    for stage in stages:
        name = f"s{stage}w{comm.get_world_size()}"
        engine = engine_at(stage)
        trained(engine, range(3))
        engine.save_checkpoint(folder, name)
        values = [values_of(engine)]
        trained(engine, range(3, 6))
        values.append(values_of(engine))
        if comm.get_rank() == 0:
            torch.save(values, Path(folder, f"{name}.pt"))
        engine.destroy()


def load_at_every_stage(folder: str, stages: Numbers, worlds: Numbers, every: int) -> None:
    """Load every `every`-th pair; these include each pair of world sizes and of stages."""
    world = comm.get_world_size()
    for stage in stages:
        # Small and large buckets by turns: they need not be those that were saved.
        zero = {"stage": stage, **TINY, "reduce_bucket_size": 60 if stage % 2 else 5000}
        engine = engine_at(stage, seed=5, zero_optimization=zero)
        for saved_world in worlds:
            for saved_stage in stages:
                number = stage + saved_stage + world + saved_world
                if number % every:
                    continue
                name = f"s{saved_stage}w{saved_world}"
                expected, later = torch.load(Path(folder, f"{name}.pt"))
                engine.load_checkpoint(folder, name)
                check(engine, expected)
                if number % 8 == 0:
                    trained(engine, range(3, 6))
                    check(engine, later, exact=False)
        engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "worlds", "every"),
    [((0, 2, 3), (1, 2, 3), 4), ((0, 1, 2, 3), (1, 2, 3, 4), 1)],
    ids=["some", "all"],
)
def test_every_stage_and_world_size_loads_at_every_other(
    stages: Numbers, worlds: Numbers, every: int, ranks: RankPools, tmp_path: Path
) -> None:
    for world in worlds:
        ranks(world).run(save_at_every_stage, str(tmp_path), stages)
    for world in worlds:
        ranks(world).run(load_at_every_stage, str(tmp_path), stages, worlds, every)


# ---- memory --------------------------------------------------------------------------------------


_BLOCKS = (1 + direct._AHEAD) * direct.BLOCK_NBYTES


class Anonymous:
    """The peak memory of a block in bytes, without mapped files."""

    def __enter__(self) -> Anonymous:
        self._over = threading.Event()
        self._before = self._now()
        self.most = 0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.most = max(self.most, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024


def save_and_load_large(folder: str, stage: int, saves: bool, room: int) -> tuple[int, int]:
    """Return the peak extra memory, and the bytes of a bucket."""
    model = nn.Sequential(*(nn.Linear(700, 700, bias=False) for _ in range(20)))
    zero = {"stage": stage, "reduce_bucket_size": 500_000, "stage3_param_persistence_threshold": 0}
    engine = engine_of(stage, model, zero_optimization=zero)
    engine.backward(engine(torch.ones(1, 700)).square().mean())
    engine.step()
    engine.zero_grad()
    with patch.object(loading, "_room", lambda world: room), Anonymous() as memory:
        if saves:
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
    largest = max(bucket.layout.numel for bucket in engine._parts.runtime.buckets)
    engine.destroy()
    return memory.most, 4 * largest


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_bucket_is_all_the_memory_it_takes(ranks: RankPools, tmp_path: Path) -> None:
    """118 MB of weights and moments, at another stage and number of ranks, plus some blocks."""
    cases = ((2, 0, True, 0), (2, 3, True, 0), (1, 0, False, 0), (3, 3, False, 0))
    for world, stage, saves, room in (*cases, (2, 2, False, 9 << 20)):
        folder = str(tmp_path / str(stage if saves else 3 * (stage < 2)))
        for most, bucket in ranks(world).run(save_and_load_large, folder, stage, saves, room):
            assert most < 2 * bucket + room + _BLOCKS, (world, stage, saves, most)


@given(st.data())
def test_slices_cover_every_element_once(data: st.DataObject) -> None:
    """For any slices and range, each requested element is in one slice of a single rank."""
    numel = data.draw(st.integers(1, 60))
    edges = sorted(data.draw(st.sets(st.integers(1, numel), max_size=6)) | {0, numel})
    run = []
    for low, high in pairwise(edges):
        holders = data.draw(st.sampled_from([n for n in (1, 2, 3) if (high - low) % n == 0]))
        each = (high - low) // holders
        run.append(SavedSlice(0, WEIGHT, 0, low, each, torch.float32, holders=holders))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = []
    for one in slices_between(run, start, stop):
        assert one.holders == 1
        found += range(max(one.start, start), min(one.stop, stop))
    assert found == list(range(start, stop))
