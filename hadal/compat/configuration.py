"""`DeepSpeedConfig`: a configuration that programs read before they have an engine."""

from __future__ import annotations

from typing import Any

from hadal.comm import get_world_size
from hadal.compat.monitors import DeepSpeedMonitorConfig
from hadal.config import Config, load_config
from hadal.config.reading import Source, read

# The JSON key for each DeepSpeed attribute with another name.
_PATHS = {
    "zero_optimization_stage": "zero_optimization.stage",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "loss_scale": "fp16.loss_scale",
    "zero_config": "zero_optimization",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "aio_config": "aio",
    "activation_checkpointing_config": "activation_checkpointing",
    "flops_profiler_config": "flops_profiler",
    "checkpoint_config": "checkpoint",
}


class DeepSpeedConfig:
    """A validated configuration. Its top-level keys are attributes; sections are dicts.

    Names ending in `_config` are sections with attributes (`zero_config.stage`). Keys that are not
    built yet can be read; `initialize` refuses them.

    Args:
        config: a dict, the path of a JSON file, or its text (also in base64).
        mpu: an object that knows how many ranks see different samples.
        mesh_device: the same as a torch device mesh.

    Raises:
        ConfigError: the configuration has faults; the message lists all of them.
    """

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
        self._param_dict = given
        section = checked.sparse_attention
        self._layout = None if section is None else section.of_the_mode()

    def __getattr__(self, name: str) -> Any:
        """Return a key, or the value that DeepSpeed has under this name."""
        if name.startswith("_"):
            raise AttributeError(name)
        path = _PATHS.get(name, name)
        if name.endswith("_config"):
            return getattr(self._checked, path)
        value: Any = self._values
        for part in path.split("."):
            if value is None:
                return None
            if part not in value:
                raise AttributeError(f"the configuration has no key {name!r}")
            value = value[part]
        return value

    @property
    def sparse_attention(self) -> dict[str, Any] | None:
        """The layout's mode and the keys of that mode, in a dict that the program may change."""
        return self._layout

    @property
    def monitor_config(self) -> DeepSpeedMonitorConfig:
        """The sections of the monitors."""
        return DeepSpeedMonitorConfig.of(self._checked)

    @property
    def optimizer_name(self) -> str | None:
        """The configured optimizer type in lower case."""
        section = self._checked.optimizer
        return None if section is None else section.type.lower()

    @property
    def zero_enabled(self) -> bool:
        """True if anything is sharded."""
        return int(self._checked.zero_optimization.stage) > 0


def get_gradient_clipping(param_dict: dict[str, Any]) -> float:
    """Return the configured maximum gradient norm, or the default."""
    limit: float = param_dict.get("gradient_clipping", _default("gradient_clipping"))
    return limit


def get_log_level(param_dict: dict[str, Any]) -> str | None:
    """Return the configured log level, or the default."""
    level: str | None = param_dict.get("log_level", _default("log_level"))
    return level


def _default(name: str) -> Any:
    return Config.model_fields[name].default
