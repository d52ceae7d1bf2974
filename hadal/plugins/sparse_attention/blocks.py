"""Products and softmax of block-sparse matrices, for programs that build their own attention.

A block-sparse matrix is [batch, blocks, block, block], its blocks in the order of
`layout.nonzero()`: by head, row and column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.errors import ChoiceError, ModelError


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
        if mode not in ("sdd", "dsd", "dds"):
            raise ChoiceError(f'mode is {mode!r}; choose "sdd", "dsd" or "dds"')
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
