"""Layers that get a changed call, in place: their class is replaced by a subclass of it.

Names in state dicts, attributes and `isinstance` stay as they were.

Tests: tests/data_efficiency/test_layer_drop.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, TypeAlias

from torch import nn

from hadal.errors import UsageError

_Made: TypeAlias = "tuple[type[ChangedLayer], type[nn.Module]]"


class ChangedLayer:
    """Base of what a layer's class gets in front of it."""

    made_of: ClassVar[_Made]
    """The change, and the layer's own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the two classes: no module has this one."""
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
    """Change all layers of a class in place; those that are changed already stay as they are.

    Raises:
        UsageError: the model has no such layer, or it is no class.
    """
    if not (isinstance(layers, type) and issubclass(layers, nn.Module)):
        raise UsageError(f"{caller}: expected the class of the layers, got {layers!r}")
    found = [module for module in model.modules() if isinstance(module, layers)]
    if not found:
        raise UsageError(
            f"{caller}: {type(model).__name__} has no {layers.__name__}; give the class of its"
            " layers, such as type(model.layers[0])"
        )
    for module in found:
        if not isinstance(module, change):
            module.__class__ = _changed(change, type(module))


def changed_layers(model: nn.Module, change: type[ChangedLayer]) -> Iterator[tuple[str, Any]]:
    """Yield the full names of a model's layers that were changed so, and the layers."""
    for name, module in model.named_modules():
        if isinstance(module, change):
            yield name, module
