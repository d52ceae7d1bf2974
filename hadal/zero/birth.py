"""What `zero.Init` takes from a configuration: the one place of this folder that reads it.

A model may be built long before the configuration is complete: only what matters here is read, and
`"auto"` counts as left out. `initialize` reads and checks all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hadal.config import load_config
from hadal.config.reading import read

_SECTIONS = ("fp16", "bf16", "bfloat16", "zero_optimization")


@dataclass(frozen=True, slots=True)
class Birth:
    """How parameters are born."""

    dtype: torch.dtype | None = None
    """What they are shown in once they are born; None: as they were given."""
    gathers_in_apply: bool = True
    """Whether functions given to `Module.apply` find their values."""


def birth_of(source: Any) -> Birth:
    """Read a configuration: a dict, the path of a JSON file, or its base64 text.

    Raises:
        ConfigError: what is read of it has faults.
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
    return Birth(dtype, config.zero_optimization.override_module_apply)


def _without_autos(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _without_autos(inner) for name, inner in value.items() if inner != "auto"}
