"""Block-sparse attention: patterns, the attention itself, and models that use it."""

from hadal.sparse_attention.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from hadal.sparse_attention.modules import SparseSelfAttention
from hadal.sparse_attention.settings import from_config, get_sparse_attention_config

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "from_config",
    "get_sparse_attention_config",
]
