"""Layers of experts, distributed over ranks.

Words of this folder.

expert     one of several modules of the same shape, of which each token uses a few
gate       the layer that chooses them and weights their outputs
choice     one expert of one token; a token has k of them
capacity   how many choices an expert keeps; it drops the others
dispatch   the exchange that sends tokens to the ranks of their experts, and outputs back
load       choices per expert
"""

from hadal.plugins.moe.experts import (
    Experts,
    configure_moe_param_groups,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)
from hadal.plugins.moe.gate import z_loss
from hadal.plugins.moe.layer import MoE, MOELayer, TopKGate, has_moe_layers

__all__ = [
    "Experts",
    "MOELayer",
    "MoE",
    "TopKGate",
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
    "z_loss",
]
