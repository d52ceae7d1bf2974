"""Values of an accelerator, read on the host: at once, or started now and taken later."""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.device.streams import WITHOUT_STREAMS, Event
from hadal.device.waits import waiting_for


def read_on_host(tensor: Tensor, what: str) -> Tensor:
    """The values of a tensor in host memory, where the host must have them now.

    On an accelerator the host waits for everything queued before; `what` names the values ("the
    norm of the gradients") if that takes too long. A tensor in host memory is returned as it is.
    """
    if tensor.device.type == "cpu":
        return tensor.detach()
    with waiting_for(what):
        return tensor.detach().cpu()


class Reading:
    """Values of a tensor on their way to host memory, for whoever takes them later."""

    __slots__ = ("_event", "_values", "_what")

    def __init__(self, values: Tensor, event: Event, what: str) -> None:
        self._values = values
        self._event = event
        self._what = what

    @property
    def is_over(self) -> bool:
        """Whether the values are in host memory: `values` does not wait then."""
        return self._event.is_over

    def values(self) -> Tensor:
        """The values in host memory, as they were when the reading was started."""
        self._event.wait_on_host(self._what)
        return self._values


def start_reading(tensor: Tensor, what: str) -> Reading:
    """Begin to copy a small tensor to pinned host memory, behind what its device has queued.

    The host goes on; later changes of the tensor are not seen. `what` names the values if the wait
    for them takes too long.
    """
    if tensor.device.type in WITHOUT_STREAMS:
        return Reading(read_on_host(tensor, what).clone(), Event(), what)
    values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    values.copy_(tensor.detach(), non_blocking=True)
    stream = torch.accelerator.current_stream(tensor.device)
    return Reading(values, Event(stream.record_event(), tensor.device), what)
