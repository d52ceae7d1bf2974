"""Small functions over nested tensors, memory and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hadal.compat.log import log_dist
from hadal.device import current_device, memory_use


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy nested tensors so that each owns its memory and no more: a view would save its bucket.

    What is no list, tuple or dict is taken over as it is.
    """
    return _mapped(item, lambda tensor: tensor.detach().to(device, copy=True))


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Move nested tensors to a device, or only those of which `criterion_func` is true."""
    if criterion_func is None:
        return _mapped(item, lambda tensor: tensor.to(device))
    return _mapped(item, lambda tensor: tensor.to(device) if criterion_func(tensor) else tensor)


def _mapped(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, Mapping):
        made = {key: _mapped(value, change) for key, value in item.items()}
        return made if type(item) is dict else type(item)(made)  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        parts = [_mapped(value, change) for value in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log how much memory is in use, with a message; only where `force` is true."""
    if force:
        log_dist(f"{message}: {memory_use(current_device())}")


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
