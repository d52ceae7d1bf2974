"""Copies of small tensors between an accelerator and the host, at once or asynchronously."""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.device.streams import WITHOUT_STREAMS, Event
from hadal.device.waits import waiting_for


def read_on_host(tensor: Tensor, what: str) -> Tensor:
    """Return the values of a tensor in host memory, waiting for them.

    On an accelerator the host waits for everything queued before; `what` names the values ("the
    norm of the gradients") in the report of a wait that takes too long. A tensor in host memory is
    returned unchanged.
    """
    if tensor.device.type == "cpu":
        return tensor.detach()
    with waiting_for(what):
        return tensor.detach().cpu()


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor of the host on a device, without a wait of the host.

    torch keeps the pinned copy until the device has read it.
    """
    if device.type in WITHOUT_STREAMS:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor's values to host memory that is under way."""

    __slots__ = ("_event", "_values", "_what")

    def __init__(self, values: Tensor, event: Event, what: str) -> None:
        self._values = values
        self._event = event
        self._what = what

    @property
    def is_over(self) -> bool:
        """True if the values have arrived, so that `values` does not wait."""
        return self._event.is_over

    def values(self) -> Tensor:
        """Return the values in host memory, as they were when the copy was started."""
        self._event.wait_on_host(self._what)
        return self._values


def start_reading(tensor: Tensor, what: str) -> HostCopy:
    """Start copying a small tensor to pinned host memory, after the work queued on its device.

    The host does not wait, and later changes of the tensor have no effect. `what` names the values
    in the report of a wait that takes too long.
    """
    if tensor.device.type in WITHOUT_STREAMS:
        return HostCopy(read_on_host(tensor, what).clone(), Event(), what)
    values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    values.copy_(tensor.detach(), non_blocking=True)
    return HostCopy(values, Event.on(tensor.device), what)
