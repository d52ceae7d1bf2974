"""The section `activation_checkpointing` in an engine: its modules are recomputed by themselves.

Tests: tests/activation_checkpointing/test_modules.py
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hadal.activation_checkpointing.function import Recomputation
from hadal.activation_checkpointing.modules import Recomputed, recomputed_elsewhere
from hadal.errors import UsageError
from hadal.listener import Forward, Listener


class RecomputedModules(Listener):
    """Recomputes modules of a model as long as its engine lives."""

    name = "activation_checkpointing"

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], recomputation: Recomputation
    ) -> None:
        """Choose the modules, by full name, and how they are recomputed."""
        self._model = model
        self._modules = dict(modules)
        self._recomputation = recomputation
        self._placed: list[Recomputed] = []
        self._is_checked = False
        self._caches = _takes_cache(model)

    def on_attach(self, engine: Any) -> None:
        """Place recomputation over the modules' forwards."""
        self._placed = [
            Recomputed(name, module, self._recomputation) for name, module in self._modules.items()
        ]

    def before_forward(self, forward: Forward) -> Forward | None:
        """Let a transformer keep no keys and values, which a recomputation would add again.

        Raises:
            UsageError: transformers' own switch has been turned on since `initialize`.
        """
        if not torch.is_grad_enabled():
            return None
        if not self._is_checked:
            self._is_checked = True
            message = recomputed_elsewhere(self._model, list(self._modules))
            if message is not None:
                raise UsageError(message)
        if not self._caches or not getattr(self._model.config, "use_cache", False):
            return None
        return forward._replace(kwargs={**forward.kwargs, "use_cache": False})

    def close(self) -> None:
        """Give the modules their own forwards back."""
        for one in self._placed:
            one.remove()
        self._recomputation.reset()


def _takes_cache(model: nn.Module) -> bool:
    """Return whether a model of transformers may keep keys and values in training."""
    if not hasattr(getattr(model, "config", None), "use_cache"):
        return False
    names = inspect.signature(model.forward).parameters.values()
    return any(one.name == "use_cache" or one.kind is one.VAR_KEYWORD for one in names)
