"""Reference 1-bit Adam, 1-bit Lamb and 0/1 Adam as published, for all ranks, over flat vectors.

Written from summaries of the papers and what the keys mean; not yet compared with the papers' texts
(how often 0/1 Adam meets, how the average of 1-bit Lamb's ratios begins). Nothing of the library is
used but where parameters lie in a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from comm.in_one_place import TwoHops
from torch import Tensor

from hadal.zero.layout import Layout

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "eps_inside_sqrt": False,
    "weight_decay": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "coeff_beta": 0.9,
    "factor_max": 4.0,
    "factor_min": 0.5,
    "factor_threshold": 0.1,
    "var_update_scaler": 16,
    "local_step_scaler": 32678,
    "local_step_clipper": 16,
}


class Paper:
    """The base of the three references; `weights` are each rank's."""

    def __init__(
        self, layout: Layout, weights: Tensor, world: int, options: dict[str, Any]
    ) -> None:
        self.o = {**DEFAULTS, **options}
        self.layout, self.world, self.count = layout, world, 0
        self.weights = [weights.clone() for _ in range(world)]
        self.m = [torch.zeros_like(weights) for _ in range(world)]
        self.v = torch.zeros_like(weights)
        self.hops = TwoHops(world, weights.numel())

    def step(self, gradients: Sequence[Tensor], lr: float | None = None) -> None:
        self.count += 1
        self.lr = self.o["lr"] if lr is None else lr
        self.update(list(gradients))

    def update(self, gradients: list[Tensor]) -> None:
        raise NotImplementedError

    def root(self, v: Tensor) -> Tensor:
        return (v + self.o["eps"]) ** 0.5 if self.o["eps_inside_sqrt"] else v**0.5 + self.o["eps"]

    def learn(self, gradients: list[Tensor]) -> None:
        """Update Adam's moments with the mean gradient."""
        beta1, beta2 = self.o["betas"]
        mean = torch.stack(gradients).mean(0)
        self.m = [beta1 * m + (1 - beta1) * mean for m in self.m]
        self.v = beta2 * self.v + (1 - beta2) * mean**2

    def told(self, values: list[Tensor]) -> Tensor:
        """Return the mean that all ranks receive; padding between parameters is zero."""
        mean = self.hops.mean(values)
        for owed in self.hops.mine:
            self.clear_gaps(owed)
        of_mean = torch.cat(self.hops.of_mean)
        self.clear_gaps(of_mean)
        self.hops.of_mean = list(of_mean.split(len(of_mean) // self.world))
        self.clear_gaps(mean)
        return mean

    def clear_gaps(self, values: Tensor) -> None:
        for start, stop in self.layout.gaps:
            values[start:stop] = 0

    def momenta(self, gradients: list[Tensor]) -> list[Tensor]:
        beta1 = self.o["betas"][0]
        return [beta1 * m + (1 - beta1) * g for m, g in zip(self.m, gradients, strict=True)]

    def move(self) -> None:
        decay = self.o["weight_decay"]
        for rank, m in enumerate(self.m):
            w = self.weights[rank]
            self.weights[rank] = w - self.lr * (m / self.root(self.v) + decay * w)


class OneBitAdamOfPaper(Paper):
    def update(self, gradients: list[Tensor]) -> None:
        if self.count <= self.o["freeze_step"]:
            self.learn(gradients)
        else:
            mean = self.told(self.momenta(gradients))
            self.m = [mean] * self.world
        self.move()


class ZeroOneAdamOfPaper(Paper):
    u: list[Tensor]
    rates = 0.0

    def learns(self) -> bool:
        """k(1) = 1, k(j + 1) = k(j) + 2^floor(j / scaler)."""
        j, k = 1, 1
        while k < self.count:
            k += 2 ** (j // self.o["var_update_scaler"])
            j += 1
        return k == self.count

    def update(self, gradients: list[Tensor]) -> None:
        local = self.count - self.o["var_freeze_step"]
        beta1 = self.o["betas"][0]
        if local <= 0:
            if self.learns():
                self.learn(gradients)
            else:
                mean = self.told(gradients)
                self.m = [beta1 * m + (1 - beta1) * mean for m in self.m]
            self.move()
            return
        if local == 1:
            self.hops = TwoHops(self.world, self.v.numel())
            self.begin()
        self.m = self.momenta(gradients)
        self.move()
        self.anchor = self.anchor * (1 - self.lr * self.o["weight_decay"])
        self.u = [u + self.lr * m for u, m in zip(self.u, self.m, strict=True)]
        self.rates += self.lr
        doubled = (local - 1) // self.o["local_step_scaler"]
        interval = min(self.o["local_step_clipper"], 2**doubled)
        if local % interval == 0:
            self.synchronize()

    def begin(self) -> None:
        self.u = [torch.zeros_like(self.v) for _ in range(self.world)]
        self.anchor, self.rates = self.weights[0], 0.0

    def synchronize(self) -> None:
        mean = self.told(self.u)
        self.m = [mean / self.rates] * self.world
        self.weights = [self.anchor - mean / self.root(self.v)] * self.world
        self.begin()


class OneBitLambOfPaper(Paper):
    def update(self, gradients: list[Tensor]) -> None:
        if self.count <= self.o["freeze_step"]:
            if self.count == 1:
                self.coefficient = [0.0] * len(self.layout.slots)
                self.last = [1.0] * len(self.layout.slots)
            self.learn(gradients)
            self.fresh = self.v
            self.walk(self.ratio)
            return
        beta1, beta2 = self.o["betas"]
        before, mean = self.m[0], self.told(self.momenta(gradients))
        gradient = (mean - beta1 * before) / (1 - beta1)
        self.fresh = beta2 * self.fresh + (1 - beta2) * gradient**2
        self.m = [mean] * self.world
        self.walk(self.frozen_ratio)

    def walk(self, ratio_of: Any) -> None:
        w, self.ratios = self.weights[0].clone(), []
        prelude = self.m[0] / self.root(self.v)
        for number, slot in enumerate(self.layout.slots):
            cut = slice(slot.offset, slot.stop)
            if slot.numel:
                update = prelude[cut] + self.o["weight_decay"] * w[cut]
                ratio = ratio_of(number, cut, w[cut], prelude[cut], update)
                self.ratios.append(ratio)
                w[cut] = w[cut] - self.lr * ratio * update
        self.weights = [w] * self.world

    def ratio(self, number: int, cut: slice, w: Tensor, prelude: Tensor, update: Tensor) -> float:
        low, high, beta = (self.o[key] for key in ("min_coeff", "max_coeff", "coeff_beta"))
        if not (w.norm() > 0 and update.norm() > 0):
            return 1.0
        ratio = min(max(float(w.norm() / update.norm()), low), high)
        self.coefficient[number] = beta * self.coefficient[number] + (1 - beta) * ratio
        return ratio

    def frozen_ratio(
        self, number: int, cut: slice, w: Tensor, prelude: Tensor, update: Tensor
    ) -> float:
        factor = float((self.root(self.v[cut]) / self.root(self.fresh[cut])).max())
        if self.o["weight_decay"]:
            share = min(1.0, float(prelude.norm() / update.norm()))
            factor = factor * share + (1 - share)
        factor = min(max(factor, self.o["factor_min"]), self.o["factor_max"])
        last, threshold = self.last[number], self.o["factor_threshold"]
        self.last[number] = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
        return self.coefficient[number] * self.last[number]


PAPERS: dict[str, type[Paper]] = {
    "OneBitAdam": OneBitAdamOfPaper,
    "OneBitLamb": OneBitLambOfPaper,
    "ZeroOneAdam": ZeroOneAdamOfPaper,
}
