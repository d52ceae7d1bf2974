"""Settings of one module's compression, and their effect after a number of updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hadal.plugins.compression.masks import Blocks, sparsity_at

_SCORES = {
    "sparse_pruning": "sparse_mask_scores",
    "row_pruning": "row_mask_scores",
    "head_pruning": "head_pruning_scores",
    "channel_pruning": "channel_mask_scores",
}


def score_name(technique: str) -> str:
    """Return the name of a module's trained scores, as in DeepSpeed's checkpoints."""
    return _SCORES[technique]


def is_score(name: str) -> bool:
    """Return whether a parameter of this full name holds trained scores."""
    return name.rpartition(".")[2] in _SCORES.values()


def mask_name(technique: str) -> str:
    """Return the name of a module's fixed mask, as in DeepSpeed's checkpoints."""
    return f"{technique}_mask"


class Bits(NamedTuple):
    """Bit width of a weight, and the fraction of the blend."""

    bits: int
    full: float
    """Fraction of the unquantized weight in the blend; 0.0 without a blend."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Settings of one weight's quantization."""

    start_bits: int
    target_bits: int
    period: int
    offset: int
    groups: int
    symmetric: bool
    stochastic: bool
    in_forward: bool
    """True if the target applies at once; else the bits fall one by one."""
    change_ratio: float | None
    """The fall of the unquantized fraction with each update; None without a blend."""

    def at(self, updates: int, slowdowns: tuple[int, ...] = ()) -> Bits | None:
        """Return the bits after a number of applied updates; None before the offset.

        Args:
            updates: the applied updates.
            slowdowns: the factors by which the period grew with each lost bit; 1 for missing
                ones.
        """
        steps = updates - self.offset
        if steps < 0:
            return None
        if self.in_forward:
            return Bits(self.target_bits, 0.0)
        bits, since = self._fallen(steps, slowdowns)
        full = 0.0
        if self.change_ratio is not None:
            full = max(0.0, 1.0 - self.change_ratio * (steps - since))
        return Bits(bits, full)

    def settled(self, slowdowns: tuple[int, ...] = ()) -> int:
        """Return the number of applied updates after which nothing changes any more."""
        if self.in_forward:
            return self.offset
        steps = self._fallen(None, slowdowns)[1]
        if self.change_ratio is not None:
            steps += int(1.0 / self.change_ratio) + 1
        return self.offset + steps

    def _fallen(self, steps: int | None, slowdowns: tuple[int, ...]) -> tuple[int, int]:
        """Return the bits after `steps`, or at the end, and the step of the last change.

        The period doubles with each bit, times its slowdown; at most one bit is lost per step.
        """
        bits, period, since = self.start_bits, self.period, 0
        while bits > self.target_bits:
            due = max(since + 1, period)
            if steps is not None and due > steps:
                break
            lost = self.start_bits - bits
            slowdown = slowdowns[lost] if lost < len(slowdowns) else 1
            bits, period, since = bits - 1, 2 * period * slowdown, due
        return bits, since


@dataclass(frozen=True, slots=True)
class ActivationRule:
    """Settings of the quantization of one module's input."""

    bits: int
    offset: int
    symmetric: bool
    static: bool
    """True for a running range; else it is measured per token or sample."""

    @property
    def settled(self) -> int:
        """The number of applied updates after which nothing changes any more."""
        return self.offset


@dataclass(frozen=True, slots=True)
class PruneRule:
    """Settings of one technique that prunes one module."""

    technique: str
    """The section: `sparse_pruning`, `row_pruning`, `head_pruning` or `channel_pruning`."""
    ratio: float
    """The fraction to keep."""
    offset: int
    learned: bool
    """True if the masks follow trained scores; False if the initial weights determine them."""
    heads: int = 0

    @property
    def settled(self) -> int:
        """The number of applied updates after which nothing changes any more."""
        return self.offset


@dataclass(frozen=True, slots=True)
class BlockRule:
    """Settings of the pruning of blocks by the momentum of weights times gradients."""

    blocks: Blocks
    ratio: float
    """The fraction to keep."""
    offset: int
    end: int
    stride: int
    technique: str = "sparse_pruning"

    @property
    def settled(self) -> int:
        """The number of applied updates after which nothing changes any more."""
        return self.end

    def sparsity_at(self, updates: int) -> float | None:
        """Return the fraction to prune before the next update; None if masks stay."""
        since = updates - self.offset
        if not self.offset <= updates <= self.end or since % self.stride:
            return None
        last = (self.end - self.offset) // self.stride
        return sparsity_at(since // self.stride, last, 1.0 - self.ratio)
