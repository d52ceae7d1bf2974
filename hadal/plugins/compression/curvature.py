"""Curvature of blocks: the dominant eigenvalues of their Hessians, by power iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hadal.device import read_on_host, waiting_for
from hadal.errors import UsageError


@dataclass(frozen=True, slots=True)
class PowerIteration:
    """Options of the iteration."""

    most: int = 100
    """The most iterations."""
    tolerance: float = 1e-2
    """The relative change at which it stops."""
    stability: float = 0.0
    """Added to norms."""


def blocks_of(model: nn.Module, name: str, count: int, where: str = "") -> list[nn.Module]:
    """Return the first `count` blocks of the list of modules with a full name.

    Args:
        model: the model.
        name: the full name of the list.
        count: the number of blocks.
        where: the JSON path of the section, for messages.

    Raises:
        UsageError: there is no such list, or it is shorter.
    """
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part, None)
    is_list = isinstance(found, nn.Module) and hasattr(found, "__iter__")
    blocks: list[nn.Module] = list(found) if is_list else []
    if not blocks:
        lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        raise UsageError(
            f"{where}layer_name: {type(model).__name__} has no list of blocks {name!r}; its lists"
            f" are {', '.join(lists) or 'none'}"
        )
    if not 0 < count <= len(blocks):
        raise UsageError(
            f"{where}layer_num: expected 1 to {len(blocks)}, the blocks of {name}, got {count}"
        )
    return blocks[:count]


def dominant_eigenvalue(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rule: PowerIteration,
    scale: float = 1.0,
) -> float:
    """Return the dominant eigenvalue of a loss's Hessian with respect to some parameters.

    It starts from a random direction drawn from torch's generator, whose state is restored: all
    blocks start from the same numbers.

    Args:
        parameters: parameters of one block.
        gradients: the loss's gradients, made with `create_graph=True`.
        rule: the options of the iteration.
        scale: the factor of the loss, if it was scaled: the eigenvalue is multiplied by it.
    """
    state = torch.random.get_rng_state()
    # Drawn on the host, so that every device starts alike.
    with waiting_for("the first direction of an eigenvalue", parameters[0].device):
        drawn = [torch.randn(each.shape).to(each.device) for each in parameters]
    torch.random.set_rng_state(state)
    direction = _normalized(drawn, rule.stability)
    now, before, done = 1.0, 0.0, 0
    while done < rule.most and abs(now) > 0 and abs((now - before) / now) >= rule.tolerance:
        before = now
        given = [each.to(g.dtype) for each, g in zip(direction, gradients, strict=True)]
        found = torch.autograd.grad(
            gradients, parameters, given, retain_graph=True, allow_unused=True
        )
        turned = [
            torch.zeros_like(p, dtype=torch.float32) if h is None else _finite(h.float())
            for p, h in zip(parameters, found, strict=True)
        ]
        now = float(read_on_host(_inner(turned, direction), "an eigenvalue"))
        direction = [each / scale for each in _normalized(turned, rule.stability)]
        done += 1
    return now * scale


def relative(values: Sequence[float]) -> list[float]:
    """Return magnitudes relative to the largest; an exact 0 becomes 1.0, as in DeepSpeed."""
    largest = max(map(abs, values), default=0.0)
    return [abs(value) / largest if value else 1.0 for value in values]


def slowdown_of(value: float | None) -> int:
    """Return the factor by which a period grows for weights of this relative eigenvalue: 1 to 5."""
    if value is None:
        return 1
    return 1 + math.floor(4 * value) if math.isfinite(value) else 5


def _inner(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(first, second, strict=True)]).sum()


def _normalized(parts: Sequence[Tensor], stability: float) -> list[Tensor]:
    norm = _inner(parts, parts).sqrt() + stability
    return [_finite(part / norm) for part in parts]


def _finite(part: Tensor) -> Tensor:
    return part.nan_to_num(0.0, 0.0, 0.0)
