"""Texts generated between updates with weights gathered once: `hybrid_engine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hadal.errors import UsageError
from hadal.listener import Listener
from hadal.zero import GatheredParameters

_GENERATE = "generate"


class GatheredGenerate(Listener):
    """Replaces a model's `generate` by one that keeps all weights gathered until it returns.

    The model's own gathers the weights of stage 3 as it uses them: for every token, if the model
    has more elements than `stage3_max_live_parameters`, and together with all other ranks.

    Raises:
        UsageError: the model has no `generate`.
    """

    name = "hadal.generate"

    def __init__(self, model: nn.Module) -> None:
        if not callable(getattr(model, _GENERATE, None)):
            raise UsageError(
                f"hybrid_engine.enabled: {type(model).__name__} has no method `generate`; pass a"
                " model that has one, or set hybrid_engine.enabled to false"
            )
        self._model = model

    def on_attach(self, engine: Any) -> None:
        """Replace the method in this instance of the model."""
        plain = getattr(self._model, _GENERATE)
        vars(self._model)[_GENERATE] = _Generate(self._model, plain)

    def close(self) -> None:
        """Give the model its own method back."""
        vars(self._model).pop(_GENERATE, None)


class _Generate:
    """A model's `generate`, with its weights gathered around it."""

    def __init__(self, model: nn.Module, plain: Callable[..., Any]) -> None:
        self._model = model
        self._plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with GatheredParameters(self._model.parameters()):
            return self._plain(*args, **kwargs)
