"""Activation checkpointing: blocks are recomputed in backward instead of storing activations."""

from hadal.plugins.activation_checkpointing.function import Recomputation
from hadal.plugins.activation_checkpointing.keeping import tell_unshared
from hadal.plugins.activation_checkpointing.listener import (
    BudgetedModules,
    RecomputedModules,
    Surroundings,
)
from hadal.plugins.activation_checkpointing.modules import chosen, recomputed_elsewhere

__all__ = [
    "BudgetedModules",
    "Recomputation",
    "RecomputedModules",
    "Surroundings",
    "chosen",
    "recomputed_elsewhere",
    "tell_unshared",
]
