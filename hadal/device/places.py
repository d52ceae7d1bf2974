"""Parameters that keep their Python identity when their values move between devices."""

from __future__ import annotations

import torch
from torch import Tensor


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
