"""Values attached to single parameters, each of which holds its own: both are freed together."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import nn

_V = TypeVar("_V")
_MARK = "_hadal_"


class Attached(Generic[_V]):
    """Values by parameter.

    A table with weak keys would hold its values, and a bucket holds its parameters, so unused
    ones would never be freed. Here they refer only to each other.
    """

    def __init__(self, name: str) -> None:
        self._name = _MARK + name

    def __setitem__(self, parameter: nn.Parameter, value: _V) -> None:
        # Programs copy all attributes of one parameter to another; the id shows which is whose.
        vars(parameter)[self._name] = (id(parameter), value)

    def __getitem__(self, parameter: nn.Parameter) -> _V:
        found = self.get(parameter)
        if found is None:
            raise KeyError(self._name)
        return found

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return self.get(parameter) is not None

    def get(self, parameter: nn.Parameter) -> _V | None:
        """Return the value of a parameter, if it has one."""
        number, value = vars(parameter).get(self._name, (None, None))
        return value if number == id(parameter) else None

    def pop(self, parameter: nn.Parameter) -> None:
        """Remove a parameter's value."""
        vars(parameter).pop(self._name, None)


def is_attached(name: str) -> bool:
    """Return True for an attribute that holds such a value; copies of a parameter lack it."""
    return name.startswith(_MARK)
