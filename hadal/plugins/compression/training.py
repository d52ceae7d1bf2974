"""Compression in an engine's training: schedules, ranges that ranks share, curvature of blocks."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.collectives import sum_
from hadal.config.compression import CompressionTraining
from hadal.device import read_on_host, waiting_for
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Setting, Update
from hadal.plugins.compression.compress import (
    advance,
    is_teacher,
    tell_missing_teacher,
    with_old_form,
)
from hadal.plugins.compression.layers import (
    BlockRule,
    Compressed,
    RunningRange,
    compressed_modules,
    mask_name,
)
from hadal.plugins.compression.masks import MOST, Blocks, thresholds
from hadal.plugins.compression.pruning import BLOCK_SCORES, score_of_blocks


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


_log = logging.getLogger("hadal.plugins.compression")
_LABEL = "the comparison of the ranges of activations"


def techniques_of(section: CompressionTraining, setting: Setting) -> CompressionTechniques | None:
    """Return the techniques for an engine; None if it trains a teacher, or no modules change."""
    model, old = setting.model, setting.config.quantize_training
    if is_teacher(model):
        return None
    if old is not None and old.enabled and setting.world.rank == 0:
        _log.warning(
            "quantize_training is read as compression_training.weight_quantization of all"
            " suitable modules; write that section, which also selects the modules"
        )
    section = with_old_form(section, old)
    tell_missing_teacher(model, section)
    return CompressionTechniques(section, setting) if section.changes_modules else None


class CompressionTechniques(Listener):
    """Advances the techniques of `compression_training` with each applied update.

    The engine's counters and the model's parameters and buffers determine its state, except for the
    slowdowns of weights in curved regions of the loss (`eigenvalue`), which this stores.
    """

    name = "compression_training"

    def __init__(self, section: CompressionTraining, setting: Setting) -> None:
        self._model = model = setting.model
        self._ranks = setting.sharding
        self._speaks = section.weight_quantization.shared_parameters.quantize_verbose
        self._modules = dict(compressed_modules(model))
        self._settled = self._end()
        self._ranges = [part for part in model.modules() if isinstance(part, RunningRange)]
        self._blocks = BlockPruning(model, setting.sharding, setting.values)
        self._attempts = -1
        self._applied = -1
        self._engine: weakref.ref[Any] | None = None
        self._sees_forwards = False

    def on_attach(self, engine: Any) -> None:
        """Keep the engine for its counters."""
        self._engine = weakref.ref(engine)

    def before_forward(self, forward: Forward) -> None:
        """Set the modules to the number of applied updates."""
        self._sees_forwards |= forward.is_training
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            self._follow(engine, forward.updates, lambda: engine.skipped_steps)

    def _follow(self, engine: Any, attempts: int, skipped: Callable[[], int]) -> None:
        is_over = self._applied >= self._settled and attempts >= self._attempts
        if attempts == self._attempts or is_over:
            return
        # May wait for the device's verdict on the last update; not after the last change.
        applied = attempts - skipped()
        self._attempts = attempts
        if applied != self._applied:
            before = self._bits()
            advance(self._model, applied)
            self._slow_down(engine)
            self._blocks.prune(applied)
            self._tell(before, applied)
        self._applied = applied

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        """Update scores from the gradients while blocks are still pruned by them."""
        if self._blocks.rule is not None and self._applied < self._blocks.rule.end:
            self._blocks.watch(gradients)

    def after_update(self, update: Update) -> None:
        """Average the running ranges over the ranks, which see different samples."""
        if bool(self._blocks._next):
            self._blocks.keep(not update.skipped)
        engine = None if self._engine is None else self._engine()
        if engine is not None and not self._sees_forwards:
            # The program calls the module itself, so no forward of the engine follows.
            self._follow(engine, update.number, lambda: update.skipped_updates)
        self._sees_forwards = False
        if not self._ranges or self._ranks.size == 1:
            return
        with torch.no_grad():
            both = torch.stack([part.x_min_max.float() for part in self._ranges])
            total = both.flatten()
            sum_(total, self._ranks, _LABEL)
            for part, mean in zip(
                self._ranges, total.view_as(both) / self._ranks.size, strict=True
            ):
                part.x_min_max.copy_(mean)

    @property
    def loses_bits_next(self) -> bool:
        """True if some weight has fewer bits after the next update, if that is applied."""
        states = [module.compression for module in self._modules.values()]
        return any(state.loses_a_bit(self._applied + 1) for state in states)

    def _slow_down(self, engine: Any) -> None:
        """Delay the next bit reduction of weights whose loss is curved."""
        curvature = engine.eigenvalues
        if curvature is None:
            return
        for name, module in self._modules.items():
            state = module.compression
            missing = state.lost_bits - len(state.slowdowns)
            if missing > 0:
                # Bits that were lost before a checkpoint without curvature have no known slowdown.
                now = slowdown_of(curvature.relative_of(name))
                state.slowdowns += (*[1] * (missing - 1), now)
        self._settled = self._end()

    def _end(self) -> int:
        states = [module.compression for module in self._modules.values()]
        return max((state.settled for state in states), default=0)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the applied updates, and each weight's slowdowns by curvature."""
        states = {name: module.compression for name, module in self._modules.items()}
        slowed = {name: list(state.slowdowns) for name, state in states.items() if state.slowdowns}
        return {"applied": self._applied, "slowdowns": slowed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the modules to a saved state, and again at the next forward: masks were loaded."""
        slowed = state.get("slowdowns", {})
        for name, module in self._modules.items():
            module.compression.slowdowns = tuple(int(one) for one in slowed.get(name, ()))
        self._settled = self._end()
        self._attempts = self._applied = -1
        advance(self._model, max(0, int(state.get("applied", 0))))

    def _bits(self) -> dict[str, int | None]:
        if not self._speaks or self._ranks.rank != 0:
            return {}
        found = {name: module.compression.bits for name, module in compressed_modules(self._model)}
        return {name: bits and bits.bits for name, bits in found.items()}

    def _tell(self, before: dict[str, int | None], applied: int) -> None:
        for name, bits in self._bits().items():
            if bits != before[name]:
                _log.info("%s: %s bits after %d updates", name, bits, applied)


# ---- pruning by momentum -------------------------------------------------------------------------

# Masks and scores are frozen parameters of their modules: they are sharded, offloaded, saved and
# loaded like weights, and are whole for only one module at a time.

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
