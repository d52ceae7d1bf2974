"""Parameters that a module reads in its forward without owning them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.errors import UsageError
from hadal.zero.grouping import Member, Unit

# The announced parameters, by the module that reads them.
_external: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Register that `module` reads `parameter` in its forward, though another module owns it.

    Called before `hadal.initialize`, it makes stage 3 gather the parameter together with `module`'s
    own in forward and backward. This is needed only if a compiled module hides the read; all other
    reads are noticed when they happen. After `initialize` it has no effect.

    Raises:
        UsageError: the arguments are not a module and a parameter.
    """
    _check("register_external_parameter", module, parameter)
    known = _external.setdefault(module, [])
    if all(reference() is not parameter for reference in known):
        known.append(weakref.ref(parameter))


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    Raises:
        UsageError: the arguments are not a module and a parameter that was registered for it.
    """
    _check("unregister_external_parameter", module, parameter)
    if all(parameter is not known for known in external_parameters(module)):
        raise UsageError(
            f"unregister_external_parameter: this parameter of shape {tuple(parameter.shape)} was"
            f" not registered for this {type(module).__name__}"
        )
    _external[module] = [ref for ref in _external[module] if ref() is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that were registered for a module."""
    found = (reference() for reference in _external.get(module, ()))
    return [parameter for parameter in found if parameter is not None]


def announced_uses(model: nn.Module, units: Iterable[Unit]) -> list[Unit]:
    """Return an additional unit for each module that reads parameters of other modules."""
    members: Mapping[nn.Parameter, Member] = {
        member.parameter: member for unit in units for member in unit.members
    }
    uses = []
    for path, module in model.named_modules():
        read = [members[p] for p in external_parameters(module) if p in members]
        if read:
            uses.append(Unit(f"{path or '(root)'} (external)", module, read, is_external=True))
    return uses


def _check(name: str, module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            f"{name}(module, parameter) takes a torch.nn.Module and a torch.nn.Parameter, got"
            f" {type(module).__name__} and {type(parameter).__name__}"
        )
