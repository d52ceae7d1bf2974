"""Curriculum by sequence length (`curriculum_learning`): short sequences first."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hadal.config.data_efficiency import CurriculumLearning
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Setting, Update
from hadal.plugins.data_efficiency.hearing import accepts, listens, positional_names
from hadal.plugins.data_efficiency.pacing import CustomPace, Pacer, pace_rule_of
from hadal.plugins.data_efficiency.truncation import truncate

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
            changed = self._truncated(forward, length)
        self.tokens += changed.tokens * self._readers
        return changed

    def _truncated(self, forward: Forward, length: int) -> Forward:
        named = dict(zip(self._names, forward.args, strict=False))
        rest = tuple(forward.args[len(named) :])
        batch = truncate([named, rest, forward.kwargs], length)
        args = (*batch[0].values(), *batch[1])
        return forward._replace(args=args, kwargs=_with_count(forward.kwargs, batch[2]))

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
