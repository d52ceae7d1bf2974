"""The mechanism: weights, gradients and optimizer state in flat buffers, sharded over the ranks.

Words of this folder.

unit      a module whose parameters are unsharded together (a transformer block, say)
bucket    the parameters of a unit that share dtype, policy and trainability, in one flat buffer
slot      the place of one parameter in its bucket
full      a bucket's whole buffer           shard     one rank's even slice of it
fragment  the part of one parameter in a shard
run       the range of a shard that belongs to one param group: what an optimizer steps
master    the values that the optimizer updates
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hadal.lazy import lazy_names
from hadal.zero.access import GatheredParameters
from hadal.zero.grouping import register_external_parameter, unregister_external_parameter
from hadal.zero.init import Init, MiCS_Init

if TYPE_CHECKING:
    from hadal.zero.estimate import (
        estimate_zero2_model_states_mem_needs,
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from hadal.zero.leaves import TiledLinear

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter",
    "unregister_external_parameter",
]

_ESTIMATES = " ".join(name for name in __all__ if name.startswith("estimate_"))
__getattr__, __dir__, _ = lazy_names(
    __name__, {"hadal.zero.estimate": _ESTIMATES, "hadal.zero.leaves": "TiledLinear"}
)
