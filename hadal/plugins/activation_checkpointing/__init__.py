"""Activation checkpointing: blocks are recomputed in backward instead of storing activations."""

from hadal.lazy import public_names
from hadal.plugins.activation_checkpointing.function import Recomputation as Recomputation
from hadal.plugins.activation_checkpointing.keeping import tell_unshared as tell_unshared
from hadal.plugins.activation_checkpointing.listener import (
    BudgetedModules as BudgetedModules,
    RecomputedModules as RecomputedModules,
    Surroundings as Surroundings,
    chosen as chosen,
    recomputed_elsewhere as recomputed_elsewhere,
)

__all__ = public_names(globals())
