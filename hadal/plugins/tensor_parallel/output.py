"""The loss of a language model whose output layer is sliced by vocabulary over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hadal.errors import ModelError
from hadal.plugins.tensor_parallel.layers import ColumnLinear, TensorGroup

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
