"""The state of an accelerator's random generator."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of the device's default generator (uint8, on the host); None on a CPU."""
    if device.type == "cpu":
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of the device's default generator; do nothing on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state, device)
