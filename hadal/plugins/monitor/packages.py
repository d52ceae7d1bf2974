"""The packages that monitors require."""

from __future__ import annotations

import importlib
from typing import Any

from hadal.errors import MissingPackageError

# section -> (the module, the package that pip installs)
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "comet_ml"),
}


def imported(section: str, module: str = "") -> Any:
    """Return a module of the package that a section needs; by default the package's own.

    Raises:
        MissingPackageError: it cannot be imported.
    """
    name, installed = _PACKAGES[section]
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        raise MissingPackageError(
            f"{section}.enabled is true, but {name} cannot be imported ({error}). Install it with"
            f" `pip install {installed}`, or set {section}.enabled to false"
        ) from error


def expect_package(section: str) -> None:
    """Import the package that a section needs, if it needs one.

    Raises:
        MissingPackageError: it cannot be imported.
    """
    if section in _PACKAGES:
        imported(section)
