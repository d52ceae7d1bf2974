"""Layers of a stage that are recomputed in backward, some of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from hadal.plugins.pipeline.module import PipelineModule

Recompute = Callable[..., Any]
"""Called with a function and its arguments; returns the function's result, and calls it again in
backward."""

# Programs derived from Megatron's; recomputing their other layers is useless.
_MEGATRON_MODELS = ("GPTModelPipe", "GPT2ModelPipe")
_LAYER_OF_MEGATRON = "ParallelTransformerLayerPipe"


def recomputed(function: Callable[..., Any], *values: Any) -> Any:
    """Return `function(*values)`, and call it again in backward."""
    if not torch.is_grad_enabled():
        return function(*values)
    return checkpoint(function, *values, use_reentrant=False)


def calls_of(
    module: PipelineModule, layers: Sequence[int]
) -> Iterator[tuple[Sequence[int], Recompute | None]]:
    """Yield groups of these layers, and how each is recomputed; None if it is not."""
    interval = module.activation_checkpoint_interval
    if interval == 0 or not torch.is_grad_enabled():
        yield layers, None
        return
    for start in range(0, len(layers), interval):
        some = layers[start : start + interval]
        wanted = _is_recomputed(module, [module.layer(index) for index in some])
        yield some, (module.activation_checkpoint_func or recomputed) if wanted else None


def _is_recomputed(module: PipelineModule, layers: Sequence[Callable[..., Any]]) -> bool:
    names = {type(layer).__name__ for layer in layers}
    if type(module).__name__ in _MEGATRON_MODELS:
        return names <= {_LAYER_OF_MEGATRON, *(module.checkpointable_layers or ())}
    if module.checkpointable_layers is not None:
        return names <= set(module.checkpointable_layers)
    # A function may hold a tied module.
    held = (getattr(layer, "args", (layer,)) for layer in layers)
    modules = (one for each in held for one in each if isinstance(one, nn.Module))
    return any(True for one in modules for _ in one.parameters())
