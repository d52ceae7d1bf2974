"""Backward passes under the caller's function modes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

unwatched = torch._C.DisableTorchFunction
"""A context whose operations no function mode sees."""


def backward_watched(root: Tensor, retain_graph: bool) -> None:
    """As `root.backward(retain_graph=...)`, but function modes see what Python does meanwhile.

    Torch's own method is an operation that modes may take over: it runs with the mode taken off.
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
    """Call `act` when the backward that runs now, and has called this, is through.

    Not called where it raises. What `act` raises, it raises.
    """
    torch.autograd.Variable._execution_engine.queue_callback(act)


def is_in_backward() -> bool:
    """Whether this thread runs a backward."""
    return graph_task() != -1


def graph_task() -> int:
    """The number of the backward that this thread runs: one inside another has its own."""
    return int(torch._C._current_graph_task_id())


def is_in_node() -> bool:
    """Whether this thread runs an operation of a backward: a second backward may run in it."""
    return torch._C._current_autograd_node() is not None


def will_collect(parameter: Tensor) -> bool:
    """Whether the backward that runs now will bring the parameter, a leaf, a gradient.

    Not so where gradients are only computed for somebody (`torch.autograd.grad`).
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))
