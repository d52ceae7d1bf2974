"""Configurations that programs read before they have an engine: all keys, and elastic batches."""

from __future__ import annotations

import logging
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from hadal.comm import get_rank, get_world_size
from hadal.comm.start import env_world_size
from hadal.compat.accessors import DTYPES, PATHS, Accessors
from hadal.compat.kinds import also
from hadal.compat.monitors import DeepSpeedMonitorConfig
from hadal.compat.sections import DeepSpeedCommsConfig
from hadal.compat.surface import data
from hadal.config import Config, load_config
from hadal.config.compression import Eigenvalue
from hadal.config.elasticity import Elasticity, choice_of, elastic_faults, micro_for
from hadal.config.not_built import Nebula
from hadal.config.reading import Source, read
from hadal.config.section import plain
from hadal.engine.precision import SAFE
from hadal.errors import ConfigError

_log = logging.getLogger(__name__)
_PATHS = PATHS | data("accessors.json")["attributes"]
"""The key of each attribute with another name; engines' methods are among them."""
_METHODS = (
    *("checkpoint_tag_validation_enabled", "checkpoint_tag_validation_fail"),
    *("curriculum_params_legacy", "dynamic_loss_scale_args", "torch_autocast_dtype"),
)
"""Values that an engine's methods return."""
_PLAIN = ("aio_config", "checkpoint_config", "compression_config", "data_efficiency_config")
"""Sections that are dicts, although their names end as those of objects."""


class DeepSpeedConfig:
    """A validated configuration. Its top-level keys are attributes; sections are dicts.

    Most names ending in `_config` are sections with attributes (`zero_config.stage`). Keys that are
    not built yet can be read; `initialize` refuses them. Names of older releases are there too.

    Args:
        config: a dict, the path of a JSON file, or its text (also in base64).
        mpu: an object that knows how many ranks see different samples.
        mesh_device: the same as a torch device mesh.

    Raises:
        ConfigError: the configuration has faults; the message lists all of them.
    """

    @also(AssertionError)
    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        ranks = None
        if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
            ranks = int(mpu.get_data_parallel_world_size())
        elif mesh_device is not None:
            ranks = int(mesh_device["data_parallel"].size())
        checked = load_config(
            config, world_size=get_world_size(), data_parallel_size=ranks, allow_unbuilt=True
        )
        self._hold(checked, read(config)[1])

    @classmethod
    def of(cls, checked: Config, given: dict[str, Any]) -> DeepSpeedConfig:
        """Return an engine's validated configuration; `given` is the program's original."""
        made = cls.__new__(cls)
        made._hold(checked, given)
        return made

    def _hold(self, checked: Config, given: dict[str, Any]) -> None:
        self._checked = checked
        self._values = checked.as_dict()
        self._values["eigenvalue"] = plain(checked.eigenvalue or Eigenvalue())
        self._param_dict = given
        zero_enabled = int(checked.zero_optimization.stage) > 0
        ranks = {"global_rank": get_rank(), "world_size": get_world_size()}
        vars(self).update(ranks, zero_enabled=zero_enabled)
        section = checked.sparse_attention
        self._layout = None if section is None else section.of_the_mode()

    def __setattr__(self, name: str, value: Any) -> None:
        """Store a value; warn that no engine reads it."""
        if not name.startswith("_"):
            text = "DeepSpeedConfig.%s = %r has no effect: give it to initialize"
            _log.warning(text, name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return a key, or the value that DeepSpeed has under this name."""
        if name.startswith("_"):
            raise AttributeError(name)
        path = _PATHS.get(name, name)
        if name in _METHODS:
            engine: Any = SimpleNamespace(_parts=SimpleNamespace(config=self._checked))
            return getattr(Accessors, name)(engine)
        if name.endswith("_config") and name not in _PLAIN:
            return attrgetter(path)(self._checked)
        value: Any = self._values
        for part in path.split("."):
            if value is None:
                return False if name.endswith("_enabled") else None
            if part not in value:
                raise AttributeError(f"the configuration has no key {name!r}")
            value = value[part]
        return DTYPES.get(value) if name.endswith("_data_type") else value

    @property
    def sparse_attention(self) -> dict[str, Any] | None:
        """The layout's mode and the keys of that mode, in a dict that the program may change."""
        return self._layout

    monitor_config = property(lambda self: DeepSpeedMonitorConfig.of(self._checked))
    """The sections of the monitors."""
    comms_config = property(lambda self: DeepSpeedCommsConfig(self._param_dict))
    """The section `comms_logger`, if there is one."""
    nebula_config = property(lambda self: self._checked.nebula or Nebula())
    """The section `nebula`, or its defaults."""
    hybrid_engine = property(lambda self: self._checked.hybrid_engine)
    """The section `hybrid_engine`."""

    @property
    def amp_params(self) -> dict[str, Any] | bool:
        """The given section `amp` without its switch; False without one."""
        given = self._param_dict.get("amp")
        return given is not None and {k: v for k, v in given.items() if k != "enabled"}

    initial_dynamic_scale = property(lambda self: 2.0**self._checked.fp16.initial_scale_power)
    """The first loss scale in fp16, if it is dynamic."""

    @property
    def optimizer_name(self) -> str | None:
        """The configured optimizer type in lower case."""
        section = self._checked.optimizer
        return None if section is None else section.type.lower()


def get_gradient_clipping(param_dict: dict[str, Any]) -> float:
    """Return the configured maximum gradient norm, or the default."""
    limit: float = param_dict.get("gradient_clipping", _default("gradient_clipping"))
    return limit


def get_log_level(param_dict: dict[str, Any]) -> str | None:
    """Return the configured log level, or the default."""
    level: str | None = param_dict.get("log_level", _default("log_level"))
    return level


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the classes whose gradients are sent in autocast's dtype by default."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in SAFE]


def _default(name: str) -> Any:
    return Config.model_fields[name].default


# ---- elasticity: the batch that many numbers of ranks can train ----------------------------------


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
