"""Changes the call of layers in place: their class is replaced by a subclass.

Names in state dicts, attributes and `isinstance` are unaffected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, TypeAlias

from torch import nn

from hadal.errors import UsageError

_Made: TypeAlias = "tuple[type[ChangedLayer], type[nn.Module]]"


class ChangedLayer:
    """Base of the mixins that are put in front of a layer's class."""

    made_of: ClassVar[_Made]
    """The change, and the layer's own class."""

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
