"""Block-sparse attention: patterns, the attention itself, and models that use it."""

from hadal.plugins.sparse_attention.bert import BertSparseSelfAttention, SparseAttentionUtils
from hadal.plugins.sparse_attention.blocks import MatMul, Softmax
from hadal.plugins.sparse_attention.huggingface import (
    give_pattern,
    plan_pattern,
    register_with_transformers,
    use_sparse_attention,
)
from hadal.plugins.sparse_attention.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    from_config,
    get_sparse_attention_config,
)
from hadal.plugins.sparse_attention.modules import SparseSelfAttention

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "Softmax",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "from_config",
    "get_sparse_attention_config",
    "give_pattern",
    "plan_pattern",
    "register_with_transformers",
    "use_sparse_attention",
]
