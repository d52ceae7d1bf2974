"""One face for cuda, xpu, npu and cpu: nothing outside this folder names a kind of device."""

from hadal.device.accelerator import (
    collective_backend,
    current_device,
    rank_device,
    synchronize,
)
from hadal.device.compiler import spared_import
from hadal.device.kernels import AdamRule, fused_adam_

__all__ = [
    "AdamRule",
    "collective_backend",
    "current_device",
    "fused_adam_",
    "rank_device",
    "spared_import",
    "synchronize",
]
