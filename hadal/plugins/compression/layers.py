"""Modules that compute with effective weights and inputs, and the rules of one module.

Only a module's class changes: parameters, buffers, hooks, its mode and names in the state dict
stay, and `isinstance` still holds. The effective weight exists only during a forward, so sharded
weights need nothing but their unit's gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hadal.device import is_in_backward
from hadal.plugins.compression.masks import Blocks, as_weight, chosen, masked_heads, sparsity_at
from hadal.plugins.compression.quantizers import quantize, quantize_in_range, straight_through

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


@dataclass(slots=True)
class Compression:
    """The techniques of one module, and their current state."""

    weight: WeightRule | None = None
    activation: ActivationRule | None = None
    prunings: tuple[PruneRule | BlockRule, ...] = ()
    """In the order in which a forward applies them."""
    bits: Bits | None = None
    """Bits of the weight in the next forward; None if it is not quantized."""
    slowdowns: tuple[int, ...] = ()
    """The factors by which the period grew with each bit that the weight has lost."""
    activation_is_on: bool = False
    active: tuple[PruneRule | BlockRule, ...] = ()
    """Those of `prunings` that the next forward applies."""

    def advance(self, updates: int) -> None:
        """Set the state after a number of applied updates."""
        if self.weight is not None:
            self.bits = self.weight.at(updates, self.slowdowns)
        if self.activation is not None:
            self.activation_is_on = updates >= self.activation.offset
        self.active = tuple(rule for rule in self.prunings if updates >= rule.offset)

    @property
    def settled(self) -> int:
        """The number of applied updates after which nothing changes any more."""
        others = (self.activation, *self.prunings)
        ends = [rule.settled for rule in others if rule is not None]
        if self.weight is not None:
            ends.append(self.weight.settled(self.slowdowns))
        return max(ends, default=0)

    @property
    def lost_bits(self) -> int:
        """Bits that the weight has lost so far, if they fall one by one."""
        if self.weight is None or self.weight.in_forward or self.bits is None:
            return 0
        return self.weight.start_bits - self.bits.bits

    def loses_a_bit(self, updates: int) -> bool:
        """Return whether the weight has fewer bits after `updates` applied updates than now."""
        found = None if self.weight is None else self.weight.at(updates, self.slowdowns)
        return found is not None and self.bits is not None and found.bits < self.bits.bits


class RunningRange(nn.Module):
    """Quantizes to a running range of the values seen in training.

    The buffer `x_min_max` holds the range: the first batch's, then moved by each batch. A forward
    that is repeated for the backward does not move it again.
    """

    x_min_max: Tensor

    def __init__(self, act_range_momentum: float = 0.95, quant_mode: str = "symmetric") -> None:
        super().__init__()
        self.act_range_momentum = act_range_momentum
        self.quant_mode = quant_mode
        self.register_buffer("x_min_max", torch.zeros(2))

    def forward(self, x: Tensor, num_bits: int) -> Tensor:
        """Return `x` in the range's steps."""
        if self.training and not is_in_backward():
            self._move(x.detach())
        low, high = self.x_min_max.unbind()
        symmetric = self.quant_mode == "symmetric"
        shown = quantize_in_range(x.detach(), num_bits, low, high, symmetric=symmetric)
        return straight_through(x, shown)

    @torch.no_grad()
    def _move(self, x: Tensor) -> None:
        seen = torch.stack(x.aminmax()).to(self.x_min_max)
        old = torch.where(self.x_min_max[0] == self.x_min_max[1], seen, self.x_min_max)
        momentum = self.act_range_momentum
        # On the device: nothing is read back.
        self.x_min_max.copy_(old * momentum + seen * (1 - momentum))


class Compressed(nn.Module):
    """The base of the classes below."""

    plain: ClassVar[type[nn.Module]]
    """The class that a module gets back once nothing is left to apply."""
    compression: Compression
    weight: Tensor
    activation_quantizer: RunningRange | None
    kept_channels: Tensor | None
    """The channels that the last forward kept, (out, 1, 1, 1); None if it pruned none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begin()

    @property
    def scale_groups(self) -> int:
        """The number of groups of the weight."""
        assert self.compression.weight is not None
        return self.compression.weight.groups

    def quantized(self, bits: Bits) -> Tensor:
        """Return the weight in some bits, without a gradient."""
        rule = self.compression.weight
        assert rule is not None
        weight = self.weight.detach()
        found = quantize(
            weight,
            bits.bits,
            self.scale_groups,
            symmetric=rule.symmetric,
            stochastic=rule.stochastic,
        )
        return found if bits.full == 0.0 else torch.lerp(found, weight, bits.full)

    def effective_weight(self) -> Tensor:
        """Return the weight that this forward computes with."""
        return self.effective()[0]

    def effective(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias that this forward computes with."""
        bits = self.compression.bits
        weight, bias = self.weight, self.bias_or_none()
        self.kept_channels = None
        if bits is not None:
            weight = straight_through(weight, self.quantized(bits))
        for rule in self.compression.active:
            weight, bias = self.pruned(rule, weight, bias)
        return weight, bias

    def bias_or_none(self) -> Tensor | None:
        """Return the bias; None if the module has none, as an embedding."""
        bias: Tensor | None = getattr(self, "bias", None)
        return bias

    def pruned(
        self, rule: PruneRule | BlockRule, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a weight and a bias times the masks of one technique."""
        mask = self.mask(rule).to(weight.dtype)
        if rule.technique == "channel_pruning":
            # Scores may be sharded again when the batch normalization behind this module runs.
            self.kept_channels = mask.detach()
        if isinstance(rule, BlockRule):
            whole = as_weight(rule.blocks.expand(mask), weight.shape)
            # Weights are trained on while they are pruned, as their blocks may return.
            return straight_through(weight, weight.detach() * whole), bias
        if rule.technique == "sparse_pruning":
            return weight * mask, bias
        if rule.technique == "head_pruning":
            return masked_heads(weight, mask), bias
        return weight * mask, None if bias is None else bias * mask.reshape(-1)

    def mask(self, rule: PruneRule | BlockRule) -> Tensor:
        """Return the mask of one technique: 1.0, or True, for what is kept."""
        if isinstance(rule, PruneRule) and rule.learned:
            scores = getattr(self, score_name(rule.technique))
            return chosen(scores, rule.ratio)
        mask: Tensor = getattr(self, mask_name(rule.technique))
        return mask

    def effective_input(self, x: Tensor) -> Tensor:
        """Return the input that this forward computes with."""
        rule = self.compression.activation
        if rule is None or not self.compression.activation_is_on or not x.numel():
            return x
        x = self._without_pruned_heads(x)
        if self.activation_quantizer is not None:
            return self.activation_quantizer(x, rule.bits)  # type: ignore[no-any-return]
        groups = self.input_groups(x)
        shown = quantize(x.detach(), rule.bits, groups, symmetric=rule.symmetric)
        return straight_through(x, shown)

    def input_range(self, x: Tensor) -> tuple[int, Tensor]:
        """Return the bits of an input, and the largest magnitude of each token, or of the range.

        The input is quantized around zero.
        """
        rule = self.compression.activation
        assert rule is not None
        x = self._without_pruned_heads(x)
        if self.activation_quantizer is None:
            return rule.bits, x.abs().amax(-1, keepdim=True)
        low, high = self.activation_quantizer.x_min_max.to(x.dtype).unbind()
        return rule.bits, torch.maximum(low.abs(), high)

    def _without_pruned_heads(self, x: Tensor) -> Tensor:
        """Return an input whose pruned heads are 0: they must not widen its range."""
        for rule in self.compression.active:
            if rule.technique == "head_pruning":
                # Their weights are 0 already, through which scores get their gradients.
                mask = self.mask(rule).detach().to(x.dtype)
                x = masked_heads(x.reshape(-1, x.shape[-1]), mask).view(x.shape)
        return x

    def input_groups(self, x: Tensor) -> int:
        """Return the number of groups of an input: one for each token."""
        return x.numel() // x.shape[-1]

    def quantize_inputs(self, rule: ActivationRule) -> None:
        """Quantize inputs by a rule, once it is due; a running range begins empty."""
        self.compression.activation = rule
        if rule.static and self.activation_quantizer is None:
            found = RunningRange(quant_mode="symmetric" if rule.symmetric else "asymmetric")
            self.activation_quantizer = found.to(self.weight.device).train(self.training)

    def begin(self) -> None:
        """Start with nothing to apply."""
        self.compression = Compression()
        self.activation_quantizer = None
        self.kept_channels = None


class CompressedLinear(Compressed, nn.Linear):
    """`nn.Linear` with an effective weight and input."""

    plain: ClassVar[type[nn.Module]] = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Return the product."""
        return F.linear(self.effective_input(input), *self.effective())


class CompressedConv2d(Compressed, nn.Conv2d):
    """`nn.Conv2d` with an effective weight and input."""

    plain = nn.Conv2d

    def input_groups(self, x: Tensor) -> int:
        """Return the number of groups of an input: one for each sample."""
        return x.shape[0] if x.dim() == 4 else 1

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution."""
        found: Tensor = self._conv_forward(self.effective_input(input), *self.effective())
        return found


class CompressedEmbedding(Compressed, nn.Embedding):
    """`nn.Embedding` with an effective weight: one group for each row."""

    plain = nn.Embedding

    @property
    def scale_groups(self) -> int:
        """The number of groups of the weight: one for each row."""
        return self.num_embeddings

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows."""
        weight = self.effective_weight()
        scaled = self.scale_grad_by_freq
        return F.embedding(input, weight, self.padding_idx, None, 2.0, scaled, self.sparse)


KINDS: tuple[type[Compressed], ...] = (CompressedLinear, CompressedConv2d, CompressedEmbedding)


def compressible(module: nn.Module) -> bool:
    """Return whether a module's class is one that techniques know, or a subclass."""
    return isinstance(module, tuple(kind.plain for kind in KINDS))


def why_not(module: nn.Module) -> str | None:
    """Return the reason that a module's class cannot be changed; None if it can."""
    if isinstance(module, Compressed) or type(module) in [kind.plain for kind in KINDS]:
        is_bound = isinstance(module, nn.Embedding) and module.max_norm is not None
        return "it has max_norm, which changes the weight itself" if is_bound else None
    name = type(module).__name__
    if name == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight without calling it"
    return f"its class {name} may compute something other than torch's"


def change(module: nn.Module) -> Compressed:
    """Change a module's class in place, if it is not changed yet, and return it."""
    if not isinstance(module, Compressed):
        kind = next(kind for kind in KINDS if kind.plain is type(module))
        module.__class__ = kind
        assert isinstance(module, Compressed)
        module.begin()
    return module


def change_back(module: Compressed) -> None:
    """Restore a module's own class."""
    if module.plain is type(module):
        module.begin()
        return
    del module.compression, module.activation_quantizer, module.kept_channels
    module.__class__ = module.plain  # type: ignore[assignment]


def is_prepared(model: nn.Module) -> bool:
    """Return whether any technique acts on a module of a model."""
    states = [module.compression for _, module in compressed_modules(model)]
    return any(state.weight or state.activation or state.prunings for state in states)


def compressed_modules(model: nn.Module) -> Iterator[tuple[str, Compressed]]:
    """Yield the full names of a model's changed modules, and the modules."""
    for name, module in model.named_modules():
        if isinstance(module, Compressed):
            yield name, module
