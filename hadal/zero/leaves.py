"""Leaf modules chosen by a program, each of which stage 3 gathers as a whole."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from hadal.errors import UsageError, nearest
from hadal.zero.access import is_kept_by_engine
from hadal.zero.attached import Attached
from hadal.zero.grouping import LeafModules

_log = logging.getLogger(__name__)

# Parameters of modules that a program has marked.
leaf_parameters: Attached[bool] = Attached("leaf")


def set_z3_leaf_modules(
    model: nn.Module, leaf_modules: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make stage 3 gather modules as a whole when they are called, and not module by module.

    Use it for modules that run different parts on each rank or in each step, such as a layer of
    experts. Call it before `initialize`. The JSON key for it is `zero_optimization.leaf_module`.

    Args:
        model: the model that contains them.
        leaf_modules: classes, names of classes (bare or dotted), or full names of modules.
        raise_if_not_found: True makes it an error if none of them is in the model.

    Returns:
        The modules that were marked.

    Raises:
        UsageError: none was found, or the model is already in an engine.
    """
    found = _find(model, leaf_modules, raise_if_not_found)
    mark(found, True)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_modules: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`, with the same arguments, results and errors."""
    found = _find(model, leaf_modules, raise_if_not_found)
    mark(found, False)
    return found


def mark(modules: Iterable[nn.Module], flag: bool) -> None:
    """Mark modules as leaf modules, or not; copies of them keep the mark."""
    for module in modules:
        setattr(module, "_z3_leaf", flag)  # noqa: B010 - DeepSpeed's name, which programs read
        for parameter in module.parameters():
            leaf_parameters[parameter] = flag


def _find(
    model: nn.Module, asked: Iterable[type[nn.Module] | str], raises: bool
) -> list[nn.Module]:
    if any(is_kept_by_engine(parameter) for parameter in model.parameters()):
        raise UsageError(
            "leaf modules must be chosen before hadal.initialize, but this model is already in an"
            " engine"
        )
    given = [asked] if isinstance(asked, (str, type)) else list(asked)
    modules = dict(model.named_modules())
    found: dict[nn.Module, None] = {}
    for each in given:
        if isinstance(each, str):
            leaf = LeafModules(classes=(each,), names=(each,))
            mine = [m for name, m in modules.items() if leaf.selects(name, m)]
        else:
            mine = [m for m in modules.values() if isinstance(m, each)]
        if not mine:
            _log.warning("leaf modules: %s", _not_found(each, modules))
        found.update(dict.fromkeys(mine))
    if not found and raises:
        missing = "; ".join(_not_found(each, modules) for each in given) or "none were given"
        raise UsageError(f"leaf modules: {missing}")
    return list(found)


def _not_found(each: type[nn.Module] | str, modules: dict[str, nn.Module]) -> str:
    name = each if isinstance(each, str) else each.__name__
    known = {type(module).__name__ for module in modules.values()} | set(modules)
    near = nearest(name, sorted(known))
    hint = f"; did you mean {near!r}?" if near else ""
    return f"no module of the model has the class or name {name!r}{hint}"
