"""The pruning rule of each module, and the initial masks and scores."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hadal.config.compression import CompressionTraining, SparsePruningShared
from hadal.errors import Fault, UsageError, few
from hadal.plugins.compression.layers import (
    BlockRule,
    Compressed,
    PruneRule,
    change,
    compressible,
    mask_name,
    score_name,
    why_not,
)
from hadal.plugins.compression.masks import Blocks, as_matrix, rows_of
from hadal.plugins.compression.matching import Match, matches_of, searched
from hadal.plugins.compression.quantizers import largest

_log = logging.getLogger("hadal.plugins.compression")

TECHNIQUES: Mapping[str, tuple[type[nn.Module], ...]] = {
    "sparse_pruning": (nn.Linear, nn.Conv2d),
    "row_pruning": (nn.Linear,),
    "head_pruning": (nn.Linear,),
    "channel_pruning": (nn.Conv2d,),
}
"""In the order in which they apply, with the modules that each knows."""
BLOCK_SCORES = "sparse_pruning_scores"
_BLOCK_KEYS = {"schedule_offset_end", "schedule_offset_stride", "block_pattern", "excluded_modules"}
_SPARSE = "compression_training.sparse_pruning"
Pruned = tuple[Match, "PruneRule | BlockRule"]
Whole = Callable[[Iterable[Any]], AbstractContextManager[Any]]
"""Makes a context in which possibly sharded parameters are readable."""


def as_it_is(parameters: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return a context that does nothing."""
    return nullcontext(parameters)


def prunes_blocks(section: CompressionTraining) -> bool:
    """Return whether blocks are pruned by momentum."""
    sparse = section.sparse_pruning
    return sparse.is_on and sparse.shared_parameters.method == "snip_momentum"


def prunings_of(
    model: nn.Module, section: CompressionTraining, faults: list[Fault]
) -> list[Pruned]:
    """Return the modules that are pruned and their rules; append faults to `faults`."""
    found: list[Pruned] = []
    for technique, kinds in TECHNIQUES.items():
        wanted = getattr(section, technique)
        if not wanted.is_on:
            continue
        if technique == "sparse_pruning" and prunes_blocks(section):
            found += _blocks(model, section, faults)
            continue
        shared = wanted.shared_parameters
        if technique == "sparse_pruning":
            _tell_idle(shared)
        heads = shared.num_heads if technique == "head_pruning" else 0
        matches = matches_of(model, technique, wanted.different_groups or {}, kinds, faults)
        for match in matches:
            learned = shared.method == "topk"
            offset, ratio = match.offset(shared.schedule_offset), match.params.dense_ratio
            found.append((match, PruneRule(technique, ratio, offset, learned, heads)))
        if heads:
            faults += _undivided(matches, heads)
    return found


def _tell_idle(shared: SparsePruningShared) -> None:
    """Warn of keys that only another method reads."""
    given = sorted(_BLOCK_KEYS & shared.model_fields_set)
    if given:
        _log.warning(
            '%s.shared_parameters: %s have no effect with method "%s", only with "snip_momentum"',
            _SPARSE,
            ", ".join(given),
            shared.method,
        )


def _undivided(matches: list[Match], heads: int) -> Iterator[Fault]:
    inputs = {match.name: getattr(match.module, "in_features", 0) for match in matches}
    uneven = [f"{name} ({size:,})" for name, size in inputs.items() if size % heads]
    if uneven:
        yield Fault(
            "compression_training.head_pruning.shared_parameters.num_heads",
            f"{heads} does not divide the inputs of {few(uneven, 3)}",
        )


def _blocks(
    model: nn.Module, section: CompressionTraining, faults: list[Fault]
) -> Iterator[Pruned]:
    shared = section.sparse_pruning.shared_parameters
    path = f"{_SPARSE}.shared_parameters"
    if section.sparse_pruning.different_groups:
        _log.warning(
            "%s.different_groups has no effect: snip_momentum prunes all modules that"
            " excluded_modules does not match",
            _SPARSE,
        )
    blocks = Blocks.parse(shared.block_pattern)
    assert blocks is not None  # the rules of the configuration check it
    start = shared.schedule_offset
    end = start if shared.schedule_offset_end is None else shared.schedule_offset_end
    rule = BlockRule(blocks, shared.dense_ratio, start, end, shared.schedule_offset_stride)
    kinds = TECHNIQUES["sparse_pruning"]
    known = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
    excluded = _excluded(known, shared.excluded_modules, f"{path}.excluded_modules", faults)
    left_out = []
    pruned = 0
    for name, module in known.items():
        if name in excluded:
            continue
        reason = _unsuitable(module, blocks)
        if reason is not None:
            left_out.append(f"{name} ({reason})")
            continue
        pruned += 1
        yield Match("sparse_pruning", "", 0, name, module, None), rule
    if left_out:
        _log.warning(
            "%s: %d modules are not pruned in blocks of %s: %s",
            _SPARSE,
            len(left_out),
            shared.block_pattern,
            few(left_out),
        )
    if not pruned:
        faults.append(Fault(f"{path}.block_pattern", f"{shared.block_pattern} fits no module"))


def _excluded(
    known: Mapping[str, nn.Module], patterns: tuple[str, ...], path: str, faults: list[Fault]
) -> set[str]:
    found: set[str] = set()
    for index, pattern in enumerate(patterns):
        search = searched(pattern, f"{path}[{index}]", faults)
        if search is None:
            continue
        named = [name for name in known if search(name)]
        if not named:
            faults.append(Fault(f"{path}[{index}]", f"{pattern!r} matches no module"))
        found |= set(named)
    return found


def _unsuitable(module: nn.Module, blocks: Blocks) -> str | None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if not compressible(module) or why_not(module) is not None:
        return why_not(module)
    if not weight.requires_grad:
        return "it is frozen"
    shape = matrix_shape(module)
    return None if blocks.fits(shape) else f"{shape[0]}x{shape[1]}"


def matrix_shape(module: nn.Module) -> tuple[int, int]:
    """Return the rows and columns of a module's weight, which may be sharded."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    assert isinstance(module, nn.Conv2d)
    kernel = module.kernel_size[0] * module.kernel_size[1]
    return module.out_channels, module.in_channels // module.groups * kernel


def begin(match: Match, rule: PruneRule | BlockRule, whole: Whole = as_it_is) -> None:
    """Apply a pruning rule to a module from now on.

    Raises:
        UsageError: its mask depends on its weight, which is sharded.
    """
    module = change(match.module)
    others = [each for each in module.compression.prunings if each.technique != rule.technique]
    order = list(TECHNIQUES)
    module.compression.prunings = tuple(
        sorted([*others, rule], key=lambda each: order.index(each.technique))
    )
    if isinstance(rule, BlockRule):
        _begin_blocks(module, rule)
    elif rule.learned:
        name = score_name(rule.technique)
        if getattr(module, name, None) is None:
            module.register_parameter(name, _first_scores(module, rule))
    else:
        with whole([module.weight]):
            _fix_mask(match.name, module, rule)


def _first_scores(module: Compressed, rule: PruneRule) -> nn.Parameter:
    shape = _score_shape(module, rule)
    scores = torch.empty(shape, dtype=module.weight.dtype, device=module.weight.device)
    return nn.Parameter(nn.init.kaiming_uniform_(scores, a=math.sqrt(5)))


def _score_shape(module: nn.Module, rule: PruneRule) -> tuple[int, ...]:
    if rule.technique == "head_pruning":
        return 1, rule.heads
    if isinstance(module, nn.Conv2d):
        out, inputs = module.out_channels, module.in_channels // module.groups
        each = rule.technique == "sparse_pruning"
        return (out, inputs, *module.kernel_size) if each else (out, 1, 1, 1)
    out, inputs = matrix_shape(module)
    return (out, inputs) if rule.technique == "sparse_pruning" else (out, 1)


@torch.no_grad()
def _fix_mask(name: str, module: Compressed, rule: PruneRule) -> None:
    weight = module.weight
    if weight.is_meta:
        raise UsageError(
            f"init_compression: {rule.technique} chooses by {name}.weight, which is on the meta"
            " device and has no values; load the weights before"
        )
    # A sharded weight keeps its shape, without values.
    if weight.untyped_storage().nbytes() < math.prod(weight.shape) * weight.element_size():
        raise UsageError(
            f"init_compression: {rule.technique} chooses by {name}.weight, which is sharded over"
            " ranks; call it inside `with hadal.zero.GatheredParameters(model.parameters()):`, and"
            " before initialize"
        )
    sizes = weight.detach().abs()
    where = mask_name(rule.technique)
    if rule.technique == "sparse_pruning":
        mask = largest(sizes, rule.ratio)
        # A frozen parameter rather than a buffer: it is sharded and offloaded like its weight.
        module.register_parameter(where, nn.Parameter(mask, requires_grad=False))
    else:
        module.register_buffer(where, largest(rows_of(sizes), rule.ratio).bool())


def _begin_blocks(module: Compressed, rule: BlockRule) -> None:
    shape = rule.blocks.shape(matrix_shape(module))
    like: dict[str, Any] = {"dtype": module.weight.dtype, "device": module.weight.device}
    firsts: dict[str, Any] = {
        mask_name(rule.technique): torch.ones(shape, **like),
        BLOCK_SCORES: torch.zeros(shape, **like),
    }
    for name, first in firsts.items():
        if getattr(module, name, None) is None:
            module.register_parameter(name, nn.Parameter(first, requires_grad=False))


def score_of_blocks(weight: Tensor, gradient: Tensor, mask: Tensor, blocks: Blocks) -> Tensor:
    """Return the scores of one update: |weight x gradient| of kept weights, averaged per block."""
    kept = as_matrix(weight) * blocks.expand(mask)
    return blocks.reduce((kept * as_matrix(gradient)).abs())
