"""DeepSpeed's cross entropies with their arguments: in blocks of rows, over split vocabularies."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.compat.surface import unbuilt
from hadal.errors import SequenceError, UsageError
from hadal.plugins.sequence import (
    linear_cross_entropy,
    mean_over_sequence,
    vocab_parallel_cross_entropy as over_split_vocabulary,
)
from hadal.plugins.sequence.cross_entropy import reduce_losses, whole_value
from hadal.plugins.sequence.tiles import IGNORED

Group = dist.ProcessGroup | None


def triton_backend_available() -> bool:
    """Return False: no kernels are compiled."""
    return False


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    block_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the cross entropy of logits [rows, vocabulary], a few rows in fp32 at a time.

    Args:
        logits: [rows, vocabulary] of any floating dtype.
        target: [rows].
        ignore_index: a target that does not count.
        reduction: "mean" over the targets that count (0 if there are none), "sum", or "none".
        block_rows: accepted; as many rows at a time as fill 128 MiB.
        backend: "auto" or "torch".

    Raises:
        NotBuiltYetError: the backend is "triton".
        SequenceError: shapes do not fit, or the reduction is unknown.
    """
    _check_backend("chunked_cross_entropy", backend, ("auto", "torch"))
    return over_split_vocabulary(logits, target, ignore_index=ignore_index, reduction=reduction)


class ChunkedCausalLMLoss:
    """transformers' loss of causal language models by `chunked_cross_entropy`."""

    def __init__(self, block_rows: int | None = None, backend: str = "auto") -> None:
        _check_backend("ChunkedCausalLMLoss", backend, ("auto", "torch"))
        self.block_rows, self.backend = block_rows, backend

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the loss: a mean over targets, or their sum over `num_items_in_batch`."""
        targets = _shifted(labels, shift_labels, ignore_index)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = chunked_cross_entropy(
            logits.reshape(-1, vocab_size), targets.reshape(-1), ignore_index, reduction
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def install_chunked_causal_lm_loss(
    model: nn.Module, block_rows: int | None = None, backend: str = "auto"
) -> ChunkedCausalLMLoss:
    """Let a causal language model of transformers compute its loss a few rows at a time.

    Returns the loss.

    Raises:
        UsageError: the model's loss is another one.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    found = getattr(model, "loss_function", None)
    if found is not ForCausalLMLoss:
        raise UsageError(
            f"install_chunked_causal_lm_loss is for models whose loss_function is transformers'"
            f" ForCausalLMLoss; that of {type(model).__name__} is {found!r}"
        )
    loss = ChunkedCausalLMLoss(block_rows, backend)
    model.loss_function = loss  # type: ignore[assignment]
    return loss


def vocab_parallel_cross_entropy(  # noqa: PLR0913 - the signature is DeepSpeed's
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: Group = None,
    sp_group: Group = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    gather_sequence_loss: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Return the cross entropy of logits whose vocabulary is split over ranks, evenly or not.

    Args:
        vocab_parallel_logits: [..., this rank's slice of the vocabulary].
        target: [...], integers in the whole vocabulary.
        tp_group: the ranks that share the vocabulary; None: it is whole.
        sp_group: the ranks that share sequences; the loss is reduced over them, and the gradient is
            that of this rank's part.
        vocab_start_index: start of this rank's slice; by default slices follow the ranks' order.
        vocab_end_index: end of the slice; checked.
        global_vocab_size: checked.
        ignore_index: targets with this value are ignored.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        gather_sequence_loss: must be false; `vocab_sequence_parallel_cross_entropy` gathers.
        backend: "torch".

    Raises:
        NotBuiltYetError: the backend "liger", or a gathered loss.
        SequenceError: shapes or the ends of the slice do not fit, or the reduction is unknown.
    """
    name = "vocab_parallel_cross_entropy"
    _check_backend(name, backend, ("torch",))
    if gather_sequence_loss:
        raise unbuilt(f"{name}(gather_sequence_loss=True)")
    size = vocab_parallel_logits.shape[-1]
    _check_slice(name, size, vocab_start_index, vocab_end_index, global_vocab_size)
    losses = over_split_vocabulary(
        vocab_parallel_logits,
        target,
        tp_group,
        ignore_index=ignore_index,
        vocab_start=vocab_start_index,
    )
    return _reduced(losses, target, sp_group, ignore_index, reduction)


def vocab_parallel_linear_cross_entropy(  # noqa: PLR0913 - the signature is DeepSpeed's
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    tp_group: Group = None,
    sp_group: Group = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Return the cross entropy of `linear(hidden, weight, bias)` without whole logits.

    Args:
        hidden: [..., hidden size].
        weight: [this rank's slice of the vocabulary, hidden size].
        target: [...], integers in the whole vocabulary.
        bias: [this rank's slice of the vocabulary].
        tp_group: this and the next arguments are as in `vocab_parallel_cross_entropy`.
        sp_group: the ranks that share sequences.
        vocab_start_index: start of this rank's slice.
        vocab_end_index: end of the slice; checked.
        ignore_index: targets with this value are ignored.
        reduction: "mean", "sum" or "none".
        chunk_size: the number of rows whose logits exist at a time.

    Raises:
        SequenceError: shapes or the ends of the slice do not fit, or the reduction is unknown.
    """
    name = "vocab_parallel_linear_cross_entropy"
    _check_slice(name, weight.shape[0], vocab_start_index, vocab_end_index, None)
    found = linear_cross_entropy(
        hidden,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        reduction="sum" if reduction == "mean" else reduction,
        rows=chunk_size,
        vocab_group=tp_group,
        vocab_start=vocab_start_index,
    )
    return _reduced(found, target, sp_group, ignore_index, reduction)


class VocabParallelCrossEntropyLoss(nn.Module):
    """`vocab_parallel_cross_entropy` as a module; the arguments are its."""

    def __init__(self, tp_group: Group = None, sp_group: Group = None, **choices: Any) -> None:
        super().__init__()
        self.choices = {"tp_group": tp_group, "sp_group": sp_group, **choices}

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits [..., slice of the vocabulary] and targets [...]."""
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, **self.choices)


class VocabParallelCausalLMLoss:
    """transformers' loss of causal language models over a split vocabulary.

    The arguments are those of `vocab_parallel_cross_entropy`.
    """

    def __init__(self, tp_group: Group = None, sp_group: Group = None, **choices: Any) -> None:
        self.choices = {"tp_group": tp_group, "sp_group": sp_group, **choices}

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the loss: a mean over targets, or their sum over `num_items_in_batch`."""
        targets = _shifted(labels, shift_labels, self.choices.get("ignore_index", IGNORED))
        if num_items_in_batch is None:
            return vocab_parallel_cross_entropy(logits, targets, **self.choices)
        total = vocab_parallel_cross_entropy(logits, targets, reduction="sum", **self.choices)
        return total / num_items_in_batch


def _shifted(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        raise UsageError("the loss got neither labels nor shift_labels [batch, length]; pass one")
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


def _reduced(
    losses: Tensor, target: Tensor, group: Group, ignore_index: int, reduction: str
) -> Tensor:
    if reduction == "none" or group is None:
        return reduce_losses(losses, target, ignore_index, reduction)
    total = losses.sum()
    if reduction == "sum":
        return whole_value(total, group)
    return mean_over_sequence(total, (target != ignore_index).sum(), group)


def _check_backend(name: str, backend: str, built: tuple[str, ...]) -> None:
    if backend in built:
        return
    known = " or ".join(f"backend={one!r}" for one in built)
    if backend in ("liger", "triton"):
        raise unbuilt(f"{name}(backend={backend!r})", f"Give {known}, which needs no kernels")
    raise UsageError(f"{name}: backend={backend!r} is unknown; give {known}")


def _check_slice(
    name: str, size: int, start: int | None, end: int | None, whole: int | None
) -> None:
    differs = start is not None and end is not None and end - start != size
    if differs or (whole is not None and (size if end is None else end) > whole):
        raise SequenceError(
            f"{name}: this rank has {size} columns of the vocabulary, but the caller says"
            f" {start} to {end} of {whole}; pass as many, without columns that pad the vocabulary"
        )
