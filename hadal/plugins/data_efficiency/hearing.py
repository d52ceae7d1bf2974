"""Detects the keywords that a model's forward accepts."""

from __future__ import annotations

import inspect

from torch import nn


def accepts(module: nn.Module, keyword: str) -> bool:
    """Return whether the module's forward can be called with the keyword."""
    return _named(module, keyword) or any(
        each.kind is each.VAR_KEYWORD for each in _parameters(module).values()
    )


def listens(model: nn.Module, keyword: str) -> bool:
    """Return whether the keyword reaches a forward that uses it, judging by signatures.

    A forward with **kwargs is assumed to use it, unless the model contains a transformers class:
    these ignore unknown keywords.
    """
    if not accepts(model, keyword):
        return False
    return any(_named(module, keyword) for module in model.modules()) or not any(
        kind.__module__.split(".")[0] == "transformers"
        for module in model.modules()
        for kind in type(module).__mro__
    )


def positional_names(module: nn.Module) -> list[str]:
    """Return the names of the forward's positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, each in _parameters(module).items() if each.kind in kinds]


def _named(module: nn.Module, keyword: str) -> bool:
    return keyword in _parameters(module)


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(module.forward).parameters)
