"""Norms, dropout and residuals between the cut layers, on slices of the sequence.

Positions are gathered before a block's computation on slices of weights; after it they are summed
and scattered, which moves as many bytes as the sum alone. Activations in between are stored for
1/t of the positions ("Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hadal.comm.adjoint import across, gathered, own, sum_scattered
from hadal.errors import ModelError, UsageError
from hadal.plugins.tensor_parallel.layers import (
    ColumnLinear,
    RowLinear,
    TensorGroup,
    sum_gradient,
)
from hadal.plugins.tensor_parallel.plan import CutPlan
from hadal.plugins.tensor_parallel.rules import blocks_of

_KEY = "tensor_parallel.sequence_parallel"
_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f")
_VALUES = "hidden_states"


def cut_sequences(model: nn.Module, plan: CutPlan, group: TensorGroup) -> None:
    """Split sequences between the layers of a model that is already cut.

    Raises:
        ModelError: the model's structure is not supported.
    """
    modules = dict(model.named_modules())
    regions = [path for path, layers in plan.parents().items() if not layers[0].gather_output]
    blocks = [path for path, _ in blocks_of(model) if any(_is_in(one, path) for one in regions)]
    stacks = {path.rpartition(".")[0] for path in blocks}
    norm = _last_norm(modules, stacks)
    if len(stacks) != 1 or norm is None or any(region in blocks for region in regions):
        raise ModelError(
            f"{_KEY}: {type(model).__name__} is not a decoder with one list of blocks, attentions"
            f" and feed-forward modules in them, and one of {', '.join(_NORMS)} next to the list;"
            " leave the key out"
        )
    cut = {id(p) for one in plan.layers for p in one.layer.parameters() if _is_slice(p)}
    for path in blocks:
        for name, parameter in modules[path].named_parameters(path):
            if id(parameter) in cut or name in plan.summed:
                continue
            is_row_bias = isinstance(modules[name.rpartition(".")[0]], RowLinear)
            if any(_is_in(name, region) for region in regions) and not is_row_bias:
                raise ModelError(
                    f"{_KEY}: {name} is whole, but in a module whose layers are cut; add a rule"
                    " for it to tensor_parallel.partition_config.layer_specs, or leave the key out"
                )
            sum_gradient(parameter, group.ranks, name)
    for name, parameter in modules[norm].named_parameters(norm):
        sum_gradient(parameter, group.ranks, name)
    for one in plan.layers:
        if not one.gather_output:
            assert isinstance(one.layer, ColumnLinear | RowLinear)
            one.layer.cuts_sequence = True
    ways = _Ways(group)
    modules[blocks[0]].register_forward_pre_hook(ways.begin, with_kwargs=True)
    for region in regions:
        modules[region].register_forward_pre_hook(ways.enter, with_kwargs=True)
    modules[norm].register_forward_hook(ways.end)


def _is_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _is_slice(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "tensor_model_parallel", False) is True


def _last_norm(modules: dict[str, nn.Module], stacks: set[str]) -> str | None:
    for stack in stacks:
        around = stack.rpartition(".")[0]
        for leaf in _NORMS:
            name = f"{around}.{leaf}" if around else leaf
            if name in modules:
                return name
    return None


class _Ways:
    """Converts whole sequences to slices and back, in training."""

    def __init__(self, group: TensorGroup) -> None:
        self._group, self._ranks = group, group.ranks
        self._even = group.ranks.size

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass this rank's positions to the first block."""
        values = _values(args, kwargs)
        if not block.training:
            if torch.is_grad_enabled() and values.requires_grad:
                raise UsageError(
                    f"{_KEY}: gradients were requested in evaluation, where sequences are whole;"
                    " call model.train(), or use torch.no_grad()"
                )
            return None
        length = values.shape[1]
        if length % self._even:
            raise UsageError(
                f"{_KEY}: {self._even} ranks do not divide the {length} positions of a batch; pad"
                f" batches to a multiple of {self._even}"
            )
        sizes = [length // self._even] * self._even
        label = "the gradient of whole sequences"
        found = across(
            values,
            lambda x: own(x, 1, sizes, self._ranks),
            lambda g: gathered(g, 1, sizes, self._ranks, label),
        )
        return _with(found, args, kwargs)

    def enter(self, region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass all positions to an attention or a feed-forward module."""
        if not region.training:
            return None
        values = _values(args, kwargs)
        sizes = [values.shape[1]] * self._even
        label = f"positions for {type(region).__name__}"
        found = across(
            values,
            lambda x: gathered(x, 1, sizes, self._ranks, label),
            lambda g: sum_scattered(g, 1, sizes, self._ranks, label),
        )
        return _with(found, args, kwargs)

    def end(self, norm: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return whole sequences after the last norm."""
        if not norm.training:
            return None
        sizes = [output.shape[1]] * self._even
        label = "positions after the last norm"
        return across(
            output,
            lambda x: gathered(x, 1, sizes, self._ranks, label),
            lambda g: own(g, 1, sizes, self._ranks),
        )


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = kwargs.get(_VALUES, args[0] if args else None)
    assert isinstance(found, Tensor)
    return found


def _with(values: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _VALUES in kwargs:
        return args, {**kwargs, _VALUES: values}
    return (values, *args[1:]), kwargs
