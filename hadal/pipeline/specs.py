"""Layers that are described now and built later, on the ranks that need them.

Tests: tests/pipeline/test_module.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hadal.errors import UsageError

_log = logging.getLogger(__name__)


class LayerSpec:
    """A layer by its class and arguments.

    Args:
        typename: a subclass of `nn.Module`.
        module_args: its arguments, as `module_kwargs`.

    Raises:
        UsageError: it is not such a class.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"{type(self).__name__} takes a subclass of torch.nn.Module and its arguments, got"
                f" {typename!r}; give a function to PipelineModule as it is"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank = -1
        """The rank that builds it; -1 until a PipelineModule has it."""

    def __repr__(self) -> str:
        return f"{self.typename.__name__}({self.module_args}, {self.module_kwargs})"

    def build(self, log: bool = False) -> nn.Module:
        """Return a new module."""
        if log:
            _log.info("rank %d builds %r", self.global_rank, self)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that stands at several places of a model, and is one module with one set of weights.

    Stages that have it each hold a copy; the gradients of all copies are added up.

    Args:
        key: the module's name; equal keys are one module.
        typename: a subclass of `nn.Module`, with its arguments.
        forward_fn: called with the module and its input in place of the module's forward.
        tied_weight_attr: paths of the weights that copies share, as `get_tied_weights_and_groups`
            reports them.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        names = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr
        self.tied_weight_attr = list(names)


Layer = LayerSpec | nn.Module | Callable[..., Any]
"""A part of a pipeline: described, built already, or a function without weights."""


def name_of(layer: Layer) -> str:
    """Return a layer's class, or a function's name."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", type(layer).__name__)
