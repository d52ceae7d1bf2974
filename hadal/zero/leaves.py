"""Leaf modules named by a program: stage 3 gathers each as a whole, with everything in it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from hadal.errors import UsageError, nearest
from hadal.zero.access import is_kept_by_engine
from hadal.zero.grouping import LeafModules, marked_leaves

_log = logging.getLogger(__name__)


def set_z3_leaf_modules(
    model: nn.Module, leaf_modules: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Let stage 3 gather modules as a whole when they are called, and nothing inside them again.

    Use it for modules that run different parts on each rank or in each step (a layer of experts).
    Call it before `initialize`; `zero_optimization.leaf_module` is the same in JSON.

    Args:
        model: the model that contains them.
        leaf_modules: classes, names of classes (bare or dotted), or full names of modules.
        raise_if_not_found: whether it is an error that none of them is in the model.

    Returns:
        The modules that were marked.

    Raises:
        UsageError: none was found, or an engine already has the model.
    """
    found = _find(model, leaf_modules, raise_if_not_found)
    marked_leaves.update(found)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_modules: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`, with the same arguments, results and errors."""
    found = _find(model, leaf_modules, raise_if_not_found)
    for module in found:
        marked_leaves.discard(module)
    return found


def _find(
    model: nn.Module, asked: Iterable[type[nn.Module] | str], raises: bool
) -> list[nn.Module]:
    if any(is_kept_by_engine(parameter) for parameter in model.parameters()):
        raise UsageError(
            "leaf modules are chosen before hadal.initialize: this model is in an engine already"
        )
    given = [asked] if isinstance(asked, (str, type)) else list(asked)
    modules = dict(model.named_modules())
    found: dict[nn.Module, None] = {}
    for each in given:
        if isinstance(each, str):
            leaf = LeafModules(classes=(each,), names=(each,))
            mine = [m for name, m in modules.items() if leaf.speaks_of(name, m)]
        else:
            mine = [m for m in modules.values() if isinstance(m, each)]
        if not mine:
            _log.warning("leaf modules: %s", _not_found(each, modules))
        found.update(dict.fromkeys(mine))
    if not found and raises:
        told = "; ".join(_not_found(each, modules) for each in given) or "none were named"
        raise UsageError(f"leaf modules: {told}")
    return list(found)


def _not_found(each: type[nn.Module] | str, modules: dict[str, nn.Module]) -> str:
    name = each if isinstance(each, str) else each.__name__
    known = {type(module).__name__ for module in modules.values()} | set(modules)
    near = nearest(name, sorted(known))
    hint = f"; did you mean {near!r}?" if near else ""
    return f"no module of the model is, or is called, {name!r}{hint}"
