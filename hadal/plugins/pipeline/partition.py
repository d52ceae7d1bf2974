"""Splits of a list of layers into consecutive parts, one for each stage of a pipeline.

A split is a list of bounds: part `i` has the items from `bounds[i]` up to, not including,
`bounds[i + 1]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import nn

from hadal.errors import ChoiceError, UsageError
from hadal.plugins.pipeline.specs import Layer, LayerSpec, name_of

Weigh = Callable[[Sequence[Layer]], Sequence[float]]


def cut(layers: Sequence[Layer], stages: int, method: str, weigh: Weigh | None = None) -> list[int]:
    """Return the bounds of each stage's layers.

    Args:
        layers: all layers of the model.
        stages: the number of parts.
        method: "uniform" (equally many layers), "parameters" (equally many trainable elements) or
            "type:PATTERN" (equally many layers whose class or function matches the regular
            expression, anywhere in the name and in any case).
        weigh: the weight of each layer for "parameters"; by default its trainable elements.

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
        return partition_balanced((weigh or Weigher().weights)(layers), stages)
    if word.lower() == "type":
        return partition_balanced(matches(layers, pattern), stages)
    raise ChoiceError(
        f"partition_method is {method!r}; choose 'uniform', 'parameters' or 'type:' and a regular"
        " expression of layers' classes"
    )


def matches(layers: Sequence[Layer], pattern: str) -> list[int]:
    """Return 1 for each layer whose class or function matches a regular expression, and else 0.

    Raises:
        UsageError: none matches, or it is no regular expression.
    """
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


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return bounds of parts of equal length; the first ones have one more if it does not divide.

    If there are fewer items than parts, each part has at most one, and the last parts are empty.

    Raises:
        UsageError: there are no parts, or fewer than no items.
    """
    _check(num_items, num_parts)
    each, more = divmod(num_items, num_parts)
    return [part * each + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return bounds for which the heaviest and the lightest part differ little.

    A dynamic program over the last bound. It keeps the best split of every prefix: the one with the
    smallest difference between its parts, and among equals the one with the latest bound. No part
    is empty, unless there are fewer items than parts.

    Raises:
        UsageError: there are no parts.
    """
    count = len(weights)
    _check(count, num_parts)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0, *prefix_sum_inc(weights)]
    # For each prefix: its heaviest and lightest part, and the start of its last part.
    found = [[(weight, weight, 0) for weight in sums]]
    for parts in range(2, num_parts + 1):
        before, row = found[-1], [(0.0, 0.0, 0)] * (count + 1)
        for stop in range(parts, count + 1):
            least = None
            for start in range(parts - 1, stop):
                weight = sums[stop] - sums[start]
                heaviest = max(before[start][0], weight)
                lightest = min(before[start][1], weight)
                if least is None or heaviest - lightest <= least:
                    least = heaviest - lightest
                    row[stop] = heaviest, lightest, start
        found.append(row)
    bounds = [count]
    for row in reversed(found):
        bounds.append(row[bounds[-1]][2])
    return bounds[::-1]


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the sum of the weights up to and including each."""
    return list(accumulate(weights))


def _check(num_items: int, num_parts: int) -> None:
    if num_parts < 1 or num_items < 0:
        raise UsageError(
            f"{num_items} layers cannot be split into {num_parts} stages: expected at least"
            " one stage"
        )
