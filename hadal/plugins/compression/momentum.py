"""Pruning of blocks during training, by a running mean of |weight x gradient| (snip_momentum).

Masks and scores are frozen parameters of their modules: they are sharded, offloaded, saved and
loaded like weights, and are whole for only one module at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.collectives import sum_
from hadal.plugins.compression.layers import Compressed, compressed_modules
from hadal.plugins.compression.masks import MOST, Blocks, thresholds
from hadal.plugins.compression.names import mask_name
from hadal.plugins.compression.pruning import BLOCK_SCORES, score_of_blocks
from hadal.plugins.compression.rules import BlockRule

_DECAY = 0.9
# fp16 is too narrow for products of weights and gradients; a power of two changes no order.
_LIFT = 2.0**20


class Values(Protocol):
    """Access to possibly sharded parameters. All ranks must make the same calls."""

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return a whole parameter, in fp32."""

    def cut(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of new values of a parameter."""

    def put(self, parameter: nn.Parameter, part: Tensor) -> None:
        """Replace this rank's part of a parameter."""


class BlockPruning:
    """Scores and masks of a model's blocks, over the ranks that share it."""

    def __init__(self, model: nn.Module, ranks: Ranks, values: Values) -> None:
        self._ranks = ranks
        self._values = values
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._modules: dict[str, Compressed] = {}
        self.rule: BlockRule | None = None
        for _, module in compressed_modules(model):
            for rule in module.compression.prunings:
                if isinstance(rule, BlockRule):
                    self._modules[names[_parameter(module, "weight")]] = module
                    self.rule = rule
        self._next: dict[str, Tensor] = {}

    @property
    def has_watched(self) -> bool:
        """True if scores are waiting for the outcome of an update."""
        return bool(self._next)

    def watch(self, gradients: Mapping[str, Tensor]) -> None:
        """Compute the scores after an update with these gradients; `keep` stores them."""
        if self.rule is None:
            return
        for name, module in self._modules.items():
            scores = _parameter(module, BLOCK_SCORES)
            try:
                gradient = gradients[name]
            except KeyError:
                continue
            weight = self._values.read(_parameter(module, "weight"))
            mask = self._values.read(_parameter(module, mask_name(self.rule.technique)))
            new = score_of_blocks(weight, gradient, mask, self.rule.blocks)
            if scores.dtype == torch.float16:
                new = new * _LIFT
            whole = self._values.read(scores) * _DECAY + new
            if scores.dtype == torch.float16:
                whole = whole.clamp(max=torch.finfo(torch.float16).max)
            self._next[name] = self._values.cut(scores, whole)

    def keep(self, applied: bool) -> None:
        """Store the scores of `watch`, if the update was applied."""
        found, self._next = self._next, {}
        if applied:
            for name, part in found.items():
                self._values.put(_parameter(self._modules[name], BLOCK_SCORES), part)

    def prune(self, updates: int) -> None:
        """Choose new masks, if any are due after a number of applied updates."""
        sparsity = None if self.rule is None else self.rule.sparsity_at(updates)
        if not sparsity:
            return
        assert self.rule is not None
        blocks = self.rule.blocks
        slices, sizes = [], []
        for module in self._modules.values():
            units = blocks.units(self._values.read(_parameter(module, BLOCK_SCORES)))
            sizes.append(units.numel())
            slices.append(self._slice(units))
        count = int(sum(sizes) * sparsity / blocks.share)
        most = 1.0 if blocks.is_n_of_m else MOST
        found = thresholds(slices, sizes, count, self._sum, most)
        for module, threshold in zip(self._modules.values(), found, strict=True):
            self._mask(module, blocks, threshold)

    def _mask(self, module: Compressed, blocks: Blocks, threshold: Tensor | float) -> None:
        scores = self._values.read(_parameter(module, BLOCK_SCORES))
        mask = _parameter(module, mask_name("sparse_pruning"))
        self._values.put(mask, self._values.cut(mask, blocks.mask(scores, threshold)))

    def _slice(self, units: Tensor) -> Tensor:
        rank, size, numel = self._ranks.rank, self._ranks.size, units.numel()
        return units[numel * rank // size : numel * (rank + 1) // size].clone()

    def _sum(self, counts: Tensor) -> Tensor:
        if self._ranks.size > 1:
            sum_(counts, self._ranks, "the blocks up to a score")
        return counts


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    found = getattr(module, name)
    assert isinstance(found, nn.Parameter)
    return found
