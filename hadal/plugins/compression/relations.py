"""The modules that shrink along with a pruned one, and in which dimension."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hadal.config.compression import CompressionTraining
from hadal.errors import Fault
from hadal.plugins.compression.layers import Compressed, why_not
from hadal.plugins.compression.matching import Match
from hadal.plugins.compression.pruning import matrix_shape
from hadal.plugins.compression.rules import BlockRule, PruneRule

_log = logging.getLogger(__name__)

_CONSUMERS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "row_pruning": (nn.Linear,),
    "head_pruning": (nn.Linear,),
    "channel_pruning": (nn.Conv2d, nn.BatchNorm2d, nn.Linear),
}
"""The related modules that each technique supports."""


@dataclass(frozen=True, slots=True, eq=False)
class CutDimension:
    """A dimension of one module from which a mask removes indices."""

    name: str
    module: nn.Module
    dimension: int
    """0: outputs; 1: inputs."""
    each: int
    """The number of neighbouring indices that belong to one entry of the mask."""


def cuts_of(
    model: nn.Module,
    section: CompressionTraining,
    prunings: list[tuple[Match, PruneRule | BlockRule]],
    faults: list[Fault],
) -> dict[tuple[str, str], tuple[CutDimension, ...]]:
    """Return the cuts that each pruned module causes, its own first.

    Keys are the technique and the module's full name; modules of groups without `related_modules`
    are missing. Mismatches are appended to `faults`.
    """
    found: dict[tuple[str, str], tuple[CutDimension, ...]] = {}
    numbers: dict[tuple[str, str, int], int] = {}
    for match, rule in prunings:
        if not isinstance(rule, PruneRule) or rule.technique == "sparse_pruning":
            continue
        key = match.technique, match.group, match.pattern
        number = numbers[key] = numbers.get(key, -1) + 1
        group = getattr(section, match.technique).different_groups[match.group]
        if group.related_modules is None or match.pattern >= len(group.related_modules):
            continue
        total = sum(1 for each, _ in prunings if _key(each) == key)
        if match.technique == "head_pruning":
            faults += _shared_heads(model, match)
        cuts = [_own(match, rule)]
        patterns = group.related_modules[match.pattern]
        for where, pattern in _patterns(model, patterns, match, tells=number == 0):
            named = _named(model, pattern, where, match, total, faults)
            if named is None:
                continue
            name, module = named[number]
            cut, reason = _consumer(name, module, match, rule)
            if reason is not None:
                faults.append(Fault(where, f"{pattern!r} matches {name}: {reason}"))
            elif cut is not None:
                cuts.append(cut)
        found[match.technique, match.name] = tuple(cuts)
    faults += _lengths(section)
    faults += _twice(found)
    faults += _tied(model, found)
    return found


class FeatureMask:
    """Forward hook that zeroes the outputs of a batch normalization for pruned channels.

    Its running mean and bias turn the zeros of a pruned channel into another constant, which the
    modules behind it would learn from, and lose when the channel is removed.
    """

    def __init__(self, source: Compressed) -> None:
        self.source = source

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the output, (batch, channels, height, width), times the mask of the source."""
        mask = self.source.kept_channels
        return output if mask is None else output * mask.reshape(-1, 1, 1)


def mask_features(cuts: Mapping[tuple[str, str], tuple[CutDimension, ...]]) -> None:
    """Let the batch normalizations among related modules return zeros for pruned channels."""
    for own, *related in cuts.values():
        for cut in related:
            if isinstance(cut.module, nn.BatchNorm2d):
                unmask_features(cut.module)
                assert isinstance(own.module, Compressed)
                cut.module.register_forward_hook(FeatureMask(own.module))


def unmask_features(module: nn.Module) -> None:
    """Remove what `mask_features` added to a module."""
    hooks = module._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, FeatureMask)]:
        del hooks[key]


def _key(match: Match) -> tuple[str, str, int]:
    return match.technique, match.group, match.pattern


def _own(match: Match, rule: PruneRule) -> CutDimension:
    module: Any = match.module
    if rule.technique == "head_pruning":
        return CutDimension(match.name, module, 1, max(1, module.in_features // rule.heads))
    return CutDimension(match.name, module, 0, 1)


def _patterns(
    model: nn.Module, patterns: Sequence[str], match: Match, *, tells: bool
) -> Iterator[tuple[str, str]]:
    """Yield related patterns and their JSON paths, without those of absent normalizations."""
    for index, pattern in enumerate(patterns):
        where = f"{match.path}.related_modules[{match.pattern}][{index}]"
        if not _is_of_absent_norms(model, pattern, patterns, match):
            yield where, pattern
        elif tells:
            _log.warning(
                "%s: %r matches no module, and the model has no batch normalization: the pattern is"
                " ignored",
                where,
                pattern,
            )


def _is_of_absent_norms(
    model: nn.Module, pattern: str, patterns: Sequence[str], match: Match
) -> bool:
    """Return whether a pattern may be meant for batch normalizations that the model lacks.

    Programs that can leave them out of a model keep one configuration for both.
    """
    if match.technique != "channel_pruning" or len(patterns) == 1:
        return False
    modules = model.named_modules()
    return not any(
        isinstance(module, nn.BatchNorm2d) or _matches(pattern, name) for name, module in modules
    ) and any(_matches(other, name) for other in patterns for name, _ in model.named_modules())


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # `_named` reports it
        return True


def _named(
    model: nn.Module, pattern: str, where: str, match: Match, total: int, faults: list[Fault]
) -> list[tuple[str, nn.Module]] | None:
    """Return the modules of a pattern: one for each pruned module."""
    kinds = _CONSUMERS[match.technique]
    try:
        search = re.compile(pattern).search
    except re.error as error:
        faults.append(Fault(where, f"{pattern!r} is not a regular expression: {error}"))
        return None
    named = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, kinds) and search(name)
    ]
    if len(named) == total:
        return named
    known = ", ".join(kind.__name__ for kind in kinds)
    listed = ", ".join(name for name, _ in named[:3]) + (", ..." if len(named) > 3 else "")
    found = f"matches {len(named)} modules ({listed})" if named else "matches no module"
    message = (
        f"{pattern!r} {found} of {known}, but modules[{match.pattern}] matches {total}; expected"
        " one for each, in the same order"
    )
    if Fault(where, message) not in faults:
        faults.append(Fault(where, message))
    return None


def _consumer(
    name: str, module: nn.Module, match: Match, rule: PruneRule
) -> tuple[CutDimension | None, str | None]:
    """Return the cut of a related module, or the reason that there is none."""
    pruned: Any = match.module
    is_norm = isinstance(module, nn.BatchNorm2d)
    reason = None if is_norm else why_not(module)
    if reason is not None:
        return None, reason
    if getattr(module, "groups", 1) > 1 or getattr(pruned, "groups", 1) > 1:
        return None, "convolutions with groups cannot lose channels"
    is_of_heads = rule.technique == "head_pruning"
    expected = pruned.in_features if is_of_heads else matrix_shape(pruned)[0]
    if is_of_heads:
        number = matrix_shape(module)[0]
    elif isinstance(module, nn.BatchNorm2d):
        number = module.num_features
    else:
        number = module.in_channels if isinstance(module, nn.Conv2d) else matrix_shape(module)[1]
    # A flattened image has several inputs for each channel.
    is_flat = rule.technique == "channel_pruning" and isinstance(module, nn.Linear)
    if number != expected and not (is_flat and number % expected == 0):
        what = "outputs" if is_of_heads else "inputs"
        told = f"it has {number:,} {what}, but {match.name} has {expected:,} to prune"
        return None, told + (_heads_apart(number, expected) if is_of_heads else "")
    each = expected // rule.heads if is_of_heads else number // expected
    return CutDimension(name, module, 0 if is_of_heads or is_norm else 1, max(1, each)), None


def _heads_apart(number: int, expected: int) -> str:
    """Explain why an attention module has a different number of outputs, and the remedy."""
    if number < expected:
        why = "keys and values that several heads share stay as they are"
    else:
        why = "a fused module of queries, keys and values has to be split into three"
    return f"; {why}, or leave related_modules out, and pruned heads become zeros"


def _shared_heads(model: nn.Module, match: Match) -> Iterator[Fault]:
    """Yield a fault if an attention module has fewer heads of keys than of queries."""
    path = match.name.split(".")[:-1]
    for length in range(len(path), 0, -1):
        name = ".".join(path[:length])
        each = getattr(model.get_submodule(name), "num_key_value_groups", 1)
        if isinstance(each, int) and each > 1:
            yield Fault(
                f"{match.path}.related_modules",
                f"{each} heads of {name} share one head of keys and values (num_key_value_groups),"
                " so single heads cannot be removed; leave related_modules out, and pruned heads"
                " become zeros",
            )
            return


def _lengths(section: CompressionTraining) -> Iterator[Fault]:
    for technique in _CONSUMERS:
        wanted = getattr(section, technique)
        for name, group in (wanted.different_groups or {}).items():
            if not wanted.is_on or group.related_modules is None:
                continue
            lists, patterns = len(group.related_modules), len(group.modules)
            if lists != patterns:
                yield Fault(
                    f"compression_training.{technique}.different_groups.{name}.related_modules",
                    f"{lists} lists for {patterns} entries of modules; expected one for each",
                )


def _twice(found: Mapping[tuple[str, str], tuple[CutDimension, ...]]) -> Iterator[Fault]:
    owners: dict[tuple[str, int], tuple[str, str]] = {}
    for owner, cuts in found.items():
        for cut in cuts:
            other = owners.setdefault((cut.name, cut.dimension), owner)
            if other != owner:
                what = "inputs" if cut.dimension else "outputs"
                yield Fault(
                    f"compression_training.{owner[0]}.different_groups",
                    f"the {what} of {cut.name} are pruned with {owner[1]}, and with {other[1]}"
                    f" by {other[0]}; expected one of them",
                )


def _tied(
    model: nn.Module, found: Mapping[tuple[str, str], tuple[CutDimension, ...]]
) -> Iterator[Fault]:
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            holders.setdefault(id(weight), []).append(name)
    for owner, cuts in found.items():
        for cut in cuts:
            others = [name for name in holders.get(id(cut.module.weight), ()) if name != cut.name]
            if others:
                yield Fault(
                    f"compression_training.{owner[0]}.different_groups",
                    f"the weight of {cut.name} is tied to that of {others[0]}, so it cannot shrink;"
                    " leave related_modules out, and pruned entries become zeros",
                )
