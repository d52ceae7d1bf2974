"""`SparseSelfAttention`, attention over a pattern, and products and softmax for a program's own.

A block-sparse matrix is [batch, blocks, block, block], its blocks in the order of
`layout.nonzero()`: by head, row and column.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hadal.errors import ChoiceError, ModelError, NotBuiltYetError, expect_one_of
from hadal.plugins.sparse_attention.attention import BlockLayout, sparse_attention
from hadal.plugins.sparse_attention.layouts import FixedSparsityConfig, SparsityConfig
from hadal.plugins.sparse_attention.masks import MODES, Masks, key_mask, pair_mask


class _SparseBlocks:
    """The blocks of a layout, with their indices on each device in use."""

    def __init__(self, layout: Tensor, block: int) -> None:
        self.layout, self.block = layout, block
        self._indices = {torch.device("cpu"): layout.cpu().nonzero().unbind(1)}

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the heads, rows and columns of the blocks."""
        if device not in self._indices:
            host = self._indices[torch.device("cpu")]
            self._indices[device] = tuple(each.to(device) for each in host)
        return self._indices[device]


class MatMul(_SparseBlocks):
    """The product of two matrices, one of which (or the result) is block-sparse.

    Args:
        layout: [heads, rows, columns] over blocks.
        block: edge of a block.
        mode: "sdd" (the result is sparse), "dsd" (the first factor) or "dds" (the second).
        trans_a, trans_b: whether a factor is transposed first.
        bench: accepted and ignored.

    Raises:
        ChoiceError: another mode.
    """

    def __init__(
        self,
        layout: Tensor,
        block: int,
        mode: str,
        trans_a: bool = False,
        trans_b: bool = False,
        bench: bool = False,
    ) -> None:
        del bench
        expect_one_of(("sdd", "dsd", "dds"), "mode", mode, ChoiceError)
        super().__init__(layout, block)
        self.mode, self.trans_a, self.trans_b = mode, trans_a, trans_b

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product.

        Args:
            a, b: dense ones are [batch, heads, M, N], sparse ones [batch, blocks, block, block].
        """
        if self.mode == "sdd":
            first = self._row_blocks(a.transpose(-1, -2) if self.trans_a else a)
            second = self._row_blocks(b if self.trans_b else b.transpose(-1, -2))
            heads, rows, columns = self._on(a.device)
            return first[:, heads, rows] @ second[:, heads, columns].transpose(-1, -2)
        if self.mode == "dds":  # (a S)^T = S^T a^T
            dense = a if self.trans_a else a.transpose(-1, -2)
            return self._sparse_dense(b, dense, not self.trans_b).transpose(-1, -2)
        dense = b.transpose(-1, -2) if self.trans_b else b
        return self._sparse_dense(a, dense, self.trans_a)

    def _row_blocks(self, dense: Tensor) -> Tensor:
        batch, heads, _, width = dense.shape
        return dense.reshape(batch, heads, -1, self.block, width)

    def _sparse_dense(self, sparse: Tensor, dense: Tensor, transposed: bool) -> Tensor:
        heads, rows, columns = self._on(dense.device)
        if transposed:
            rows, columns, sparse = columns, rows, sparse.transpose(-1, -2)
        products = sparse @ self._row_blocks(dense)[:, heads, columns]
        count = self.layout.shape[2 if transposed else 1]
        total = dense.new_zeros(
            len(dense), len(self.layout) * count, self.block, dense.shape[-1]
        ).index_add(1, heads * count + rows, products)
        return total.view(len(dense), len(self.layout), count * self.block, -1)


class Softmax(_SparseBlocks):
    """The softmax of each row of a block-sparse matrix, over its blocks.

    Args:
        layout: [heads, rows, columns] over blocks.
        block: edge of a block.
        bench: accepted and ignored.
    """

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        del bench
        super().__init__(layout, block)

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """Return softmax(x * scale + rpe + masks) as a new tensor.

        Args:
            x: [batch, blocks, block, block].
            scale: factor of x.
            rpe: [batch or 1, heads or 1, L, L].
            key_padding_mask: [batch, L].
            attn_mask: [L, L].
            key_padding_mask_mode, attn_mask_mode: "add", or "mul" (a zero masks).

        Raises:
            ModelError: a mask has another dtype than x.
        """
        block, scores = self.block, x * scale
        heads, rows, columns = self._on(x.device)
        for given, name in (
            (rpe, "rpe"),
            (key_padding_mask, "key_padding_mask"),
            (attn_mask, "attn_mask"),
        ):
            if given is not None and given.dtype is not x.dtype:
                raise ModelError(f"{name} is {given.dtype} and x {x.dtype}; cast it")
        if rpe is not None:
            tiles = _tiles(rpe, block)
            scores = scores + tiles[:, heads if rpe.shape[1] > 1 else 0 * rows, rows, columns]
        if key_padding_mask is not None:
            keys = key_padding_mask.reshape(len(x), -1, block)[:, columns][:, :, None]
            scores = _masked(scores, keys, key_padding_mask_mode)
        if attn_mask is not None:
            pairs = _tiles(attn_mask.squeeze()[None, None], block)[:, 0, rows, columns]
            scores = _masked(scores, pairs, attn_mask_mode)
        return self._normalized(scores, heads * self.layout.shape[1] + rows)

    def _normalized(self, scores: Tensor, places: Tensor) -> Tensor:
        shape = len(scores), self.layout.shape[:2].numel(), self.block
        largest = scores.detach().amax(-1)
        index = places[None, :, None].expand_as(largest)
        tops = scores.new_full(shape, -torch.inf).scatter_reduce(1, index, largest, "amax")
        tops = tops.masked_fill(tops == -torch.inf, 0)
        powers = (scores - tops[:, places, :, None]).exp()
        sums = scores.new_zeros(shape).index_add(1, places, powers.sum(-1))
        sums = sums.masked_fill(sums == 0, 1)  # a row without any key gives 0
        return powers / sums[:, places, :, None]


def _tiles(values: Tensor, block: int) -> Tensor:
    """View [..., L, L] as [..., n, n, block, block]."""
    batch, heads, length, width = values.shape
    tiled = values.reshape(batch, heads, length // block, block, width // block, block)
    return tiled.transpose(3, 4)


def _masked(scores: Tensor, mask: Tensor, mode: str) -> Tensor:
    if mode == "add":
        return scores + mask
    return scores.masked_fill(mask == 0, -torch.inf)


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
        expect_one_of(MODES, "key_padding_mask_mode", key_padding_mask_mode, ChoiceError)
        expect_one_of(MODES, "attn_mask_mode", attn_mask_mode, ChoiceError)
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
