"""Peak operations per second of a device."""

from __future__ import annotations

import time

import torch

# Peak operations per second of dense matrix products in 16 bits, and in fp32 as torch runs them by
# default, from the vendors' data sheets. An MI250X counts as two devices.
_PEAKS: dict[str, tuple[float, float]] = {
    "H200": (989e12, 67e12),
    "H100 NVL": (835e12, 60e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "H800": (989e12, 67e12),
    "GH200": (989e12, 67e12),
    "B200": (2250e12, 80e12),
    "GB200": (2500e12, 80e12),
    "B300": (2250e12, 76e12),
    "GB300": (2500e12, 80e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "A10": (125e12, 31.2e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "MI300X": (1307e12, 163.4e12),
    "MI325X": (1307e12, 163.4e12),
    "MI250X": (191.5e12, 23.9e12),
}
_SIDE = 768
_measured: dict[torch.dtype, float] = {}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a device's peak operations per second in matrix products of `dtype`, or None.

    Accelerators are looked up by name. A CPU is measured once, with this process's threads.
    """
    if device.type == "cpu":
        return _measured_on_host(dtype)
    kind = torch.get_device_module(device)
    if not hasattr(kind, "get_device_name"):
        return None
    column = 0 if dtype.itemsize == 2 else 1
    return peak_of_name(kind.get_device_name(device))[column]


def peak_of_name(name: str) -> tuple[float, float] | tuple[None, None]:
    """Return the 16-bit and fp32 peaks of a device from its name; the longest match counts."""
    words = f" {name.replace('-', ' ')} "
    found = [known for known in _PEAKS if f" {known} " in words]
    return _PEAKS[max(found, key=len)] if found else (None, None)


def _measured_on_host(dtype: torch.dtype) -> float:
    if dtype not in _measured:
        left = torch.ones(_SIDE, _SIDE, dtype=dtype)
        spent = []
        for _ in range(6):
            start = time.perf_counter()
            torch.mm(left, left)
            spent.append(time.perf_counter() - start)
        _measured[dtype] = 2 * _SIDE**3 / min(spent)
    return _measured[dtype]
