"""Activation checkpointing: blocks are recomputed in backward instead of storing activations."""

from hadal.activation_checkpointing.function import Recomputation
from hadal.activation_checkpointing.keeping import tell_unshared
from hadal.activation_checkpointing.listener import BudgetedModules, RecomputedModules, Surroundings
from hadal.activation_checkpointing.modules import chosen, recomputed_elsewhere

__all__ = [
    "BudgetedModules",
    "Recomputation",
    "RecomputedModules",
    "Surroundings",
    "chosen",
    "recomputed_elsewhere",
    "tell_unshared",
]
