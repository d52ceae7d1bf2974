"""Further functions of `deepspeed.utils` to name leaf modules; all use `hadal.zero.leaves`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hadal.zero.grouping import is_leaf
from hadal.zero.leaves import leaf_parameters, set_z3_leaf_modules, unset_z3_leaf_modules


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked as a leaf module."""
    return is_leaf(model)


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is gathered with a leaf module."""
    return leaf_parameters.get(parameter) or False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model."""
    return [module for module in model.modules() if is_leaf(module)]


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by full name; return them and the names that were not found."""
    known = dict(model.named_modules())
    names = list(module_names)
    return _changed(model, names, [n for n in names if n in known], flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by suffix; return them and the suffixes that were not found."""
    ends = list(module_name_suffixes)
    known = [name for name, _ in model.named_modules()]
    ending = {end: [name for name in known if name.endswith(end)] for end in ends}
    found = [name for names in ending.values() for name in names]
    marked, _ = _changed(model, found or ends, found, flag, raise_if_not_found)
    return marked, [end for end, names in ending.items() if not names]


def _changed(
    model: nn.Module, asked: list[str], found: list[str], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    change = set_z3_leaf_modules if flag else unset_z3_leaf_modules
    missing = [name for name in asked if name not in found]
    # `set_z3_leaf_modules` raises with suggestions if none of them exists.
    return change(model, found or asked, raises), missing
