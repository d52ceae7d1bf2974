"""`sparse_attention`: layouts of block-sparse attention.

Tests: tests/config/test_every_key.py
"""

from typing import Literal

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Integers


class SparseAttention(Section):
    """Layout of the blocks of the attention matrix to compute. Sizes count blocks."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = key(
        "fixed", "Kind of layout."
    )
    block: Integer = key(16, "Edge of one square block, in tokens.", gt=0)
    different_layout_per_head: Boolean = key(False, "Use a separate layout for each head.")
    num_local_blocks: Integer = key(4, "fixed: blocks in a local window.", ge=1)
    num_global_blocks: Integer = key(
        1, "fixed: blocks that represent a window; bigbird: global blocks at the start.", ge=1
    )
    attention: Literal["unidirectional", "bidirectional"] = key(
        "bidirectional", "Whether tokens attend to later tokens; fixed and variable."
    )
    horizontal_global_attention: Boolean = key(
        False, "Global blocks attend to everything too; bidirectional fixed and variable."
    )
    num_different_global_patterns: Integer = key(
        1, "fixed: different choices of global blocks over the heads.", ge=1
    )
    num_random_blocks: Integer = key(0, "variable, bigbird: random blocks per row.", ge=0)
    local_window_blocks: Integers = key((4,), "variable: sizes of windows; the last repeats.")
    global_block_indices: Integers = key(
        (0,), "variable, bslongformer: global blocks, or the starts of their ranges."
    )
    global_block_end_indices: Integers | None = key(
        None, "Ends of those ranges (exclusive); as many as there are starts."
    )
    num_sliding_window_blocks: Integer = key(
        3, "bigbird, bslongformer: width of the sliding window, an odd number.", ge=1
    )
