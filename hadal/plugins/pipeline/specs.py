"""Descriptions of layers, which are built later on the ranks that need them."""

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
        module_args: its positional arguments; `module_kwargs` are its keyword arguments.

    Raises:
        UsageError: `typename` is not such a class.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"{type(self).__name__} takes a subclass of torch.nn.Module and its arguments, got"
                f" {typename!r}; pass a function to PipelineModule directly"
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
    """A layer used at several positions of a model: one module with one set of weights.

    Each of its stages holds a copy; the gradients of all copies are summed.

    Args:
        key: the module's name; equal keys are one module.
        typename: a subclass of `nn.Module`, with its arguments.
        forward_fn: called with the module and its input instead of the module's forward.
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
"""A layer of a pipeline: a description, a module, or a function without weights."""


def name_of(layer: Layer) -> str:
    """Return a layer's class, or a function's name."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", type(layer).__name__)
