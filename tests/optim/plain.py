"""Reference optimizers as in their papers, with plain torch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class PlainLion(Optimizer):
    """Algorithm 2 of Chen et al. 2023."""

    def __init__(self, params: Any, lr: float, betas: Any = (0.9, 0.999), weight_decay: float = 0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for theta in group["params"]:
                m = self.state[theta].get("m", torch.zeros_like(theta))
                c = beta1 * m + (1 - beta1) * theta.grad
                theta -= lr * (c.sign() + decay * theta)
                self.state[theta]["m"] = beta2 * m + (1 - beta2) * theta.grad


class PlainAdam(Optimizer):
    """Algorithm 1 of Kingma & Ba 2015 without its bias correction, with either weight decay."""

    def __init__(self, params: Any, **settings: Any) -> None:
        defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "decoupled": True}
        super().__init__(params, {**defaults, "amsgrad": False, "maximize": False, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for theta in group["params"]:
                state, zeros = self.state[theta], torch.zeros_like(theta)
                g = -theta.grad if group["maximize"] else theta.grad
                if group["decoupled"]:
                    theta *= 1 - lr * decay
                else:
                    g = g + decay * theta
                state["m"] = beta1 * state.get("m", zeros) + (1 - beta1) * g
                state["v"] = beta2 * state.get("v", zeros) + (1 - beta2) * g * g
                state["top"] = torch.maximum(state.get("top", zeros), state["v"])
                v = state["top"] if group["amsgrad"] else state["v"]
                theta -= lr * state["m"] / (v.sqrt() + group["eps"])
