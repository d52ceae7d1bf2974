"""The settings of `zero.Init` from a configuration; no other file of this folder reads one.

A model may be built long before the configuration is complete, so only the keys needed here are
read, and `"auto"` counts as missing. `initialize` reads and checks all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hadal.config import load_config
from hadal.config.offload import Aio
from hadal.config.reading import read
from hadal.errors import UsageError
from hadal.zero.policy import STAGES, Tier

_SECTIONS = ("fp16", "bf16", "bfloat16", "zero_optimization", "aio")


@dataclass(frozen=True, slots=True)
class Birth:
    """The settings of parameters that are created sharded."""

    dtype: torch.dtype | None = None
    """The dtype in which they are shown once the context ends; None: as they were given."""
    gathers_in_apply: bool = True
    """True: functions passed to `Module.apply` see their values."""
    tier: Tier | None = None
    """The configured tier of weights; None: not configured."""
    nvme_path: str | None = None
    pins: bool = False
    """True: host memory for them is pinned."""
    io: Aio = field(default_factory=Aio)


_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def tier_of(birth: Birth, remote_device: str | None) -> Tier:
    """Return the tier of shards for `zero.Init(remote_device=...)` and the configuration.

    Raises:
        UsageError: there is no such device, a path is missing, or the two contradict each other.
    """
    where = f"zero.Init(remote_device={remote_device!r})"
    if remote_device is not None and remote_device not in _TIERS:
        raise UsageError(f"{where}: expected None, 'none', 'cpu' or 'nvme'")
    chosen = birth.tier or Tier.DEVICE
    if remote_device is not None:
        if birth.tier is Tier.DISK and remote_device != "nvme":
            raise UsageError(
                f"{where}: the configuration's zero_optimization.offload_param.device is"
                ' "nvme"; pass remote_device="nvme", or leave it out'
            )
        chosen = _TIERS[remote_device]
    if chosen is Tier.DISK and not birth.nvme_path:
        raise UsageError(
            f"{where}: the disk needs a folder; pass config_dict_or_path with"
            " zero_optimization.offload_param.nvme_path"
        )
    return chosen


def birth_of(source: Any) -> Birth:
    """Read a configuration: a dict, the path of a JSON file, or its text.

    Raises:
        ConfigError: one of the keys that it reads is invalid.
    """
    if source is None:
        return Birth()
    _, raw = read(source)
    wanted = {name: _without_autos(raw[name]) for name in _SECTIONS if name in raw}
    config = load_config({**wanted, "train_micro_batch_size_per_gpu": 1}, allow_unbuilt=True)
    dtype = None
    if config.fp16.enabled:
        dtype = torch.float16
    elif config.bf16.enabled:
        dtype = torch.bfloat16
    zero = config.zero_optimization
    offload = zero.offload_param
    # Without a stage, the configuration of a model that is sharded here means stage 3.
    is_cut = STAGES[zero.stage].weights or "stage" not in _zero_section(raw)
    return Birth(
        dtype,
        zero.override_module_apply,
        _TIERS[offload.device] if offload is not None and is_cut else None,
        None if offload is None else offload.nvme_path,
        offload is not None and offload.pin_memory,
        config.aio,
    )


def _zero_section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    section = raw.get("zero_optimization")
    return section if isinstance(section, Mapping) else {}


def _without_autos(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _without_autos(inner) for name, inner in value.items() if inner != "auto"}
