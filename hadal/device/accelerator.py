"""Which device this process computes on, through `torch.accelerator`."""

from __future__ import annotations

import torch
import torch.distributed


def current_device() -> torch.device:
    """The device that this process's tensors live on."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None  # an available accelerator has a kind
        return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def rank_device(local_rank: int) -> torch.device:
    """Make the accelerator number `local_rank` of this host the current one, and return it.

    With fewer accelerators than local ranks the ranks share them, round robin.
    """
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return current_device()


def collective_backend() -> str:
    """The process-group backend for the current device: its own, or gloo on a CPU."""
    kind = current_device().type
    if kind == "cpu":
        return "gloo"
    own = torch.distributed.get_default_backend_for_device(kind)
    # Host tensors travel too (agreements between ranks), and only gloo carries them.
    return f"cpu:gloo,{kind}:{own}"


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
