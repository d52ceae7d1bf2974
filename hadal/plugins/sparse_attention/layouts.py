"""The patterns of block-sparse attention: the blocks of the attention matrix to compute.

Words of this folder.

block    a square of `block` x `block` tokens of the attention matrix
layout   a [heads, n, n] tensor over blocks (n = length / block); 1 means that a block is computed
mode     a kind of layout; one class below for each
window   neighbouring blocks that attend to each other
global   blocks that every later (or every) block attends to
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor

from hadal.config import load_config
from hadal.config.reading import read
from hadal.config.sparse_attention import SparseAttention
from hadal.errors import ChoiceError, ModelError, NotBuiltYetError, UsageError, expect_one_of

_WORDS = ("unidirectional", "bidirectional")


class Draws(Protocol):
    """The source of random blocks: the module `random`, or a `random.Random`."""

    def sample(self, population: Sequence[int], k: int) -> list[int]:
        """Return k different members."""


class SparsityConfig:
    """The base class of all patterns; a subclass defines `make_layout`.

    Args:
        num_heads: number of attention heads.
        block: edge of a block in tokens.
        different_layout_per_head: whether each head has its own layout.
    """

    draws: Draws = random
    """The source of random blocks; Python's global generator by default."""
    num_random_blocks = 0
    needed: tuple[str, ...] = ()
    """The attributes that are minimum numbers of blocks in a sequence."""

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False
    ) -> None:
        for name, value in (("num_heads", num_heads), ("block", block)):
            if not isinstance(value, Integral) or value < 1:
                raise ModelError(f"{name} is {value!r}; expected 1 or more")
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    @property
    def is_random(self) -> bool:
        """True if two layouts of one length may differ."""
        return self.num_random_blocks > 0

    def blocks_of(self, seq_len: int) -> int:
        """Return the number of blocks in a sequence.

        Raises:
            ModelError: the length is not a multiple of the block.
        """
        if seq_len % self.block:
            below = seq_len // self.block * self.block
            raise ModelError(
                f"a sequence of {seq_len} tokens is not a multiple of the block {self.block}; pad"
                f" it to {below + self.block} (SparseAttentionUtils.pad_to_block_size) or truncate"
                f" it to {below}"
            )
        return seq_len // self.block

    @property
    def fewest_blocks(self) -> int:
        """The shortest sequence that the pattern fits."""
        return max(1, *self.sizes().values(), 1)

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return an empty layout: int64 zeros of shape [num_heads, n, n] on the CPU.

        Raises:
            ModelError: the length is not a multiple of the block.
        """
        count = self.blocks_of(seq_len)
        return torch.zeros(self.num_heads, count, count, dtype=torch.int64, device="cpu")

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the first head's layout to all heads, unless each has its own; return `layout`."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1].clone()
        return layout

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout for a length: int64, [num_heads, n, n], on the CPU.

        Raises:
            ModelError: the pattern does not fit the length.
        """
        layout = self.setup_layout(seq_len)
        layout[:] = self.distinct_layout(seq_len)
        return layout

    def distinct_layout(self, seq_len: int) -> Tensor:
        """Return the same without repetition: bool, [1, n, n] if all heads share one layout.

        Raises:
            ModelError: the pattern does not fit the length.
        """
        count = self.blocks_of(seq_len)
        for name, number in self.sizes().items():
            if number > count:
                raise ModelError(
                    f"{name} is {number}, but the sequence has only {count} blocks of"
                    f" {self.block} tokens; lower it or use longer sequences"
                )
        return torch.stack([self.head_layout(count, head) for head in range(self.num_layout_heads)])

    def sizes(self) -> dict[str, int]:
        """Return the minimum numbers of blocks in a sequence, by name."""
        return {name: getattr(self, name) for name in self.needed}

    def head_layout(self, count: int, head: int) -> Tensor:
        """Return one head's layout over `count` blocks: bool, [count, count]."""
        raise NotBuiltYetError(
            f"{type(self).__name__} has no layout; use one of its subclasses"
            " (FixedSparsityConfig, ...) or define make_layout"
        )

    def _random_blocks(self, layout: Tensor, number: int, *, before: bool = False) -> None:
        """Set `number` random blocks in each row; with `before`, only up to the row itself."""
        count = len(layout)
        for row in range(count if number else 0):
            limit = row + 1 if before else count
            if number > limit:
                raise ModelError(
                    f"num_random_blocks is {number}, but row {row} of a unidirectional layout has"
                    f" {limit} to choose from; use 1 or 0, or attention 'bidirectional'"
                )
            layout[row, self.draws.sample(range(limit), number)] = True


def _empty(count: int) -> Tensor:
    return torch.zeros(count, count, dtype=torch.bool, device="cpu")


def _sliding(count: int, before: int, after: int) -> Tensor:
    """Return the blocks at most `before` left of the diagonal and `after` right of it."""
    places = torch.arange(count, device="cpu")
    ahead = places[None, :] - places[:, None]
    return (ahead >= -before) & (ahead <= after)


def _windows(sizes: Sequence[int], count: int) -> Tensor:
    """Return all pairs inside windows of these sizes, the last of which repeats."""
    number = torch.empty(count, dtype=torch.int64, device="cpu")
    start, window = 0, 0
    while start < count:
        size = sizes[min(window, len(sizes) - 1)]
        number[start : start + size] = window
        start, window = start + size, window + 1
    return number[:, None] == number[None, :]


def _check_attention(attention: str, *, horizontal: bool = False) -> None:
    expect_one_of(_WORDS, "attention", attention, ChoiceError)
    if horizontal and attention != "bidirectional":
        raise ModelError(
            "horizontal_global_attention needs attention 'bidirectional'; change one of the two"
        )


def _ranges(starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return ranges of global blocks, of one block each without `ends`."""
    if ends is None:
        ends = [start + 1 for start in starts]
    if len(starts) != len(ends):
        raise ModelError(
            f"global_block_indices has {len(starts)} members, but global_block_end_indices"
            f" {len(ends)}; pass as many ends as starts"
        )
    for start, end in zip(starts, ends, strict=True):
        if not 0 <= start < end:
            raise ModelError(
                f"global blocks {start} to {end} (exclusive) are not a range; use a start >= 0 in"
                " global_block_indices and a larger end in global_block_end_indices"
            )
    return list(zip(starts, ends, strict=True))


class DenseSparsityConfig(SparsityConfig):
    """Every block is computed."""

    def head_layout(self, count: int, head: int) -> Tensor:
        """Return one head's layout over `count` blocks: bool, [count, count]."""
        del head
        return ~_empty(count)


class FixedSparsityConfig(SparsityConfig):
    """Windows of equal size, whose last blocks represent them to all other windows.

    Sparse Transformers (Child et al. 2019).

    Args:
        num_heads, block, different_layout_per_head: see SparsityConfig.
        num_local_blocks: blocks in a window.
        num_global_blocks: blocks that represent a window; divides num_local_blocks.
        attention: "unidirectional" (no later block) or "bidirectional".
        horizontal_global_attention: the representatives attend to everything, too.
        num_different_global_patterns: the number of choices of representatives that heads cycle
            through.

    Raises:
        ChoiceError: another `attention`.
        ModelError: arguments contradict each other.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_local_blocks = num_local_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns
        if num_local_blocks % num_global_blocks:
            raise ModelError(
                f"num_local_blocks {num_local_blocks} is not a multiple of num_global_blocks"
                f" {num_global_blocks}; change one of the two"
            )
        _check_attention(attention, horizontal=horizontal_global_attention)
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise ModelError(
                f"num_different_global_patterns {num_different_global_patterns} needs"
                " different_layout_per_head True"
            )
        most = num_local_blocks // num_global_blocks
        if num_different_global_patterns > most:
            raise ModelError(
                f"num_different_global_patterns is {num_different_global_patterns}, but a window"
                f" of {num_local_blocks} blocks has {most} choices of {num_global_blocks}; use at"
                f" most {most}"
            )

    def head_layout(self, count: int, head: int) -> Tensor:
        """Return one head's layout over `count` blocks: bool, [count, count]."""
        layout = _windows([self.num_local_blocks], count)
        if self.attention == "unidirectional":
            layout = layout.tril()
        chosen = head % self.num_different_global_patterns
        first = self.num_local_blocks - (1 + chosen) * self.num_global_blocks
        for window in range(0, count, self.num_local_blocks):
            start = window + first
            if window + self.num_local_blocks > count:  # the last window is short
                start = max(0, min(start, count - self.num_global_blocks))
            end = start + self.num_global_blocks
            layout[start if self.attention == "unidirectional" else 0 :, start:end] = True
            if self.horizontal_global_attention:
                layout[start:end] = True
        return layout


class VariableSparsityConfig(SparsityConfig):
    """Windows of given sizes, given global blocks, and random blocks.

    Args:
        num_heads, block, different_layout_per_head: see SparsityConfig.
        num_random_blocks: random blocks in each row, before or after it.
        local_window_blocks: sizes of the windows in blocks; the last repeats.
        global_block_indices: global blocks, or the starts of their ranges; those beyond the
            sequence are ignored.
        global_block_end_indices: the (exclusive) ends of these ranges.
        attention: "unidirectional" or "bidirectional".
        horizontal_global_attention: global blocks attend to everything, too.

    Raises:
        ChoiceError: another `attention`.
        ModelError: arguments contradict each other.
    """

    needed = ("num_random_blocks",)

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        if not local_window_blocks or min(local_window_blocks) < 1:
            raise ModelError(
                f"local_window_blocks is {list(local_window_blocks)}; expected at least one size,"
                " each 1 or more"
            )
        _check_attention(attention, horizontal=horizontal_global_attention)
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = list(local_window_blocks)
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = global_block_end_indices
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention
        self._globals = _ranges(global_block_indices, global_block_end_indices)

    def head_layout(self, count: int, head: int) -> Tensor:
        """Return one head's layout over `count` blocks: bool, [count, count]."""
        del head
        layout = _windows(self.local_window_blocks, count)
        if self.attention == "unidirectional":
            layout = layout.tril()
        self._random_blocks(layout, self.num_random_blocks)
        for start, end in self._globals:
            layout[start if self.attention == "unidirectional" else 0 :, start:end] = True
            if self.horizontal_global_attention:
                layout[start:end] = True
        return layout


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, random blocks, and global blocks at the start (Zaheer et al. 2020).

    Args:
        num_heads, block, different_layout_per_head: see SparsityConfig.
        num_random_blocks: random blocks in each row.
        num_sliding_window_blocks: width of the window; an even one acts as the next odd one.
        num_global_blocks: blocks at the start that attend to all, and to which all attend.
        attention: "unidirectional" (random blocks not beyond the row) or "bidirectional".

    Raises:
        ChoiceError: another `attention`.
    """

    needed = ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks")

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_attention(attention)
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention

    def head_layout(self, count: int, head: int) -> Tensor:
        """Return one head's layout over `count` blocks: bool, [count, count]."""
        del head
        reach, is_causal = self.num_sliding_window_blocks // 2, self.attention == "unidirectional"
        layout = _sliding(count, reach, reach)
        self._random_blocks(layout, self.num_random_blocks, before=is_causal)
        layout[: self.num_global_blocks] = True
        layout[:, : self.num_global_blocks] = True
        return layout.tril() if is_causal else layout


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window and given global blocks: Longformer (Beltagy et al. 2020) in blocks.

    Args:
        num_heads, block, different_layout_per_head: see SparsityConfig.
        num_sliding_window_blocks: width of the window; an even one acts as the next odd one.
        global_block_indices: blocks that attend to all and to which all attend, or the starts of
            their ranges; those beyond the sequence are ignored.
        global_block_end_indices: the (exclusive) ends of these ranges.
        attention: "unidirectional"; anything else is bidirectional.

    Raises:
        ModelError: the ranges are invalid.
    """

    needed = ("num_sliding_window_blocks",)

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = global_block_end_indices
        self.attention = attention
        self._globals = _ranges(global_block_indices, global_block_end_indices)

    def head_layout(self, count: int, head: int) -> Tensor:
        """Return one head's layout over `count` blocks: bool, [count, count]."""
        del head
        reach = self.num_sliding_window_blocks // 2
        layout = _sliding(count, reach, reach)
        for start, end in self._globals:
            layout[start:end] = True
            layout[:, start:end] = True
        return layout.tril() if self.attention == "unidirectional" else layout


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window and nothing else.

    Args:
        num_heads, block: see SparsityConfig.
        num_sliding_window_blocks: width of the window; an even one acts as the next odd one.
        attention: "unidirectional" (only the window's first half); anything else is bidirectional.
    """

    needed = ("num_sliding_window_blocks",)

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.attention = attention

    def head_layout(self, count: int, head: int) -> Tensor:
        """Return one head's layout over `count` blocks: bool, [count, count]."""
        del head
        reach = self.num_sliding_window_blocks // 2
        return _sliding(count, reach, 0 if self.attention == "unidirectional" else reach)


CLASSES: Mapping[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local_sliding_window": LocalSlidingWindowSparsityConfig,
}
"""The class of each mode."""


def get_sparse_attention_config(source: Any) -> dict[str, Any] | None:
    """Return the section's mode and the keys that act in it, in a new dict; None without one.

    Args:
        source: an engine, a configuration (a dict, a path, JSON text or a checked one), or an
            object with an attribute `sparse_attention`, such as a model's `config`.

    Raises:
        ConfigError: the configuration has faults.
    """
    section = _section_of(source)
    if section is None:
        return None
    if isinstance(section, SparseAttention):
        return section.of_the_mode()
    return _checked(dict(section)).of_the_mode()


def from_config(source: Any, num_heads: int) -> SparsityConfig:
    """Return the pattern that the `sparse_attention` section of a configuration describes.

    Args:
        source: see `get_sparse_attention_config`.
        num_heads: number of attention heads of the model.

    Raises:
        ConfigError: the configuration has faults.
        UsageError: it has no such section.
    """
    values = get_sparse_attention_config(source)
    if values is None:
        raise UsageError(
            'the configuration has no section "sparse_attention"; add one, such as'
            ' {"sparse_attention": {"mode": "fixed"}}'
        )
    mode = values.pop("mode")
    return CLASSES[mode](num_heads, **values)


def _section_of(source: Any) -> Any:
    if isinstance(source, Mapping):
        if "sparse_attention" in source or "mode" not in source:
            return source.get("sparse_attention")
        return source
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return read(source)[1].get("sparse_attention")
    # An engine holds its configuration, which has the attribute.
    held = getattr(source, "config", source)
    return getattr(held, "sparse_attention", None)


def _checked(section: dict[str, Any]) -> SparseAttention:
    """Return a section given as a dict, validated like a whole file."""
    whole = load_config({"train_batch_size": 1, "sparse_attention": section}, world_size=1)
    assert whole.sparse_attention is not None
    return whole.sparse_attention
