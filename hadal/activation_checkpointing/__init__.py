"""Activation checkpointing: blocks are recomputed in backward instead of storing activations."""

from hadal.activation_checkpointing.function import Recomputation
from hadal.activation_checkpointing.listener import RecomputedModules
from hadal.activation_checkpointing.modules import chosen, recomputed_elsewhere

__all__ = ["Recomputation", "RecomputedModules", "chosen", "recomputed_elsewhere"]
