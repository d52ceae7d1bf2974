"""Pruned weights become the model's own.

Tests: tests/compression/test_pruning.py
"""

from __future__ import annotations

from torch import Tensor, nn

from hadal.compression.layers import Compressed, mask_name, score_name
from hadal.compression.pruning import BLOCK_SCORES
from hadal.compression.rules import BlockRule, PruneRule


def make_masks_final(modules: list[Compressed]) -> None:
    """Multiply weights and biases by their masks, and remove masks and scores.

    Weights that were tied and have the same masks stay tied.
    """
    made: list[tuple[Tensor, Tensor, nn.Parameter]] = []
    for module in modules:
        old, rules = module.weight, module.compression.prunings
        weight, bias = module.weight.detach(), module.bias_or_none()
        for rule in rules:
            weight, bias = module.pruned(rule, weight, None if bias is None else bias.detach())
        if rules:
            module.weight = _made(made, old, weight.detach())
            if bias is not None:
                module.bias = nn.Parameter(bias.detach(), requires_grad=bias_trains(module))
        for rule in rules:
            _remove(module, rule)
        module.compression.prunings = module.compression.active = ()


def bias_trains(module: Compressed) -> bool:
    """Return whether a module's bias is trained."""
    bias = module.bias_or_none()
    return bias is not None and bias.requires_grad


def _made(
    made: list[tuple[Tensor, Tensor, nn.Parameter]], old: Tensor, values: Tensor
) -> nn.Parameter:
    for other, theirs, parameter in made:
        if other is old and theirs.equal(values):
            return parameter
    parameter = nn.Parameter(values.contiguous(), requires_grad=old.requires_grad)
    made.append((old, values, parameter))
    return parameter


def _remove(module: Compressed, rule: PruneRule | BlockRule) -> None:
    for name in (mask_name(rule.technique), score_name(rule.technique), BLOCK_SCORES):
        if hasattr(module, name):
            delattr(module, name)
