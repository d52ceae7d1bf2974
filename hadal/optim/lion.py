"""Lion: an update by the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hadal.optim.elementwise import (
    Block,
    ElementwiseOptimizer,
    Group,
    Scaling,
    SliceUpdate,
    State,
    Zeros,
)


class Lion(ElementwiseOptimizer):
    """EvoLved Sign Momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

    Moves every element by `lr` against the sign of beta1 * momentum + (1 - beta1) * gradient, and
    keeps one momentum, which decays by beta2. `weight_decay` is decoupled.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion expects lr >= 0, weight_decay >= 0 and two betas in [0, 1), got lr {lr},"
                f" weight_decay {weight_decay}, betas {betas}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def begin(self, group: Group, state: State, zeros: Zeros) -> SliceUpdate:
        """Begin an update of one slice."""
        if "exp_avg" not in state:
            state["exp_avg"] = zeros()
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        spare: list[Tensor] = []

        def apply_to(block: Block, scaling: Scaling) -> None:
            values, gradient, (momentum,), _ = block
            if scaling.divisor is not None:
                gradient.div_(scaling.divisor)
            kept: Tensor | float = 1.0
            if scaling.overflowed is not None:
                # A gradient equal to the momentum leaves it unchanged, and times 0 the values too.
                kept = 1 - scaling.overflowed.double()
                torch.where(scaling.overflowed > 0, momentum, gradient, out=gradient)
            if not spare or spare[0].numel() < values.numel():
                spare[:] = [torch.empty_like(values)]
            direction = spare[0][: values.numel()] if values.dim() == 1 else spare[0]
            torch.lerp(momentum, gradient, 1 - beta1, out=direction)
            momentum.lerp_(gradient, 1 - beta2)
            if decay:
                values.mul_(1 - lr * decay * kept)
            direction.sign_()
            if scaling.overflowed is not None:
                direction.mul_(kept)
            values.add_(direction, alpha=-lr)

        def apply(blocks: Sequence[Block], scaling: Scaling) -> None:
            for block in blocks:
                apply_to(block, scaling)

        return SliceUpdate((state["exp_avg"],), apply, in_float32=True)
