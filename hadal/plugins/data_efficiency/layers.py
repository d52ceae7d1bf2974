"""Changes the call of layers in place: their class is replaced by a subclass.

Names in state dicts, attributes and `isinstance` are unaffected.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

from torch import nn

from hadal.errors import UsageError
from hadal.listener import Setting

_log = logging.getLogger("hadal.plugins.data_efficiency")

_Made: TypeAlias = "tuple[type[ChangedLayer], type[nn.Module]]"


class ChangedLayer:
    """Base of the mixins that are put in front of a layer's class."""

    made_of: ClassVar[_Made]
    """The change, and the layer's own class."""
    caller: ClassVar[str]
    """The program's call that makes the change."""
    section: ClassVar[str]
    """The JSON path of the section that it is for."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the two classes, as no module defines the combined one."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return (_empty, self.made_of, *state)


_made: dict[_Made, type[nn.Module]] = {}


def _changed(change: type[ChangedLayer], kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass; one for each pair."""
    if (change, kind) not in _made:
        _made[change, kind] = _subclass(change, kind)
    return _made[change, kind]


def _subclass(change: type[ChangedLayer], kind: type[nn.Module]) -> type[nn.Module]:
    names = ("__module__", "__qualname__", "__doc__")
    said = {name: getattr(kind, name) for name in names}
    made: type[nn.Module] = type(kind.__name__, (change, kind), {**said, "made_of": (change, kind)})
    return made


def _empty(change: type[ChangedLayer], kind: type[nn.Module]) -> nn.Module:
    made = _changed(change, kind)
    return made.__new__(made)


def change_layers(
    model: nn.Module, layers: type[nn.Module], change: type[ChangedLayer], caller: str
) -> None:
    """Change all layers of a class in place, except those that are changed already.

    Raises:
        UsageError: the model has no such layer, or `layers` is not a class.
    """
    if not (isinstance(layers, type) and issubclass(layers, nn.Module)):
        raise UsageError(f"{caller}: expected the class of the layers, got {layers!r}")
    found = [module for module in model.modules() if isinstance(module, layers)]
    if not found:
        raise UsageError(
            f"{caller}: {type(model).__name__} has no {layers.__name__}; pass the class of its"
            " layers, such as type(model.layers[0])"
        )
    for module in found:
        if not isinstance(module, change):
            module.__class__ = _changed(change, type(module))


def changed_layers(model: nn.Module, change: type[ChangedLayer]) -> Iterator[tuple[str, Any]]:
    """Yield the full names of a model's layers with this change, and the layers."""
    for name, module in model.named_modules():
        if isinstance(module, change):
            yield name, module


def warn_of_idle_layers(setting: Setting) -> None:
    """Log that a program has changed layers for a section that is off."""
    idle: dict[tuple[str, str], set[str]] = {}
    for _, layer in changed_layers(setting.model, ChangedLayer):
        section = attrgetter(layer.section)(setting.config)
        if section is None or not section.enabled:
            idle.setdefault((layer.caller, layer.section), set()).add(type(layer).__name__)
    for (caller, path), kinds in idle.items() if setting.world.rank == 0 else ():
        _log.warning(
            "%s changed the layers %s, but %s.enabled is not true: all layers run on all tokens;"
            " set it, or leave the call out",
            caller,
            ", ".join(sorted(kinds)),
            path,
        )
