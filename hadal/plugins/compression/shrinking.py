"""Make pruning permanent: weights are multiplied by masks, and modules shrink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hadal.errors import ModelError
from hadal.plugins.compression.layers import Compressed
from hadal.plugins.compression.packed import cut_grid
from hadal.plugins.compression.pruning import BLOCK_SCORES
from hadal.plugins.compression.relations import CutDimension, unmask_features
from hadal.plugins.compression.rules import BlockRule, PruneRule, mask_name, score_name

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
