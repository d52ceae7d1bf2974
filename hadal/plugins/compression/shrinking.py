"""Make pruning permanent: weights are multiplied by masks, modules and those after them shrink."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hadal.config.compression import CompressionTraining
from hadal.errors import Fault, ModelError
from hadal.plugins.compression.layers import (
    BlockRule,
    Compressed,
    PruneRule,
    mask_name,
    score_name,
    why_not,
)
from hadal.plugins.compression.matching import Match, searched
from hadal.plugins.compression.packed import cut_grid
from hadal.plugins.compression.pruning import BLOCK_SCORES, matrix_shape

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
    search = searched(pattern, where, faults)
    if search is None:
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


_SHAPES = "_hadal_shapes"
_PRUNED = "_hadal_pruned"
# Attributes of attention modules: the number of heads, and the size of all heads' output.
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_key_value_heads")
_WIDTHS = ("all_head_size", "inner_dim")
_SIZES: Mapping[type[nn.Module], tuple[str, str]] = {
    nn.Linear: ("out_features", "in_features"),
    nn.Conv2d: ("out_channels", "in_channels"),
    nn.BatchNorm2d: ("num_features", "num_features"),
}
Cuts = Mapping[tuple[str, str], tuple[CutDimension, ...]]


def make_masks_final(
    modules: Mapping[str, Compressed], cuts: Cuts
) -> list[tuple[CutDimension, Tensor]]:
    """Multiply weights and biases by their masks, and remove masks and scores.

    Weights that were tied and have the same masks stay tied.

    Args:
        modules: by their full names.
        cuts: the dimensions that shrink, by technique and name.

    Returns:
        The indices to keep in each dimension that shrinks.
    """
    made: list[tuple[Tensor, Tensor, nn.Parameter]] = []
    due: list[tuple[CutDimension, Tensor]] = []
    for name, module in modules.items():
        old, rules = module.weight, module.compression.prunings
        weight, bias = module.weight.detach(), module.bias_or_none()
        for rule in rules:
            weight, bias = module.pruned(rule, weight, None if bias is None else bias.detach())
            of_rule = cuts.get((rule.technique, name), ())
            if of_rule:
                kept = module.mask(rule).detach().flatten().nonzero().flatten()
                due += [(cut, _indices(kept, cut.each)) for cut in of_rule]
        if rules:
            module.weight = _made(made, old, weight.detach())
            if bias is not None:
                module.bias = nn.Parameter(bias.detach(), requires_grad=bias_trains(module))
            setattr(module, _PRUNED, tuple(rule.technique for rule in rules))
        for rule in rules:
            _remove(module, rule)
        module.compression.prunings = module.compression.active = ()
    return due


def pruned_by(module: nn.Module) -> tuple[str, ...]:
    """Return the techniques by which a module was permanently pruned."""
    found: tuple[str, ...] = getattr(module, _PRUNED, ())
    return found


def bias_trains(module: Compressed) -> bool:
    """Return whether a module's bias is trained."""
    bias = module.bias_or_none()
    return bias is not None and bias.requires_grad


def _indices(kept: Tensor, each: int) -> Tensor:
    return (kept.unsqueeze(1) * each + torch.arange(each, device=kept.device)).flatten()


def _made(
    made: list[tuple[Tensor, Tensor, nn.Parameter]], old: Tensor, values: Tensor
) -> nn.Parameter:
    for other, theirs, parameter in made:
        if other is old and theirs.equal(values):
            return parameter
    parameter = nn.Parameter(values.contiguous(), requires_grad=old.requires_grad)
    made.append((old, values, parameter))
    return parameter


def _remove(module: Compressed, rule: PruneRule | BlockRule) -> None:
    for name in (mask_name(rule.technique), score_name(rule.technique), BLOCK_SCORES):
        if hasattr(module, name):
            delattr(module, name)


@torch.no_grad()
def shrink(model: nn.Module, due: list[tuple[CutDimension, Tensor]]) -> None:
    """Remove from modules all indices except those that are kept, and record their new shapes.

    Attention modules get their new number of heads.
    """
    shapes: dict[str, Any] = getattr(model, _SHAPES, {"modules": {}, "attributes": {}})
    for cut, kept in due:
        unmask_features(cut.module)
        _keep(cut.module, cut.dimension, kept)
        cut_grid(cut.module, cut.dimension, kept)
        shapes["modules"][cut.name] = list(_weight(cut.module).shape)
    setattr(model, _SHAPES, shapes)


def count_heads(
    model: nn.Module, cuts: tuple[CutDimension, ...], heads: int, *, sets: bool = True
) -> None:
    """Set the attributes that count heads in the attention module that these cuts belong to.

    Args:
        model: whose modules were cut.
        cuts: of one attention module, its output first.
        heads: how many there were.
        sets: if false, only record them for models that are loaded later.
    """
    own, *related = cuts
    before, after = heads * own.each, _weight(own.module).shape[1]
    renamed = {name: (heads, after // own.each) for name in _HEADS}
    renamed |= {name: (before, after) for name in _WIDTHS}
    shapes: dict[str, Any] = getattr(model, _SHAPES)
    for place in _holders([cut.name for cut in (own, *related)]):
        module = model.get_submodule(place)
        for name, (old, new) in renamed.items():
            if module.__dict__.get(name) == old:
                if sets:
                    setattr(module, name, new)
                shapes["attributes"].setdefault(place, {})[name] = new


def _holders(names: list[str]) -> Iterator[str]:
    """Yield the modules that contain these and nothing beyond their attention module."""
    paths = [name.split(".")[:-1] for name in names]
    common = 0
    while all(len(path) > common and path[common] == paths[0][common] for path in paths):
        common += 1
    # The whole model counts only if it is the attention module.
    first = common if common or not any(paths) else 1
    yield from dict.fromkeys(
        ".".join(path[:length]) for path in paths for length in range(first, len(path) + 1)
    )


def shapes_of(model: nn.Module) -> dict[str, Any]:
    """Return the shapes of the modules that shrank, as values for JSON; empty if none did.

    `modules` has the shapes of weights by the modules' full names; `attributes` has the head counts
    of attention modules.
    """
    found: dict[str, Any] = getattr(model, _SHAPES, {})
    return found if found.get("modules") else {}


@torch.no_grad()
def take_shapes(model: nn.Module, shapes: Mapping[str, Any]) -> None:
    """Shrink a model to the given shapes. Weights keep their first rows and columns.

    Args:
        model: of the same architecture, as large as before pruning; changed in place.
        shapes: from `shapes_of`.

    Raises:
        ModelError: a module is missing, or already smaller than its shape.
    """
    if not shapes:
        return
    for name, shape in shapes["modules"].items():
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise ModelError(
                f"{name} was made smaller by pruning, but {type(model).__name__} has no module of"
                " this name; build the model that was pruned"
            ) from None
        weight = _weight(module)
        pairs = list(zip(shape, weight.shape, strict=False))
        if weight.dim() != len(shape) or any(new > old for new, old in pairs):
            raise ModelError(
                f"{name}.weight has the shape {tuple(weight.shape)}; expected at least"
                f" {tuple(shape)}; build the model that was pruned"
            )
        for dimension, (new, old) in enumerate(pairs[:2]):
            if new < old:
                _keep(module, dimension, torch.arange(new))
    for name, values in shapes["attributes"].items():
        for key, value in values.items():
            setattr(model.get_submodule(name), key, value)
    setattr(model, _SHAPES, dict(shapes))


def _keep(module: nn.Module, dimension: int, kept: Tensor) -> None:
    rows = [name for name in ("bias", "running_mean", "running_var") if dimension == 0]
    for name in ("weight", *rows):
        old = getattr(module, name, None)
        if old is None:
            continue
        values = old.detach().index_select(dimension, kept.to(old.device)).contiguous()
        is_trained = isinstance(old, nn.Parameter)
        new = nn.Parameter(values, requires_grad=old.requires_grad) if is_trained else values
        setattr(module, name, new)
    sizes = next(names for kind, names in _SIZES.items() if isinstance(module, kind))
    setattr(module, sizes[dimension], kept.numel())


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
