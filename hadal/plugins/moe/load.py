"""Counts of how evenly the experts are used, from forwards to the monitors after an update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hadal.comm.collectives import sum_
from hadal.device import is_in_backward
from hadal.listener import Listener, Setting, Update

_PREFIX = "Train/MoE/"


class Load:
    """Choices per expert of one layer since the last reading, counted only if enabled."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.is_counted = False
        self._counts: Tensor | None = None

    def add(self, counts: Tensor, dropped: Tensor | int) -> None:
        """Count a forward: [E] choices, of which some were dropped.

        A forward that is recomputed in backward is counted once; one in evaluation is not counted.
        """
        if not self.is_counted or is_in_backward() or not torch.is_grad_enabled():
            return
        found = torch.cat([counts, counts.new_zeros(1) + dropped])
        self._counts = found if self._counts is None else self._counts + found

    def take(self, device: torch.device) -> Tensor:
        """Return [E + 1] int64, choices per expert and dropped choices; reset the counts."""
        found, self._counts = self._counts, None
        if found is None:
            found = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=device)
        return found


def imbalance(counts: Tensor) -> Tensor:
    """Return the largest of [E] counts over their mean: 1 if all are equal, E if one has all."""
    return counts.max() / counts.double().mean().clamp(min=1e-9)


def loads_of(model: nn.Module) -> list[Load]:
    """Return the counters of all layers of experts in a model."""
    found = (getattr(module, "load", None) for module in model.modules())
    return [load for load in found if isinstance(load, Load)]


class ExpertLoad(Listener):
    """Writes `load_imbalance`, the mean over layers, and `dropped_tokens`, the sum over them."""

    name = "hadal.experts"

    def __init__(self, section: Any, setting: Setting) -> None:
        del section
        self._loads = loads_of(setting.model)
        self._ranks = setting.sharding
        self._write = setting.write
        self._device = setting.device
        for load in self._loads:
            load.is_counted = True

    def after_update(self, update: Update) -> None:
        """Sum the counts of the update over ranks, and write the results."""
        if not self._loads or self._write is None:
            return
        counts = [load.take(self._device) for load in self._loads]
        total = torch.cat(counts)
        sum_(total, self._ranks, "the sum of the experts' loads")
        of_layers = total.split([len(one) for one in counts])
        uneven = torch.stack([imbalance(one[:-1]) for one in of_layers]).mean()
        dropped = torch.stack([one[-1] for one in of_layers]).sum()
        self._write(
            [
                (f"{_PREFIX}load_imbalance", uneven, update.total_samples),
                (f"{_PREFIX}dropped_tokens", dropped, update.total_samples),
            ]
        )

    def on_error(self, error: BaseException) -> None:
        """Discard the counts of an interrupted update."""
        for load in self._loads:
            load.take(self._device)

    def close(self) -> None:
        """Stop counting."""
        for load in self._loads:
            load.is_counted = False
