"""`deepspeed.elasticity`: the batch that many numbers of ranks can train."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from hadal.comm.start import env_world_size
from hadal.config import load_config
from hadal.config.elasticity import Elasticity, choice_of, elastic_faults, micro_for
from hadal.errors import ConfigError

_FIRST = Version("0.3.8")


class ElasticityError(ConfigError):
    """Elasticity cannot choose a batch."""


class ElasticityConfigError(ElasticityError):
    """The section is incomplete, or contradicts itself."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """This number of ranks cannot train the batch."""


def compute_elastic_config(
    ds_config: dict[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """Return the batch, the numbers of ranks, and on request the micro-batch.

    `world_size` has two meanings, as in DeepSpeed: the number of all ranks, from which version 0.2
    makes its list, and a number in that list, which counts data-parallel ranks only.
    """
    if Version(target_deepspeed_version) < _FIRST:
        raise ElasticityError(
            f"elasticity needs DeepSpeed {_FIRST} or newer, got {target_deepspeed_version}"
        )
    section = _section(ds_config)
    ranks = world_size or env_world_size() or 0
    if not ranks and (section.version >= 0.2 or return_microbatch):
        raise ElasticityConfigError(
            "the number of ranks is unknown: pass world_size, or set WORLD_SIZE"
        )
    train, valid = choice_of(section, ranks or 1)
    micros, counts = section.micro_batch_sizes, list(valid)
    if world_size:
        if world_size not in valid:
            raise ElasticityIncompatibleWorldSize(
                f"{world_size} ranks cannot train a batch of {train}; take one of {counts}"
            )
        return train, counts, micro_for(train, world_size, micros)
    if not return_microbatch:
        return train, counts
    larger = section.prefer_larger_batch or section.version < 0.2
    return train, counts, micro_for(train, ranks, micros, larger=larger)


def _section(ds_config: dict[str, Any]) -> Elasticity:
    given = ds_config.get("elasticity")
    if not isinstance(given, dict) or not given.get("enabled"):
        raise ElasticityConfigError("the configuration has no enabled `elasticity` section")
    try:
        alone = {"elasticity": {**given, "enabled": False}, "train_batch_size": 1}
        section = load_config(alone).elasticity
    except ConfigError as error:
        raise ElasticityConfigError(str(error), error.faults) from error
    assert section is not None  # it was given
    for fault in elastic_faults(section):
        raise ElasticityConfigError(f"{fault.path}: {fault.message}", (fault,))
    return section
