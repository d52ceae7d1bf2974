"""Block-sparse attention: patterns, the attention itself, and models that use it."""

from hadal.lazy import public_names
from hadal.plugins.sparse_attention.bert import (
    BertSparseSelfAttention as BertSparseSelfAttention,
    SparseAttentionUtils as SparseAttentionUtils,
)
from hadal.plugins.sparse_attention.huggingface import (
    give_pattern as give_pattern,
    plan_pattern as plan_pattern,
    register_with_transformers as register_with_transformers,
    use_sparse_attention as use_sparse_attention,
)
from hadal.plugins.sparse_attention.layouts import (
    BigBirdSparsityConfig as BigBirdSparsityConfig,
    BSLongformerSparsityConfig as BSLongformerSparsityConfig,
    DenseSparsityConfig as DenseSparsityConfig,
    FixedSparsityConfig as FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig,
    SparsityConfig as SparsityConfig,
    VariableSparsityConfig as VariableSparsityConfig,
    from_config as from_config,
    get_sparse_attention_config as get_sparse_attention_config,
)
from hadal.plugins.sparse_attention.modules import (
    MatMul as MatMul,
    Softmax as Softmax,
    SparseSelfAttention as SparseSelfAttention,
)

__all__ = public_names(globals())
