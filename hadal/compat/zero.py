"""`deepspeed.zero`: from its import on parameters answer for how they are sharded."""

from __future__ import annotations

from hadal.compat.parameters import watch_parameters
from hadal.zero import (
    GatheredParameters,
    Init,
    MiCS_Init,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "register_external_parameter",
    "unregister_external_parameter",
]

watch_parameters()
