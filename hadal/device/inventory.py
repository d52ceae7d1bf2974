"""Readable descriptions of this machine's devices and of torch's capabilities."""

from __future__ import annotations

import importlib.util
import re
import shutil
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
