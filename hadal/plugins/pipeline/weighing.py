"""The weight of each layer, by which a list of layers is split into stages."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from hadal.errors import ChoiceError, UsageError
from hadal.plugins.pipeline.partition import partition_balanced, partition_uniform
from hadal.plugins.pipeline.specs import Layer, LayerSpec, name_of


def cut(layers: Sequence[Layer], stages: int, method: str) -> list[int]:
    """Return the bounds of each stage's layers.

    Args:
        layers: all layers of the model.
        stages: the number of parts.
        method: "uniform" (equally many layers), "parameters" (equally many trainable elements) or
            "type:PATTERN" (equally many layers whose class or function matches the regular
            expression, anywhere in the name and in any case).

    Raises:
        ChoiceError: another method.
        UsageError: no layer matches, or there are fewer layers than stages.
    """
    if len(layers) < stages:
        raise UsageError(
            f"{len(layers)} layers cannot be split into {stages} stages: stage {len(layers)} would"
            " have none; use fewer stages"
        )
    word, _, pattern = method.partition(":")
    if word.lower() == "uniform":
        return partition_uniform(len(layers), stages)
    if word.lower() == "parameters":
        return partition_balanced(Weigher().weights(layers), stages)
    if word.lower() == "type":
        return partition_balanced(_matches(layers, pattern), stages)
    raise ChoiceError(
        f"partition_method is {method!r}; choose 'uniform', 'parameters' or 'type:' and a regular"
        " expression of layers' classes"
    )


def _matches(layers: Sequence[Layer], pattern: str) -> list[int]:
    try:
        found = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UsageError(
            f"partition_method='type:{pattern}' is not a regular expression: {error}"
        ) from None
    weights = [int(found.search(name_of(layer)) is not None) for layer in layers]
    if not any(weights):
        names = ", ".join(dict.fromkeys(map(name_of, layers)))
        raise UsageError(
            f"partition_method='type:{pattern}' matches no layer; the layers are {names}"
        )
    return weights


class Weigher:
    """Counter of layers' trainable elements. A description is built on the meta device."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}

    def weights(self, layers: Sequence[Layer]) -> list[int]:
        """Return the trainable elements of each layer; tied ones count at every position."""
        return [self._weight(layer) for layer in layers]

    def _weight(self, layer: Layer) -> int:
        if isinstance(layer, nn.Module):
            return trainable_numel(layer)
        if not isinstance(layer, LayerSpec):
            return 0
        # Models repeat a layer with the same arguments, often the very same configuration object.
        arguments = (*map(id, layer.module_args), *layer.module_kwargs)
        key = (layer.typename, *arguments, *map(id, layer.module_kwargs.values()))
        if key not in self._known:
            self._known[key] = trainable_numel(built_without_memory(layer))
        return self._known[key]


def trainable_numel(module: nn.Module) -> int:
    """Return the number of elements that require a gradient."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def built_without_memory(spec: LayerSpec) -> nn.Module:
    """Build a layer on the meta device, or in memory if its constructor reads values.

    The program's random generators are not advanced.
    """
    with torch.random.fork_rng(devices=()):
        try:
            with torch.device("meta"):
                return spec.build()
        except Exception:  # any exception: the second attempt raises it again
            return spec.build()
