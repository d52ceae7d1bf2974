"""Backward passes under the caller's function modes, and queries about a running one.

Tests: tests/npu/test_device.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SavedHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The pair that packs a tensor which autograd saves, and unpacks it."""

unwatched = torch._C.DisableTorchFunction
"""A context whose operations no function mode sees."""


def backward_watched(root: Tensor, retain_graph: bool) -> None:
    """Run `root.backward(retain_graph=...)` such that function modes see its Python operations.

    torch's own method is an operation that a mode may override, so it runs with the mode disabled.
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


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Call `act` at the end of the backward that runs now on this thread.

    It is not called if the backward raises. The backward raises what `act` raises.
    """
    torch.autograd.Variable._execution_engine.queue_callback(act)


def is_in_backward() -> bool:
    """Return whether this thread runs a backward."""
    return graph_task() != -1


def graph_task() -> int:
    """Return the number of the backward that this thread runs; a nested one has its own."""
    return int(torch._C._current_graph_task_id())


def is_in_node() -> bool:
    """Return whether this thread runs an operation of a backward, perhaps with one nested in it."""
    return torch._C._current_autograd_node() is not None


def will_collect(parameter: Tensor) -> bool:
    """Return whether the current backward will accumulate a gradient in `parameter`, a leaf.

    False if gradients are only returned to the caller (`torch.autograd.grad`).
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))


def saved_tensors_hooks_here() -> SavedHooks | None:
    """Return the innermost pair of `saved_tensors_hooks` around the caller, which autograd calls.

    torch calls no other pair: one that is entered inside calls this one itself.
    """
    found: SavedHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found
