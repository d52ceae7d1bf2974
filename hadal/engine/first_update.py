"""Mistakes that train nothing, or count wrong: reported during an engine's first update."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hadal.engine.batches import BatchSizes
from hadal.engine.listeners import Listeners
from hadal.engine.parts import Counters, Parts
from hadal.errors import UsageError
from hadal.listener import Forward, Listener, Update

_log = logging.getLogger(__name__)

# Further backwards before `engine.step` that a program with several losses may run.
_SPARE_BACKWARDS = 8


class FirstUpdate(Listener):
    """Watcher of an engine until its first update.

    It compares the first batch in training with the configured micro-batch, counts backwards that
    no `engine.step` follows, and looks for gradients that the update ignores or that never arrived.
    """

    name = "_first_update"

    def __init__(
        self, listeners: Listeners, batches: BatchSizes, counters: Counters, parts: Parts
    ) -> None:
        self._listeners = listeners
        self._parts = parts
        self._batches = batches
        self._counters = counters
        self._backwards = 0
        self._has_compared = False
        self._first: Update | None = None
        _watching.add(self)

    def before_forward(self, forward: Forward) -> None:
        """Compare the size of the first batch."""
        if self._has_compared or not forward.is_training or not torch.is_grad_enabled():
            return
        self._has_compared = True
        if any(one.name == "dynamic_batching" for one in self._listeners):
            return  # batch sizes count packs of samples
        micro = self._batches.micro
        found = batch_size((*forward.args, *forward.kwargs.values()), micro)
        # Pairs of a chosen and a rejected sample come as one batch of twice the size, and Lightning
        # does not know the size. Other multiples are as likely meant.
        if found % micro:
            _log.warning(
                "the first batch has %d samples (dimension 0 of the model's inputs), but"
                " train_micro_batch_size_per_gpu is %d: global_samples and samples per second count"
                " %d for each batch. Gradients use the batch as it is",
                found,
                micro,
                micro,
            )

    def after_backward(self, loss: Tensor | None) -> None:
        """Count a backward; report once that the step is missing."""
        self._backwards += 1
        if self._backwards == 2 * self._batches.accumulation + _SPARE_BACKWARDS:
            self.report()
            _watching.discard(self)

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        """Expect that the program has set no gradient.

        Raises:
            UsageError: a parameter has one, which the update would ignore.
        """
        buckets = self._parts.runtime.bucket_of
        for name, parameter in self._parts.model.named_parameters():
            bucket = buckets.get(parameter)
            if bucket is not None and bucket.trainable and parameter.grad is not None:
                raise UsageError(
                    f"{name}.grad was set between engine.backward and engine.step, which ignores"
                    " it: gradients are in buckets. Use"
                    " hadal.utils.safe_set_full_grad(parameter, value), and safe_get_full_grad to"
                    " read one"
                )

    def after_update(self, update: Update) -> None:
        """Leave the engine once the norm of the first update is known."""
        _watching.discard(self)
        first = self._first = self._first or update
        if not first.is_known:
            return
        self._listeners.remove(self)
        if first.norm == 0.0 and not first.skipped:
            _log.warning(
                "all gradients of the first update are 0 on all ranks, so it trained nothing. Was"
                " the loss computed from the output of this engine's model, and not detached?"
            )

    def close(self) -> None:
        """Stop watching, and report now what the end of the program would."""
        if self in _watching and sys.exc_info()[0] is None:
            self.report()
        _watching.discard(self)

    def report(self) -> None:
        """Report unused gradients, if no step was called at all."""
        if self._backwards and not self._counters.micro_steps:
            _log.warning(
                "engine.step() was never called: gradients of %d backward passes were not used, no"
                " weight was updated. Call engine.step() after each engine.backward(loss); it"
                " updates the weights at the end of each accumulation",
                self._backwards,
            )


_watching: WeakSet[FirstUpdate] = WeakSet()


@atexit.register
def _report_at_exit() -> None:
    if not hasattr(sys, "last_type"):  # an error that ended the program is report enough
        for each in tuple(_watching):
            each.report()


def batch_size(values: Iterable[Any], expected: int) -> int:
    """Return the samples of a batch: dimension 0 of its tensors, also in lists and mappings.

    Returns `expected` if dimension 0 may be something else: the tensors differ in it, one has
    `expected` as dimension 1, or none has a dimension 1.
    """
    shapes = [tensor.shape for tensor in _tensors(values) if tensor.dim()]
    sizes = {shape[0] for shape in shapes}
    seconds = {shape[1] for shape in shapes if len(shape) > 1}
    return expected if len(sizes) != 1 or not seconds or expected in seconds else sizes.pop()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_nested:  # it has no shape
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
