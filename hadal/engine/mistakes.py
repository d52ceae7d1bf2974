"""Messages for mistakes that show up as an error of torch or Python, with the cause and the fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hadal.errors import MissingAttributeError

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
    given = {tensor.dtype for tensor in _floats((args, kwargs))}
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


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        yield from _floats(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
