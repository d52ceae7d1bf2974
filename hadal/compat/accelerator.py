"""`get_accelerator()`: the present device under the methods that programs call."""

from __future__ import annotations

from functools import cache

import torch

from hadal.device import collective_backend, current_device, memory_use, synchronize


class Accelerator:
    """The device that this process computes on."""

    def is_available(self) -> bool:
        """Whether it can be used; a CPU can."""
        return True

    def device_name(self, device_index: int | str | None = None) -> str:
        """Its kind, or with an index the name of one device of that kind."""
        kind = current_device().type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device(self) -> int:
        """The number of this process's device; 0 on a CPU."""
        return current_device().index or 0

    def current_device_name(self) -> str:
        """The name of this process's device: `cuda:0`, `cpu`."""
        return str(current_device())

    def device(self, device_index: int | None = None) -> torch.device:
        """A device of this kind; by default this process's own."""
        return (
            current_device()
            if device_index is None
            else torch.device(self.device_name(device_index))
        )

    def set_device(self, device_index: int) -> None:
        """Choose this process's device."""
        if current_device().type != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """How many devices there are; the CPUs of a host are one."""
        return max(1, torch.accelerator.device_count())

    def communication_backend_name(self) -> str:
        """The process-group backend for tensors on this device."""
        return collective_backend().rpartition(":")[2]

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all work queued on a device."""
        synchronize(self.device(device_index))

    def empty_cache(self) -> None:
        """Give back memory that nobody uses."""
        if current_device().type != "cpu":
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that torch's tensors hold on a device; on a CPU, those of this process."""
        used = memory_use(self.device(device_index))
        return used.device or used.host

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that `memory_allocated` has been on an accelerator; on a CPU, what it is now."""
        used = memory_use(self.device(device_index))
        return used.device_peak or used.host


@cache
def get_accelerator() -> Accelerator:
    """The one object."""
    return Accelerator()
