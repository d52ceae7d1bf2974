"""Curriculum by sequence length (`curriculum_learning`): short sequences first."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hadal.config.data_efficiency import CurriculumLearning
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Setting, Update
from hadal.plugins.data_efficiency.pacing import CustomPace, Pacer, pace_rule_of


def accepts(module: nn.Module, keyword: str) -> bool:
    """Return whether the module's forward can be called with the keyword."""
    return _named(module, keyword) or any(
        each.kind is each.VAR_KEYWORD for each in _parameters(module).values()
    )


def listens(model: nn.Module, keyword: str) -> bool:
    """Return whether the keyword reaches a forward that uses it, judging by signatures.

    A forward with `**kwargs` is assumed to use it, unless the model contains a transformers class:
    these ignore unknown keywords.
    """
    if not accepts(model, keyword):
        return False
    return any(_named(module, keyword) for module in model.modules()) or not any(
        kind.__module__.split(".")[0] == "transformers"
        for module in model.modules()
        for kind in type(module).__mro__
    )


def positional_names(module: nn.Module) -> list[str]:
    """Return the names of the forward's positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, each in _parameters(module).items() if each.kind in kinds]


def _named(module: nn.Module, keyword: str) -> bool:
    return keyword in _parameters(module)


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(module.forward).parameters)


_log = logging.getLogger(__name__)

KEYWORD = "curriculum_seqlen"


def gets_length(model: nn.Module, truncates: bool | None) -> bool:
    """Return whether to pass `curriculum_seqlen` to forward; else Hadal truncates its inputs.

    `truncates` is `curriculum_learning.truncate`; None decides by the model.

    Raises:
        UsageError: `truncates` is false, and the model's forward takes no such argument.
    """
    if truncates is False and not accepts(model, KEYWORD):
        raise UsageError(
            f"curriculum_learning.truncate is false, but {type(model).__name__}.forward takes no"
            f" {KEYWORD}; add that parameter, or leave truncate out"
        )
    return listens(model, KEYWORD) if truncates is None else not truncates


class LengthCurriculum(Listener):
    """Sequences that grow during training: passed to the model, or truncated by Hadal.

    The length is constant over the micro-steps of an update. Evaluation sees whole sequences.
    """

    name = "curriculum_learning"

    def __init__(self, section: CurriculumLearning, setting: Setting) -> None:
        model = setting.model
        self.pacer = Pacer(pace_rule_of(section), "curriculum_learning", least=1)
        self.tokens = 0
        """Tokens in training forwards so far, over all ranks; 0 if inputs are not token ids."""
        self._readers = setting.data_parallel.size
        self._write = setting.write
        self._tells = gets_length(model, section.truncate)
        self._names = positional_names(model)
        _log.info(
            "curriculum_learning: %s",
            f"{type(model).__name__}.forward is given {KEYWORD}"
            if self._tells
            else f"the inputs of {type(model).__name__}.forward are truncated",
        )

    @property
    def length(self) -> int:
        """The length in the last training forward."""
        return self.pacer.current

    def set_custom(self, custom: CustomPace) -> None:
        """Set the function of a custom schedule: from step (counted from 1) to length."""
        self.pacer.set_custom(custom)

    def before_forward(self, forward: Forward) -> Forward | None:
        """Pass the length to the model, or truncate its inputs."""
        if not forward.is_training:
            return None
        length = self.pacer.at(forward.updates + 1)
        if self._tells:
            changed = forward._replace(kwargs={**forward.kwargs, KEYWORD: length})
        else:
            named = dict(zip(self._names, forward.args, strict=False))
            rest = tuple(forward.args[len(named) :])
            batch = truncate([named, rest, forward.kwargs], length)
            args = (*batch[0].values(), *batch[1])
            changed = forward._replace(args=args, kwargs=_with_count(forward.kwargs, batch[2]))
        self.tokens += changed.tokens * self._readers
        return changed

    def after_update(self, update: Update) -> None:
        """Write the length and the tokens to the monitors."""
        if self._write is not None:
            scalars = {KEYWORD: self.length, "consumed_tokens": self.tokens}
            events = [(f"Train/Samples/{name}", value) for name, value in scalars.items()]
            self._write([(*event, update.total_samples) for event in events])

    def state_dict(self) -> Mapping[str, Any]:
        """Return the length and the tokens so far."""
        return {"current_difficulty": self.length, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`."""
        self.pacer.current = int(state["current_difficulty"])
        self.tokens = int(state["tokens"])


def _with_count(whole: dict[str, Any], cut: dict[str, Any]) -> dict[str, Any]:
    """Return keywords whose `num_items_in_batch` counts the labels that are left.

    Hugging Face's Trainer counts the labels of the whole update, and the model divides by this. The
    fraction that is left in this micro-batch is assumed for all of them.
    """
    count, labels = whole.get("num_items_in_batch"), whole.get("labels")
    if count is None or not isinstance(labels, Tensor) or cut["labels"] is labels:
        return cut
    all_, left = ((each[..., 1:] != -100).sum() for each in (labels, cut["labels"]))
    return {**cut, "num_items_in_batch": count * left / all_.clamp(min=1)}


# ---- truncation ----------------------------------------------------------------------------------

_TOKENS = ("input_ids", "tokens", "inputs_embeds")
_POSITIONS = ("position_ids", "cache_position")
_PACKED = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")


def truncate(batch: Any, length: int, *, name: str = "") -> Any:
    """Return a batch whose sequences have at most `length` tokens, the first ones.

    The full length S is that of `input_ids`, `tokens` or `inputs_embeds`, or else of the first
    integer tensor [batch, S, ...], or floating-point tensor [batch, S, width]. Each tensor
    [batch, S, ...] is truncated, and masks in both of their last dimensions. Nothing is copied.

    Args:
        batch: tensors in mappings, tuples and lists.
        length: tokens to keep.
        name: the name of the batch, if it is a single tensor.

    Raises:
        UsageError: nothing in it has a sequence, or sequences are packed into one.
    """
    flat = [(key, value) for key, value in _tensors(batch, name) if value.dim()]
    reference = _reference(flat)
    if reference is None:
        shapes = ", ".join(f"{key or '?'} {list(value.shape)}" for key, value in flat) or "none"
        raise UsageError(
            f"curriculum_learning found no sequences to truncate; expected integers [batch, length]"
            f" or floating-point values [batch, length, width], got {shapes}. Give forward a"
            " parameter curriculum_seqlen, and truncate there"
        )
    full = reference.shape[1]
    if length >= full:
        return batch
    packed = [key for key, _ in flat if key in _PACKED]
    if packed:
        raise UsageError(
            f"curriculum_learning cannot truncate packed sequences ({packed[0]} is given); pad them"
            " to one length, or give forward a parameter curriculum_seqlen, and truncate there"
        )
    return _cut(batch, name, reference.shape[0], full, length)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, name)


def _reference(flat: list[tuple[str, Tensor]]) -> Tensor | None:
    """Return the tensor that determines the number of sequences and their length."""
    deep = [(key, value) for key, value in flat if value.dim() >= 2]
    for wanted in _TOKENS:
        for key, value in deep:
            if key == wanted:
                return value
    whole = (value for _, value in deep if _is_integer(value))
    wide = (value for key, value in deep if value.dim() == 3 and "mask" not in key)
    return next(chain(whole, wide), None)


def _is_integer(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _cut(value: Any, name: str, rows: int, full: int, length: int) -> Any:
    if isinstance(value, Tensor):
        for dim in _dims_of_sequence(name, value.shape, rows, full):
            value = value.narrow(dim, 0, length)
        return value
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)
        for key, each in value.items():
            changed[key] = _cut(each, str(key), rows, full, length)
        return changed
    if isinstance(value, list | tuple):
        cut = [_cut(each, name, rows, full, length) for each in value]
        return type(value)(*cut) if hasattr(value, "_fields") else type(value)(cut)
    return value


def _dims_of_sequence(name: str, shape: tuple[int, ...], rows: int, full: int) -> list[int]:
    """Return the sequence dimensions of a tensor."""
    count = len(shape)
    if name in _POSITIONS:
        return [count - 1] if count and shape[-1] == full else []
    is_shared = count == 2 and shape[0] == shape[1] == full != rows
    if "mask" in name and (count >= 3 or is_shared):
        return [dim for dim in (count - 2, count - 1) if shape[dim] == full]
    return [1] if count >= 2 and shape[1] == full else []
