"""Descriptions of this machine's devices, with their peak rates, and of torch's capabilities."""

from __future__ import annotations

import importlib.util
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hadal.device.accelerator import current_device
from hadal.device.kernels import has_fused_kernels

_NVIDIA, _AMD = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")


def devices() -> list[str]:
    """Return each accelerator's name and memory."""
    found = []
    for properties in _properties():
        name = getattr(properties, "name", current_device().type)
        memory = getattr(properties, "total_memory", None)
        found.append(name if memory is None else f"{name}, {memory / 1e9:.1f} GB")
    return found


def memories() -> list[int]:
    """Return the bytes of memory of each accelerator for which torch knows them."""
    found = (getattr(properties, "total_memory", None) for properties in _properties())
    return [nbytes for nbytes in found if nbytes]


def _properties() -> list[Any]:
    """Return each accelerator's properties; None for one whose properties torch does not know."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.get_device_module(current_device())
    known = getattr(kind, "get_device_properties", lambda _: None)
    return [known(index) for index in range(torch.accelerator.device_count())]


def backends() -> list[str]:
    """Return the process-group backends that this torch was built with."""
    if not dist.is_available():
        return []
    return [
        name for name in ("gloo", "nccl", "xccl", "mpi", "ucc") if dist.is_backend_available(name)
    ]


def libraries() -> dict[str, str]:
    """Return the known versions of the accelerator's libraries and driver."""
    found: dict[str, str] = {}
    if torch.version.cuda and torch.backends.cudnn.is_available():
        found["cuDNN"] = str(torch.backends.cudnn.version())
    if torch.version.cuda and dist.is_available() and dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _text_of(_NVIDIA)) or re.search(
        r"([\d.]+)", _text_of(_AMD)
    )
    if driver is not None:
        found["driver"] = driver[1]
    return found


def _text_of(path: Path) -> str:
    """Return the text of a system file, or "" if it does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""


def built_with() -> str:
    """Return the platforms that this torch was built for."""
    versions = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": getattr(torch.version, "xpu", None),
    }
    found = [f"{name} {version}" for name, version in versions.items() if version]
    return ", ".join(found) or "CPU only"


def lacks_fused_kernels() -> str:
    """Return why optimizers run without torch's fused kernels, or "" if they use them."""
    device = current_device()
    return "" if has_fused_kernels(device) else f"torch has none for {device.type}"


def lacks_compiler() -> str:
    """Return why `engine.compile` cannot work here, or "" if no obstacle is known."""
    if current_device().type == "cpu":
        found = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
        return "" if found else "torch needs a C++ compiler for CPUs: install g++"
    found = importlib.util.find_spec("triton") is not None
    return "" if found else "triton is not installed: pip install triton"


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
    "A10G": (70e12, 35e12),
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
