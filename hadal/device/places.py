"""Parameters that keep being the objects they are wherever their values lie."""

from __future__ import annotations

import torch
from torch import Tensor


def look_at(parameter: Tensor, values: Tensor) -> None:
    """Let a leaf look at other values, on whichever device: `parameter.data = values`.

    Torch refuses that between the host and a device that has joined it from outside (PrivateUse1,
    as Ascend's NPUs do). What the two Python objects stand for is swapped there.
    """
    if parameter.device.type == values.device.type or _may_be_assigned(parameter, values):
        parameter.data = values
        return
    hooks, later_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    other = values.detach().requires_grad_(parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, other)
    # Torch keeps them on either side; these lines tell its own side of them once more.
    if hooks:
        parameter._backward_hooks = hooks
    if later_hooks:
        parameter._post_accumulate_grad_hooks = later_hooks


def number_of_users(values: Tensor) -> int:
    """How many tensors use the memory of `values`, also that autograd saved."""
    with torch._C.DisableTorchFunction():  # it is no read
        storage = values.untyped_storage()
    # One more is the object that stands for the memory here.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def _may_be_assigned(parameter: Tensor, values: Tensor) -> bool:
    # Not by asking torch: what such a device answers there, assignments do not obey.
    probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    try:
        probe.data = values
    except RuntimeError:
        return False
    return True
