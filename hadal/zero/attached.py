"""What is known of single parameters: held by each parameter itself, so that it ends with it."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import nn

_V = TypeVar("_V")
_MARK = "_hadal_"


class Attached(Generic[_V]):
    """Values by parameter.

    A table with weak keys would hold its values, and a bucket holds its parameters: what nobody
    else needs any more would never be freed. Here both lead to each other only.
    """

    def __init__(self, name: str) -> None:
        self._name = _MARK + name

    def __setitem__(self, parameter: nn.Parameter, value: _V) -> None:
        # Programs give all attributes of one parameter to another: the number tells them apart.
        vars(parameter)[self._name] = (id(parameter), value)

    def __getitem__(self, parameter: nn.Parameter) -> _V:
        number, value = vars(parameter).get(self._name, (None, None))
        if number != id(parameter):
            raise KeyError(self._name)
        found: _V = value
        return found

    def __delitem__(self, parameter: nn.Parameter) -> None:
        del vars(parameter)[self._name]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return self.get(parameter) is not None

    def get(self, parameter: nn.Parameter) -> _V | None:
        """The value of a parameter, if it has one."""
        number, value = vars(parameter).get(self._name, (None, None))
        return value if number == id(parameter) else None

    def pop(self, parameter: nn.Parameter) -> None:
        """Let a parameter have no value."""
        vars(parameter).pop(self._name, None)


def is_attached(name: str) -> bool:
    """Whether an attribute of a parameter is one of these: no copy of the parameter has it."""
    return name.startswith(_MARK)
