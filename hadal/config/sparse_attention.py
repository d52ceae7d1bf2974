"""`sparse_attention`: layouts of block-sparse attention."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from hadal.config.section import Section, key, plain, rule
from hadal.config.values import Boolean, Integer, Integers
from hadal.errors import Fault

_SHARED = ("block", "different_layout_per_head")
_WINDOW, _GLOBAL = "num_sliding_window_blocks", "num_global_blocks"
_GLOBALS = ("global_block_indices", "global_block_end_indices")
_DIRECTION = ("attention", "horizontal_global_attention")
_PATTERNS = "num_different_global_patterns"
KEYS: Mapping[str, tuple[str, ...]] = {
    "dense": ("block",),
    "fixed": (*_SHARED, "num_local_blocks", _GLOBAL, *_DIRECTION, _PATTERNS),
    "variable": (*_SHARED, "num_random_blocks", "local_window_blocks", *_GLOBALS, *_DIRECTION),
    "bigbird": (*_SHARED, "num_random_blocks", _WINDOW, _GLOBAL, "attention"),
    "bslongformer": (*_SHARED, _WINDOW, *_GLOBALS, "attention"),
    "local_sliding_window": ("block", _WINDOW, "attention"),
}
"""The keys that act in each mode, in the order of DeepSpeed's."""
# DeepSpeed does not read `attention` there, and its programs count on exactly these keys.
_IF_GIVEN = {"bigbird", "bslongformer"}


class SparseAttention(Section):
    """Layout of the blocks of the attention matrix to compute. Sizes count blocks.

    Modules read it with `hadal.sparse_attention.from_config`; models of transformers with
    `attn_implementation="hadal_sparse"` get it in `initialize`. A key acts in the modes that its
    meaning names.
    """

    mode: Literal[
        "dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"
    ] = key("fixed", "Kind of layout; `local_sliding_window` is Hadal's own as a value.")
    block: Integer = key(
        16, "Edge of one square block, in tokens. Shorter ends are padded with masked tokens.", gt=0
    )
    different_layout_per_head: Boolean = key(
        False, "Use a separate layout for each head; all but dense and local_sliding_window."
    )
    num_local_blocks: Integer = key(
        4, "fixed: blocks in a local window; a multiple of num_global_blocks.", ge=1
    )
    num_global_blocks: Integer = key(
        1, "fixed: blocks that represent a window; bigbird: global blocks at the start.", ge=1
    )
    attention: Literal["unidirectional", "bidirectional"] = key(
        "bidirectional", "Whether tokens attend to later tokens; all but dense."
    )
    horizontal_global_attention: Boolean = key(
        False, "Global blocks attend to everything too; bidirectional fixed and variable."
    )
    num_different_global_patterns: Integer = key(
        1,
        "fixed: different choices of global blocks over the heads, up to num_local_blocks /"
        " num_global_blocks; more than 1 needs different_layout_per_head.",
        ge=1,
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
        3,
        "bigbird, bslongformer, local_sliding_window: width of the sliding window, an odd number.",
        ge=1,
    )

    def of_the_mode(self) -> dict[str, Any]:
        """Return the mode and the keys that act in it, as plain JSON values in a new dict."""
        dropped = self.mode in _IF_GIVEN and "attention" not in self.model_fields_set
        names = [name for name in KEYS[self.mode] if not (dropped and name == "attention")]
        return {"mode": self.mode, **{name: plain(getattr(self, name)) for name in names}}

    @rule()
    def _window_and_direction(self) -> Iterator[Fault]:
        if self.num_sliding_window_blocks % 2 == 0:
            got = self.num_sliding_window_blocks
            yield Fault("num_sliding_window_blocks", f"expected an odd number, got {got}")
        if self.horizontal_global_attention and self.attention == "unidirectional":
            yield Fault(
                "horizontal_global_attention", 'needs attention "bidirectional"; change one'
            )

    @rule()
    def _blocks(self) -> Iterator[Fault]:
        sizes = self.local_window_blocks
        if not sizes or min(sizes) < 1:
            yield Fault(
                "local_window_blocks",
                f"expected at least one size, each 1 or more, got {list(sizes)}",
            )
        ends, starts = self.global_block_end_indices, self.global_block_indices
        if min(starts, default=0) < 0:
            yield Fault("global_block_indices", f"expected numbers >= 0, got {min(starts)}")
        if ends is None:
            return
        if len(ends) != len(starts):
            yield Fault(
                "global_block_end_indices",
                f"expected {len(starts)} ends, as many as global_block_indices, got {len(ends)}",
            )
        for start, end in zip(starts, ends, strict=False):
            if end <= start:
                yield Fault(
                    "global_block_end_indices",
                    f"the end {end} is not after its start {start}; raise it",
                )

    @rule()
    def _fixed_windows(self) -> Iterator[Fault]:
        """Check how many blocks may represent a window, and in how many ways."""
        if self.mode != "fixed":
            return
        local, chosen = self.num_local_blocks, self.num_global_blocks
        patterns, choices = self.num_different_global_patterns, local // chosen
        if local % chosen:
            yield Fault(
                "num_local_blocks",
                f"{local} is not a multiple of num_global_blocks {chosen}; change one",
            )
        elif patterns > choices:
            yield Fault(
                "num_different_global_patterns",
                f"{patterns} is more than num_local_blocks {local} / num_global_blocks {chosen} ="
                f" {choices}; lower it",
            )
        if patterns > 1 and not self.different_layout_per_head:
            yield Fault(
                "num_different_global_patterns",
                f"{patterns} needs different_layout_per_head true; enable that too",
            )
