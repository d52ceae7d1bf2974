"""Turns a model's layers into slices, in place; between them it may run on slices of sequences.

With `sequence_parallel`, positions are gathered before a block's computation on slices of weights;
after it they are summed and scattered, which moves as many bytes as the sum alone. Activations in
between are stored for 1/t of the positions ("Reducing Activation Recomputation in Large Transformer
Models", arXiv:2205.05198).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hadal.comm import Ranks
from hadal.comm.adjoint import across, gathered, own, sum_scattered
from hadal.comm.collectives import broadcast_
from hadal.config.parallelism import TensorParallel
from hadal.device import current_device, random_state, set_random_state
from hadal.errors import ModelError, UsageError
from hadal.plugins.tensor_parallel.layers import (
    ColumnLinear,
    RowLinear,
    TensorGroup,
    VocabularyEmbedding,
    WeightCut,
    is_attention,
    show_share,
    sum_gradient,
    take_slice,
)
from hadal.plugins.tensor_parallel.plan import CutPlan, describe
from hadal.plugins.tensor_parallel.rules import blocks_of

_SEQ = "tensor_parallel.sequence_parallel"
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
            f"{_SEQ}: {type(model).__name__} is not a decoder with one list of blocks, attentions"
            f" and feed-forward modules in them, and one of {', '.join(_NORMS)} next to the list;"
            " leave the key out"
        )
    parameters = (p for one in plan.layers for p in one.layer.parameters())
    cut = {id(p) for p in parameters if getattr(p, "tensor_model_parallel", False) is True}
    for path in blocks:
        for name, parameter in modules[path].named_parameters(path):
            if id(parameter) in cut or name in plan.summed:
                continue
            is_row_bias = isinstance(modules[name.rpartition(".")[0]], RowLinear)
            if any(_is_in(name, region) for region in regions) and not is_row_bias:
                raise ModelError(
                    f"{_SEQ}: {name} is whole, but in a module whose layers are cut; add a rule"
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
                    f"{_SEQ}: gradients were requested in evaluation, where sequences are whole;"
                    " call model.train(), or use torch.no_grad()"
                )
            return None
        length = values.shape[1]
        if length % self._even:
            raise UsageError(
                f"{_SEQ}: {self._even} ranks do not divide the {length} positions of a batch; pad"
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


_log = logging.getLogger(__name__)


class Sliced(NamedTuple):
    """A parameter of which each rank holds a slice."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """Shape of the whole."""
    cut: WeightCut
    ranks: Ranks

    def whole(self, mine: Tensor) -> Tensor:
        """Return the whole parameter from all ranks' slices. All ranks must call it."""
        cut, label = self.cut, f"the gather of the whole {self.name}"
        found = gathered(mine.detach(), cut.dim, cut.sizes, self.ranks, label)
        return cut.join(found.split(cut.sizes, cut.dim)) if len(cut.parts) > 1 else found


def share_values(model: nn.Module, ranks: Ranks) -> None:
    """Copy the first rank's values and random states to all ranks. All of them must call it.

    Then slices belong to one model, and whole parameters are the same on all ranks.
    """
    for name, parameter in model.named_parameters():
        broadcast_(parameter.detach(), 0, ranks, f"the broadcast of {name}")
    for name, buffer in model.named_buffers():
        broadcast_(buffer.detach(), 0, ranks, f"the broadcast of buffer {name}")
    share_random_numbers(ranks)


def share_random_numbers(ranks: Ranks) -> None:
    """Copy the first rank's random states to all, so that whole layers drop the same values."""
    label = "the broadcast of the random state to tensor-parallel ranks"
    state = torch.get_rng_state()
    broadcast_(state, 0, ranks, label)
    torch.set_rng_state(state)
    device = current_device()
    there = random_state(device)
    if there is not None:
        broadcast_(there, 0, ranks, label)
        set_random_state(there, device)


def cut_model(
    model: nn.Module,
    plan: CutPlan,
    section: TensorParallel,
    ranks: Ranks,
    loss: SliceLoss | None = None,
    *,
    is_stage: bool = False,
) -> list[Sliced]:
    """Cut a model according to a plan; return the parameters that were cut.

    All ranks must call it, with the same values.

    Args:
        model: the whole model, or a stage of it.
        plan: the cuts.
        section: the options.
        ranks: the ranks that share the layers.
        loss: the cross entropy of logits that are cut by the vocabulary.
        is_stage: the output layer may be on another stage, and the loss is computed after the
            model's forward.

    Raises:
        ModelError: the section cuts the loss or sequences, which this model does not support.
    """
    group = TensorGroup(ranks, overlaps=section.tp_overlap_comm)
    sliced = list(_sliced(plan, ranks))
    for one in plan.embeddings:
        assert isinstance(one.layer, nn.Embedding)
        VocabularyEmbedding.become(one.layer, group, one.cut, one.name)
    for one in plan.layers:
        assert isinstance(one.layer, nn.Linear)
        if one.is_row:
            RowLinear.become(one.layer, group, one.cut, one.name)
        else:
            ColumnLinear.become(one.layer, group, one.cut, one.name)
            one.layer.gather_output = one.gather_output  # type: ignore[assignment]
    for one in plan.biases:
        take_slice(one.layer.weight, one.cut, ranks)  # type: ignore[arg-type]
        one.layer.embedding_dim = one.cut.sizes[ranks.rank]  # type: ignore[assignment]
    for name, parameter in plan.summed.items():
        sum_gradient(parameter, ranks, name)
    _show_shares(model, plan, ranks)
    if ranks.rank == 0:
        found = describe(plan)
        told = ", ".join(f"{count} {kind}" for kind, count in found.items())
        _log.info("tensor parallel: %s are cut over %d ranks", told, ranks.size)
    if section.vocab_parallel_lm_head and loss is not None:
        for output in _outputs(plan):
            OutputSlices(model, output, group, loss, is_after=is_stage)
    if section.sequence_parallel:
        cut_sequences(model, plan, group)
    return sliced


def _outputs(plan: CutPlan) -> Iterator[ColumnLinear]:
    """Yield the output layer, unless another stage has it."""
    if plan.head is None:
        raise ModelError(
            "tensor_parallel.vocab_parallel_lm_head: no output layer was found; set its name in"
            " tensor_parallel.partition_config.lm_head_patterns"
        )
    for one in plan.layers:
        if one.name == plan.head:
            assert isinstance(one.layer, ColumnLinear)
            yield one.layer


def _sliced(plan: CutPlan, ranks: Ranks) -> Iterator[Sliced]:
    seen: set[int] = set()
    for one in [*plan.embeddings, *plan.layers, *plan.biases]:
        for leaf, parameter in one.layer.named_parameters(one.name, recurse=False):
            is_whole = leaf.endswith(".bias") and one.is_row
            if id(parameter) not in seen and not is_whole:
                seen.add(id(parameter))
                yield Sliced(leaf, parameter, tuple(parameter.shape), one.cut, ranks)


def _show_shares(model: nn.Module, plan: CutPlan, ranks: Ranks) -> None:
    modules, configs = dict(model.named_modules()), dict[int, Any]()
    for parent in plan.parents():
        if is_attention(modules[parent]):
            show_share(modules[parent], plan.heads, ranks.size, ranks.rank, configs)


# ---- the loss ------------------------------------------------------------------------------------

SliceLoss = Callable[..., Tensor]
"""A cross entropy of logits split by vocabulary: (logits, target, group, ignore_index=,
reduction=)."""
_KEY = "tensor_parallel.vocab_parallel_lm_head"
_CAUSAL = "ForCausalLM"


class OutputSlices:
    """Keeps a model's logits in slices while it computes its loss in training.

    Without labels, and in evaluation, logits are whole.
    """

    def __init__(
        self,
        model: nn.Module,
        output: ColumnLinear,
        group: TensorGroup,
        loss: SliceLoss,
        *,
        is_after: bool = False,
    ) -> None:
        """Replace the model's loss function.

        `is_after`: it is called after the model's forward, which gets no labels.

        Raises:
            ModelError: the model has no supported loss function.
        """
        owner = next((m for m in model.modules() if hasattr(type(m), "loss_function")), None)
        kind = getattr(owner, "loss_type", None)
        known: Any = getattr(owner, "loss_function", None)
        named = getattr(known, "__name__", "")
        if owner is None or (kind != _CAUSAL and (kind or named != f"{_CAUSAL}Loss")):
            raise ModelError(
                f"{_KEY}: the loss of {type(model).__name__} ({kind or 'unknown'}) is not built for"
                f" slices of the vocabulary, only transformers' loss_function of {_CAUSAL}; leave"
                " the key out"
            )
        self._output, self._group = output, group
        self._whole: Callable[..., Tensor] = known
        self._loss = loss
        self._names = list(inspect.signature(owner.forward).parameters)
        self._is_used, self._is_after = False, is_after
        owner.loss_function = self  # type: ignore[assignment]
        owner.register_forward_pre_hook(self._before, with_kwargs=True)
        owner.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = {**dict(zip(self._names, args, strict=False)), **kwargs}.get("labels")
        is_asked = self._is_after or labels is not None
        self._output.gather_output = not (module.training and is_asked)
        self._is_used = False

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_after:
            return
        if not self._output.gather_output and not self._is_used and output is not None:
            raise ModelError(
                f"{_KEY}: {type(module).__name__} computed its loss without its loss_function, from"
                " a slice of the logits; leave the key out"
            )
        self._output.gather_output = True

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean loss of next tokens, as transformers' function does.

        Args:
            logits: (batch, length, vocabulary), or this rank's slice of the vocabulary.
            labels: (batch, length), the tokens; those of `ignore_index` do not count.
            vocab_size: the whole vocabulary.
            num_items_in_batch: tokens that count in the whole update; None counts those here.
            ignore_index: the label that does not count.
            shift_labels: labels that are already shifted.
            kwargs: for the model's own function.
        """
        if self._output.gather_output:
            return self._whole(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        self._is_used = True
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        flat = logits.reshape(-1, logits.shape[-1])
        reduction = "mean" if num_items_in_batch is None else "sum"
        group = self._group.ranks.group
        found = self._loss(flat, targets, group, ignore_index=ignore_index, reduction=reduction)
        if num_items_in_batch is None:
            return found
        count = num_items_in_batch
        return found / (count.to(found.device) if isinstance(count, Tensor) else count)
