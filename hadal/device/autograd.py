"""Backward passes under the caller's function modes."""

from __future__ import annotations

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
