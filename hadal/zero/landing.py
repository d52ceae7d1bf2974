"""The mean gradient of one bucket in host memory, for an update on the host.

Tests: tests/zero/test_gradients.py
"""

from __future__ import annotations

from torch import Tensor

from hadal.device import Event
from hadal.offload.crossing import Crossing, Upload
from hadal.zero.bucket import Bucket
from hadal.zero.offload import Offload


class HostMean:
    """The host memory for a mean that leaves the device, and its copies under way."""

    def __init__(self, offload: Offload, crossing: Crossing) -> None:
        self.values: Tensor | None = None
        """The last mean that has left the device, once `wait` has returned."""
        self._offload = offload
        self._crossing = crossing
        self._under_way: Event | None = None
        self._coming: Upload | None = None

    @classmethod
    def of(cls, bucket: Bucket) -> HostMean | None:
        """Return the bucket's; None if updates are made in the device's memory."""
        offload, device = bucket.offload, bucket.device
        crossing = offload.crossing(device) if offload.lands_off(device) else None
        return None if crossing is None else cls(offload, crossing)

    def land(self, mean: Tensor) -> Tensor:
        """Begin to copy `mean` to the host; return its destination."""
        if self.values is None:
            self.values = self._offload.gradient_memory(mean.numel(), mean.dtype)
        self._under_way = self._crossing.land(mean, self.values, after=self._under_way)
        return self.values

    def wait(self) -> None:
        """Wait until the mean has arrived: the host may read and write it then."""
        if self._under_way is not None:
            self._under_way.wait_on_host()
            self._under_way = None

    def bring_into(self, out: Tensor) -> None:
        """Begin to copy the mean back to the device."""
        assert self.values is not None  # it has landed before
        self._coming = self._crossing.bring(self.values, out, after=self._under_way)
        self._under_way = self._coming.event

    def let_device_wait(self) -> None:
        """Make the device's next work wait for the values that come back."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
