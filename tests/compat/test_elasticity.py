"""`deepspeed.elasticity.compute_elastic_config`: the worked examples, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from hadal.compat.configuration import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
)
from hadal.compat.install import alias

NOW = "0.19.8"


def config(**keys: Any) -> dict[str, Any]:
    told = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
    return {"elasticity": {**told, "min_gpus": 8, "max_gpus": 128, **keys}}


MANY = config(
    version=0.1,
    max_train_batch_size=10000,
    micro_batch_sizes=[8, 12, 16, 17],
    min_gpus=32,
    max_gpus=1500,
)


@pytest.fixture(autouse=True)
def _without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_version_1() -> None:
    train, ranks = compute_elastic_config(MANY, NOW)
    assert (train, len(ranks), ranks[:3], ranks[-1]) == (9792, 23, [32, 34, 36], 1224)
    assert compute_elastic_config(MANY, NOW, world_size=64) == (9792, ranks, 17)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="128 ranks cannot train"):
        compute_elastic_config(MANY, NOW, world_size=128)


@pytest.mark.parametrize(
    ("keys", "ranks", "expected"),
    [
        ({"model_parallel_size": 4}, 64, (1920, [2, 4, 6, 8, 10, 12, 16, 20, 24, 30, 32], 6)),
        ({}, 56, (1904, [56], 2)),
        ({"prefer_larger_batch": False}, 56, (1680, [56], 2)),
        ({}, 12, (1992, [12], 2)),
    ],
)
def test_version_2_takes_the_launchers_ranks(
    keys: dict[str, Any], ranks: int, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    told = compute_elastic_config(config(num_gpus_per_node=8, **keys), NOW, return_microbatch=True)
    assert told == expected


def test_version_2_takes_ranks_as_an_argument() -> None:
    train, ranks, micro = compute_elastic_config(config(num_gpus_per_node=8), NOW, world_size=16)
    assert (train, ranks, micro) == (1920, [8, 16, 24, 32, 40, 48, 64, 80, 96, 120], 6)
    # That argument counts data-parallel ranks too: it always has.
    with pytest.raises(ElasticityIncompatibleWorldSize, match="64 ranks"):
        compute_elastic_config(config(num_gpus_per_node=8, model_parallel_size=4), NOW, 64)


@pytest.mark.parametrize(
    ("told", "version", "error", "message"),
    [
        (MANY, "0.3.7", ElasticityError, "0.3.8 or newer, got 0.3.7"),
        ({}, NOW, ElasticityConfigError, "no enabled `elasticity`"),
        (config(enabled=False), NOW, ElasticityConfigError, "no enabled `elasticity`"),
        ({"elasticity": {"enabled": True}}, NOW, ElasticityConfigError, "required while"),
        (config(micro_batch_sizes=[0]), NOW, ElasticityConfigError, "micro_batch_sizes"),
        (config(version=0.3), NOW, ElasticityConfigError, "0.1 or 0.2"),
        (config(), NOW, ElasticityConfigError, "number of ranks is unknown"),
    ],
)
def test_unsupported_computations_are_refused(
    told: dict[str, Any], version: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        compute_elastic_config(told, version)


def test_programs_find_it_by_its_name() -> None:
    assert alias("deepspeed.elasticity").compute_elastic_config is compute_elastic_config
    assert alias("deepspeed.elasticity.config").ElasticityError is ElasticityError
