"""One face for cuda, xpu, npu and cpu: nothing outside this folder names a kind of device."""

from hadal.device.accelerator import (
    collective_backend,
    current_device,
    rank_device,
    synchronize,
)
from hadal.device.compiler import spared_import
from hadal.device.kernels import (
    AdagradRule,
    AdamRule,
    SgdRule,
    fused_adagrad_,
    fused_adam_,
    fused_sgd_,
    has_fused_kernels,
)

__all__ = [
    "AdagradRule",
    "AdamRule",
    "SgdRule",
    "collective_backend",
    "current_device",
    "fused_adagrad_",
    "fused_adam_",
    "fused_sgd_",
    "has_fused_kernels",
    "rank_device",
    "spared_import",
    "synchronize",
]
