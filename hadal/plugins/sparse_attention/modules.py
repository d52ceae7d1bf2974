"""`SparseSelfAttention`: attention over a pattern, as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hadal.errors import ModelError, NotBuiltYetError
from hadal.plugins.sparse_attention.attention import BlockLayout, sparse_attention
from hadal.plugins.sparse_attention.layouts import FixedSparsityConfig, SparsityConfig
from hadal.plugins.sparse_attention.masks import Masks, check_mode, key_mask, pair_mask


class SparseSelfAttention(nn.Module):
    """Multi-head self-attention over the blocks of a pattern: no weights, no dropout.

    The layout for `max_seq_length` is the buffer `master_layout`, which is saved with the model. A
    pattern with random blocks, or of a class of your own, uses its first rows and columns at every
    length, so that the blocks stay the same over training, checkpoints and ranks (`initialize`
    sends rank 0's buffers). Hadal's other patterns make a layout for each length that they fit.

    Args:
        sparsity_config: the pattern; a FixedSparsityConfig of 4 heads by default.
        key_padding_mask_mode: "add", or "mul" (a zero masks the key).
        attn_mask_mode: "mul" (a zero masks the pair), or "add".
        max_seq_length: the length of `master_layout`, rounded up to a block.
        causal: whether a token attends to no later one. None: if the pattern is unidirectional
            and no `attn_mask` is given. DeepSpeed's unidirectional patterns are causal only by
            whole blocks, and need an `attn_mask`.
        head_offset: the number of the first head here, if the heads are split over ranks and the
            pattern has those of all ranks.

    Raises:
        ModelError: the pattern does not fit `max_seq_length`, or is not a SparsityConfig.
        ChoiceError: the mode of a mask is another one.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
        *,
        causal: bool | None = None,
        head_offset: int = 0,
    ) -> None:
        super().__init__()
        config = FixedSparsityConfig(num_heads=4) if sparsity_config is None else sparsity_config
        if not isinstance(config, SparsityConfig):
            raise ModelError(
                f"sparsity_config is a {type(config).__name__}; pass a SparsityConfig, such as"
                " FixedSparsityConfig(num_heads), or that of a configuration from"
                " hadal.sparse_attention.from_config(config, num_heads)"
            )
        check_mode(key_padding_mask_mode, "key_padding_mask_mode")
        check_mode(attn_mask_mode, "attn_mask_mode")
        self.sparsity_config = config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.max_seq_length = max_seq_length
        self.causal = causal
        self.head_offset = head_offset
        length = -(-max_seq_length // config.block) * config.block
        # Booleans: at 16,384 tokens the integers of DeepSpeed's take 64 MiB in each layer.
        layout = _layout_of(config, length).expand(config.num_heads, -1, -1).contiguous()
        self.register_buffer("master_layout", layout)
        self._layouts: dict[tuple[int, int], BlockLayout] = {}
        self._version = -1

    def extra_repr(self) -> str:
        """Return the pattern for `print(module)`."""
        return f"{type(self.sparsity_config).__name__}, block={self.sparsity_config.block}"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without values derived from the layout."""
        return {**self.__dict__, "_layouts": {}}

    def get_layout(self, seq_len: int) -> Tensor:
        """Return the layout for a length: [num_heads, n, n] on the CPU.

        Raises:
            ModelError: the length is not a multiple of the block, or longer than `max_seq_length`
                although `master_layout` determines the layout.
        """
        layout = self._boolean_layout(seq_len)
        return layout.long().expand(self.sparsity_config.num_heads, -1, -1)

    def _boolean_layout(self, seq_len: int) -> Tensor:
        """Return the same as booleans, with one head if all share a layout."""
        config = self.sparsity_config
        count = config.blocks_of(seq_len)
        if not self._is_drawn and count >= config.fewest_blocks:
            return _layout_of(config, seq_len)
        if count > self.master_layout.shape[1]:
            raise ModelError(
                f"a sequence of {seq_len} tokens is longer than max_seq_length"
                f" {self.max_seq_length}, for which the layout was made; raise max_seq_length"
            )
        return self.master_layout[:, :count, :count].to("cpu")

    @property
    def _is_drawn(self) -> bool:
        """True if the layout cannot be recreated for another length."""
        return self.sparsity_config.is_random or _makes_its_own(self.sparsity_config)

    def _layout_for(self, length: int, heads: int) -> BlockLayout:
        block = self.sparsity_config.block
        version = self.master_layout._version
        if version != self._version:  # loaded since then
            self._layouts.clear()
            self._version = version
        padded = -(-length // block) * block
        if (padded, heads) not in self._layouts:
            layout = self._boolean_layout(padded)
            if len(layout) not in (1, heads):
                layout = self._own_heads(layout, heads)
            self._layouts[padded, heads] = BlockLayout(layout, block)
        return self._layouts[padded, heads]

    def _own_heads(self, layout: Tensor, heads: int) -> Tensor:
        last = self.head_offset + heads
        if last > len(layout):
            raise ModelError(
                f"the query has {heads} heads from head_offset {self.head_offset} on, but the"
                f" pattern only {len(layout)}; create it with num_heads={last}"
            )
        return layout[self.head_offset : last]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the attention.

        Args:
            query, value: [batch, heads, L, D] of any floating dtype, on any device.
            key: the same, or [batch, heads, D, L].
            rpe: added to the scores: [batch or 1, heads or 1, L, L]; it may need a gradient.
            key_padding_mask: [batch, L], see `key_padding_mask_mode`; a shorter one masks the rest.
            attn_mask: [L, L], [batch, L, L], [batch, 1, L, L] or [batch, heads, L, L], see
                `attn_mask_mode`.

        Returns:
            The same shape as `query`. A row without any key gives 0.

        Raises:
            ModelError: a shape does not fit.
            NotBuiltYetError: query, key and value differ in shape.
        """
        length = query.shape[-2]
        if key.shape[-2] != length and key.shape[-1] == length:
            key = key.transpose(-2, -1)
        if query.dim() != 4 or not query.shape == key.shape == value.shape:
            raise NotBuiltYetError(
                f"attention between query {tuple(query.shape)}, key {tuple(key.shape)} and value"
                f" {tuple(value.shape)} is not built yet: SparseSelfAttention is for"
                " self-attention; pass all three as [batch, heads, length, D]"
            )
        causal = self.causal
        if causal is None:
            one_way = getattr(self.sparsity_config, "attention", None) == "unidirectional"
            causal = one_way and attn_mask is None
        pairs = [] if rpe is None else [pair_mask(rpe, "add", query, "rpe")]
        if attn_mask is not None:
            pairs.append(pair_mask(attn_mask, self.attn_mask_mode, query))
        keys = None
        if key_padding_mask is not None:
            keys = key_mask(key_padding_mask, self.key_padding_mask_mode, query)
        layout = self._layout_for(length, query.shape[1])
        return sparse_attention(query, key, value, layout, Masks(keys, pairs, causal))


def _makes_its_own(config: SparsityConfig) -> bool:
    """Return whether a program's own class creates the layout."""
    return type(config).make_layout is not SparsityConfig.make_layout


def _layout_of(config: SparsityConfig, length: int) -> Tensor:
    if _makes_its_own(config):
        found = config.make_layout(length)
        count, shape = length // config.block, tuple(found.shape)
        if shape not in ((1, count, count), (config.num_heads, count, count)):
            raise ModelError(
                f"{type(config).__name__}.make_layout({length}) returned a layout of shape {shape};"
                f" expected [{config.num_heads}, {count}, {count}]: heads, and a row and a column"
                f" for each block of {config.block} tokens"
            )
        return found.to("cpu").bool()
    return config.distinct_layout(length)
