"""Eigenvalues of blocks as programs use DeepSpeed's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hadal.errors import UsageError
from hadal.plugins.compression.curvature import (
    PowerIteration,
    blocks_of,
    dominant_eigenvalue,
    relative,
)

_log = logging.getLogger(__name__)


class Eigenvalue:
    """Power iteration over the gradients of a backward with `create_graph=True`."""

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 1e-2,
        stability: float = 0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
    ) -> None:
        if not layer_name or layer_num <= 0:
            raise UsageError(
                f"Eigenvalue: expected layer_name and layer_num > 0, got {layer_name!r} and"
                f" {layer_num}; name the list of blocks, and their number"
            )
        self.verbose = verbose
        self.max_iter = max_iter
        self.tol = tol
        self.stability = stability
        self.gas_boundary_resolution = gas_boundary_resolution
        self.layer_name = layer_name
        self.layer_num = layer_num

    def get_layers(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks."""
        return blocks_of(module, self.layer_name, self.layer_num)

    def inner_product(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        """Return the sum of the products of all elements."""
        return torch.stack([(x * y).sum() for x, y in zip(xs, ys, strict=True)]).sum()

    def nan_to_num(self, x: Tensor) -> Tensor:
        """Return a tensor with 0 in place of non-finite values."""
        return x.nan_to_num(0.0, 0.0, 0.0)

    def normalize(self, v: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors whose common norm is 1."""
        norm = self.inner_product(v, v).sqrt() + self.stability
        return [self.nan_to_num(part / norm) for part in v]

    def post_process(self, value_list: Sequence[float]) -> list[float]:
        """Return magnitudes relative to the largest; an exact 0 becomes 1.0."""
        return relative(value_list)

    def compute_eigenvalue(
        self, module: nn.Module, device: Any = None, scale: float = 1.0
    ) -> dict[int, tuple[float, int]] | list[Any]:
        """Return each parameter's (eigenvalue of its block relative to the largest, block) by `id`.

        An empty list if gradients carry no graph.

        Args:
            module: a model after `loss.backward(create_graph=True)`.
            device: unused: it follows from the gradients.
            scale: the loss scale.
        """
        del device
        rule = PowerIteration(self.max_iter, self.tol, self.stability)
        blocks, values = self.get_layers(module), []
        for number, block in enumerate(blocks):
            trained = [p for p in block.parameters() if p.grad is not None and p.grad.grad_fn]
            if not trained:
                _log.warning("Eigenvalue: the gradients of block %d carry no graph", number)
                return []
            gradients = [p.grad for p in trained if p.grad is not None]
            values.append(dominant_eigenvalue(trained, gradients, rule, scale))
            if self.verbose:
                _log.info("block %d: eigenvalue %.6g", number, values[-1])
        shares = self.post_process(values)
        return {
            id(parameter): (share, number)
            for number, (block, share) in enumerate(zip(blocks, shares, strict=True))
            for parameter in block.parameters()
        }
