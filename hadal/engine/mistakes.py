"""Mistakes of programs: errors of torch and Python explained, and what trains nothing reported."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hadal.engine.state import State
from hadal.errors import MissingAttributeError, UsageError
from hadal.listener import Forward, Listener, Update

_log = logging.getLogger(__name__)

# Methods that another kind of engine has.
_PIPELINE = (
    "belongs to pipeline engines, which initialize returns for a hadal.pipeline.PipelineModule."
    " With this model call engine(batch),"
)
_ELSEWHERE = {
    "train_batch": f"{_PIPELINE} engine.backward(loss) and engine.step() for each micro-batch",
    "eval_batch": f"{_PIPELINE} after engine.eval() and inside torch.no_grad()",
}
# torch's message if a backward needs what an earlier one has freed.
_USED_UP = "backward through the graph a second time"
# Parts of torch's messages if an operation gets two dtypes.
_ABOUT_DTYPES = ("dtype", "scalar type", "Input type", "input type")
# Further backwards before `engine.step` that a program with several losses may run.
_SPARE_BACKWARDS = 8


def missing_attribute(name: str, engine: nn.Module, module: nn.Module) -> AttributeError:
    """Return the error for an attribute that neither an engine nor its module has."""
    if name in _ELSEWHERE:
        # Without a similar name that Python's traceback would suggest.
        found = MissingAttributeError(f"engine.{name} {_ELSEWHERE[name]}")
        found.name, found.obj = name, None
        return found
    kind = type(module).__name__
    message = f"neither the engine nor its module ({kind}) has an attribute {name!r}"
    return AttributeError(message, name=name, obj=engine)


def used_up_graph(message: str) -> str | None:
    """Return the message for a second backward through a graph; None for another error of torch."""
    if _USED_UP not in message:
        return None
    return (
        "the graph of this loss was used up by an earlier backward, which freed it. Run the"
        " forward again for each backward, or give the earlier one retain_graph=True. If the loss"
        " contains values of an earlier micro-batch (a hidden state, a sum of losses), detach()"
        " those"
    )


def mixed_dtypes(
    message: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], module: nn.Module
) -> str | None:
    """Return the message for inputs of another dtype than the weights; None for another error.

    Args:
        message: torch's.
        args, kwargs: inputs of the forward that failed.
        module: the model.
    """
    if not any(part in message for part in _ABOUT_DTYPES):
        return None
    weights = {p.dtype for p in module.parameters() if p.is_floating_point()}
    given = {tensor.dtype for tensor in _tensors((args, kwargs)) if tensor.is_floating_point()}
    if not weights or not given - weights:
        return None
    wanted = ", ".join(sorted(_name(dtype) for dtype in weights))
    found = ", ".join(sorted(_name(dtype) for dtype in given - weights))
    hint = _name(min(weights, key=lambda dtype: dtype.itemsize))
    more = ""
    if weights & {torch.float16, torch.bfloat16}:
        more = ', or configure "torch_autocast": {"enabled": true} in place of 16-bit weights'
    if torch.float16 in weights:
        more += ' (for fp16 "fp16": {"auto_cast": true} casts inputs)'
    return (
        f"the model's weights are {wanted} and its inputs {found} ({message}). Cast the inputs, for"
        f" example x.to(torch.{hint}){more}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FirstUpdate(Listener):
    """Watcher of an engine until its first update.

    It compares the first batch in training with the configured micro-batch, counts backwards that
    no `engine.step` follows, and looks for gradients that the update ignores or that never arrived.
    """

    name = "_first_update"

    def __init__(self, state: State) -> None:
        self._state = state
        self._backwards = 0
        self._has_compared = False
        self._first: Update | None = None
        _watching.add(self)

    def before_forward(self, forward: Forward) -> None:
        """Compare the size of the first batch."""
        if self._has_compared or not forward.is_training or not torch.is_grad_enabled():
            return
        self._has_compared = True
        if any(one.name == "dynamic_batching" for one in self._state.listeners):
            return  # batch sizes count packs of samples
        micro = self._state.batches.micro
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
        if self._backwards == 2 * self._state.batches.accumulation + _SPARE_BACKWARDS:
            self.report()
            _watching.discard(self)

    def before_update(self, gradients: Mapping[str, Tensor]) -> None:
        """Expect that the program has set no gradient.

        Raises:
            UsageError: a parameter has one, which the update would ignore.
        """
        buckets = self._state.parts.runtime.bucket_of
        for name, parameter in self._state.parts.model.named_parameters():
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
        self._state.listeners.remove(self)
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
        if self._backwards and not self._state.micro_steps:
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


def batch_size(values: Any, expected: int) -> int:
    """Return the samples of a batch: dimension 0 of its tensors, also in lists and mappings.

    Returns `expected` if dimension 0 may be something else: the tensors differ in it, one has
    `expected` as dimension 1, or none has a dimension 1.
    """
    tensors = (tensor for tensor in _tensors(values) if not tensor.is_nested)  # they have shapes
    shapes = [tensor.shape for tensor in tensors if tensor.dim()]
    sizes = {shape[0] for shape in shapes}
    seconds = {shape[1] for shape in shapes if len(shape) > 1}
    return expected if len(sizes) != 1 or not seconds or expected in seconds else sizes.pop()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
