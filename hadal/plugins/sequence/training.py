"""Sequences split over ranks in an engine's training, for models of transformers.

All ranks of a sequence pass the same batch to the engine. Each rank's model gets its slice; the
loss has the value of whole sequences and the gradient of this rank's part.
"""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hadal.comm import Ranks
from hadal.comm.functions import all_gather_object, labelled
from hadal.device import has_values, read_on_host
from hadal.errors import SequenceError
from hadal.listener import Forward, Listener, Setting
from hadal.plugins.sequence.attention import DistributedAttention
from hadal.plugins.sequence.cross_entropy import whole_value
from hadal.plugins.sequence.huggingface import attach, detach, is_attached
from hadal.plugins.sequence.loader import (
    check_padding,
    is_cut,
    length_of,
    padded,
    slice_of_rank,
    tokens_of,
)
from hadal.plugins.sequence.tiles import IGNORED

_log = logging.getLogger(__name__)

_LOSS = "ForCausalLM"


class _LossOfSlices:
    """Wraps a model's loss function, and records whether it got the targets of a slice."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.is_used = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.is_used = kwargs.get("shift_labels") is not None
        return self.function(*args, **kwargs)


class SequenceSlices(Listener):
    """Passes this rank's slices of batches to a model, and computes the loss of whole sequences.

    In evaluation each rank computes whole sequences.
    """

    name = "hadal.sequence_slices"

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._is_loss_cut = False
        self._is_compared = False
        attach(model, group, disable_in_eval=True)
        # The transformers module that computes the loss: other modules may wrap it.
        self._owner = next((m for m in model.modules() if hasattr(type(m), "loss_function")), None)
        self._loss: _LossOfSlices | None = None
        self._handle: RemovableHandle = model.register_forward_hook(self._join_loss)

    def before_forward(self, forward: Forward) -> Forward | None:
        """Split the batch of a training forward."""
        if not forward.is_training:
            return None
        batch = _by_name(self._model, forward)
        tokens = tokens_of(batch)
        if tokens is None:
            raise SequenceError(
                "sequence_parallel_size: the model's forward got no input_ids or inputs_embeds"
                " [batch, length, ...] to split over the ranks; pass them by keyword"
            )
        labels = batch.get("labels")
        self._check(batch, labels)
        if not self._is_compared and has_values(tokens):
            self._compare(tokens)
        self._is_compared = True
        whole = padded(batch, self._size)
        if isinstance(labels, Tensor):
            targets = whole["shift_labels"]
            whole["labels"] = targets
            whole.setdefault("num_items_in_batch", (targets != IGNORED).sum().clamp(min=1))
        self._is_loss_cut = isinstance(labels, Tensor)
        if self._loss is not None:
            self._loss.is_used = False
        mine = {
            name: slice_of_rank(value, self._rank, self._size) if is_cut(value) else value
            for name, value in whole.items()
        }
        return forward._replace(args=(), kwargs=mine)

    def on_error(self, error: BaseException) -> None:
        """Drop the batch."""
        self._is_loss_cut = False

    def close(self) -> None:
        """Restore the model's own attention."""
        self._handle.remove()
        if self._loss is not None and self._owner is not None:
            self._owner.loss_function = self._loss.function  # type: ignore[assignment]
        detach(self._model)

    def _check(self, batch: Mapping[str, Any], labels: Any) -> None:
        mask, length = batch.get("attention_mask"), length_of(batch)
        if isinstance(mask, Tensor) and mask.dim() != 2:
            raise SequenceError(
                f"sequence_parallel_size: attention_mask has the shape {tuple(mask.shape)};"
                " expected [batch, length], as masks between positions cannot be split over ranks"
            )
        # Reading a mask waits for an accelerator, so only the first batch is checked.
        looks = not self._is_compared or (isinstance(mask, Tensor) and mask.device.type == "cpu")
        looks = looks and batch.get("position_ids") is None
        if looks and isinstance(mask, Tensor) and has_values(mask):
            check_padding(mask)
        if labels is not None and self._loss is None:
            self._take_loss()
        assert length is not None
        if not any(getattr(one, "is_causal", True) is False for one in self._model.modules()):
            return
        whole = not isinstance(mask, Tensor) or read_on_host(
            mask.all(), "whether batches are padded"
        )
        if length % self._size or not whole:
            raise SequenceError(
                f"sequence_parallel_size: {type(self._model).__name__} attends in both directions,"
                f" so that padding would be seen; pass batches without padding, of a length that"
                f" {self._size} ranks divide (found {length})"
            )

    def _take_loss(self) -> None:
        kind = getattr(self._owner, "loss_type", None)
        found = getattr(self._owner, "loss_function", None)
        # Models whose class name does not tell (GPT2LMHeadModel) have it, too.
        if kind != _LOSS and (kind or getattr(found, "__name__", "") != f"{_LOSS}Loss"):
            raise self._no_loss(str(kind))
        assert self._owner is not None  # it has a loss
        self._loss = _LossOfSlices(found)  # type: ignore[arg-type]
        self._owner.loss_function = self._loss  # type: ignore[assignment]

    def _no_loss(self, kind: str) -> SequenceError:
        return SequenceError(
            f"sequence_parallel_size: the loss of {type(self._model).__name__} ({kind}) is not"
            f" built for sequences split over ranks, only that of {_LOSS}; leave labels out and"
            " compute the loss from this rank's logits with hadal.sequence.sequence_loss"
        )

    def _compare(self, tokens: Tensor) -> None:
        """Raise an error on all ranks if they were given different sequences: slices do not fit."""
        values = tokens.detach().cpu().contiguous().flatten().view(torch.uint8)
        mine = tuple(tokens.shape), zlib.crc32(values.numpy().tobytes())
        ranks = Ranks.of(self._group)
        found: list[Any] = [None] * self._size
        label = "the comparison of the first batch of the ranks that share sequences"
        labelled(label, all_gather_object, found, mine, group=ranks.host_group)
        for number, other in zip(ranks.numbers, found, strict=True):
            if other != found[0]:
                raise SequenceError(
                    f"sequence_parallel_size: ranks {ranks.numbers[0]} and {number} share sequences"
                    f" but got different ones (of shapes {found[0][0]} and {other[0]}); read the"
                    " same samples on all ranks of a sequence, as the loader that initialize"
                    " returns does. With Accelerate or the Trainer, set"
                    ' ParallelismConfig(sp_backend="deepspeed", sp_size=...) instead of this key'
                )

    def _join_loss(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_loss_cut:
            return None
        self._is_loss_cut = False
        if self._loss is None or not self._loss.is_used:
            raise self._no_loss("computed by itself, not by its loss_function")
        if isinstance(output, tuple):
            return (whole_value(output[0], self._group), *output[1:])
        output["loss"] = whole_value(output["loss"], self._group)
        return output


def _by_name(model: nn.Module, forward: Forward) -> dict[str, Any]:
    """Return the arguments of a forward by name; a mapping as the only argument is a batch."""
    if len(forward.args) == 1 and isinstance(forward.args[0], Mapping):
        return {**forward.args[0], **forward.kwargs}
    if not forward.args:
        return dict(forward.kwargs)
    names = list(inspect.signature(model.forward).parameters)
    return {**dict(zip(names, forward.args, strict=False)), **forward.kwargs}


def slices_of(section: Any, setting: Setting) -> SequenceSlices | None:
    """Return the listener of an engine; None if the program splits batches itself."""
    del section
    model, ranks = setting.model, setting.sequence_parallel
    if hasattr(getattr(model, "config", None), "_attn_implementation"):
        return None if ranks is None or is_attached(model) else SequenceSlices(model, ranks.group)
    # Models that exchange heads already get sequences from a program that splits them.
    is_exchanging = any(isinstance(module, DistributedAttention) for module in model.modules())
    if setting.world.rank == 0 and not is_exchanging:
        _log.warning(
            "sequence_parallel_size: %s has no config._attn_implementation, by which models of"
            " transformers choose their attention, so its sequences are not split: split them in"
            " the program, and wrap the attention in hadal.sequence.DistributedAttention",
            type(model).__name__,
        )
    return None
