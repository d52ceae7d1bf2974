"""Pickles that name classes of another library, written and read without importing it.

Tests: tests/checkpoint/test_universal.py
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hadal.checkpoint.deepspeed.pickles import STAND_INS, Attributes, read_pickle
from hadal.checkpoint.files import torch_save_errors


class _Number(int):
    """A member of an enumeration, by its number."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self),)


def _named(name: str, base: type) -> type:
    """Return a stand-in of its own for one name, so that it is written under that name."""
    module, _, leaf = name.rpartition(".")
    return type(leaf, (base,), {"__module__": module, "__qualname__": leaf})


_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_BASES = {
    f"{_SCALER}.LossScaler": Attributes,
    f"{_SCALER}.DynamicLossScaler": Attributes,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Number,
    "deepspeed.utils.tensor_fragment.fragment_address": Attributes,
}
_OWN = {name: _named(name, base) for name, base in _BASES.items()}
LOSS_SCALER = _OWN[f"{_SCALER}.LossScaler"]
DYNAMIC_LOSS_SCALER = _OWN[f"{_SCALER}.DynamicLossScaler"]


# The one in Python, which asks for the name of each class; stubs do not describe it.
_Base: Any = pickle._Pickler


class _Pickler(_Base):  # type: ignore[misc]
    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write the name of a class; that of a stand-in need not be importable here."""
        if isinstance(obj, type) and issubclass(obj, (Attributes, _Number)):
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


_MODULE = ModuleType("pickle_of_names")
vars(_MODULE)["Pickler"] = _Pickler


def read_named(path: Path) -> Any:
    """Return the contents of a file as `read_pickle` does, for `write_named` to write again.

    Raises:
        CheckpointError: as `read_pickle`.
    """
    return read_pickle(path, {**STAND_INS, **_OWN})


def write_named(value: Any, path: Path) -> None:
    """Write a file with `torch.save`; objects of stand-ins are written under the names they have.

    Raises:
        CheckpointError: it cannot be written.
    """
    with torch_save_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path, pickle_module=_MODULE)
