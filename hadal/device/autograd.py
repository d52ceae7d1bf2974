"""torch's autograd beyond its public names, and leaves that it follows from place to place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

SavedHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The pair of functions that packs a tensor saved by autograd, and unpacks it."""

unwatched = torch._C.DisableTorchFunction
"""A context whose operations are hidden from function modes."""


def backward_watched(root: Tensor, retain_graph: bool) -> None:
    """Run `root.backward(retain_graph=...)` so that function modes see its Python operations.

    torch's own method is itself an operation that a mode may override, so it disables the mode.
    """
    torch.autograd.graph._engine_run_backward(
        (root,),
        (torch.ones_like(root),),
        retain_graph,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def transform_running() -> str | None:
    """Return the kind of the innermost transform of `torch.func` that is running, or None."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return None if transform is None else transform.key().name.lower()


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Call `act` at the end of the backward that is running on this thread.

    It is not called if the backward raises. If `act` raises, so does the backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(act)


def is_in_backward() -> bool:
    """Return True if this thread is running a backward."""
    return graph_task() != -1


def graph_task() -> int:
    """Return the number of the backward running on this thread; a nested one has its own."""
    return int(torch._C._current_graph_task_id())


def is_in_node() -> bool:
    """Return True if this thread is inside an operation of a backward."""
    return torch._C._current_autograd_node() is not None


def will_collect(parameter: Tensor) -> bool:
    """Return True if the current backward will accumulate a gradient in `parameter`, a leaf.

    It does not if gradients are only returned to the caller (`torch.autograd.grad`).
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))


def saved_tensors_hooks_here() -> SavedHooks | None:
    """Return the innermost pair of `saved_tensors_hooks` around the caller.

    torch calls only that pair. A pair entered inside it must call this one itself.
    """
    found: SavedHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def modules_running() -> list[nn.Module]:
    """Return the modules whose calls are running in this thread, innermost first."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


def look_at(parameter: Tensor, values: Tensor) -> None:
    """Point a leaf at other values, on any device: `parameter.data = values`.

    torch does not allow that between the host and an out-of-tree device (PrivateUse1, such as
    Ascend's NPUs). There the implementations of the two Python objects are swapped.
    """
    if parameter.device.type == values.device.type or _may_be_assigned(parameter, values):
        parameter.data = values
        return
    hooks, later_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    other = values.detach().requires_grad_(parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, other)
    # torch keeps hooks in both objects; assigning them registers them in the new implementation.
    if hooks:
        parameter._backward_hooks = hooks
    if later_hooks:
        parameter._post_accumulate_grad_hooks = later_hooks


def number_of_users(values: Tensor) -> int:
    """Return how many tensors use the memory of `values`, including those saved by autograd."""
    with torch._C.DisableTorchFunction():  # not a read that modes should see
        storage = values.untyped_storage()
    # The storage object here counts as one more.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def _may_be_assigned(parameter: Tensor, values: Tensor) -> bool:
    # Tried out, because torch's own query gives wrong answers for such a device.
    probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    try:
        probe.data = values
    except RuntimeError:
        return False
    return True
