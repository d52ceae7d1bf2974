"""What this machine has to compute and talk with, as words for people."""

from __future__ import annotations

import importlib.util
import shutil

import torch
import torch.distributed as dist

from hadal.device.accelerator import current_device
from hadal.device.kernels import has_fused_kernels


def devices() -> list[str]:
    """Each accelerator's name and memory."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.get_device_module(current_device())
    found = []
    for index in range(torch.accelerator.device_count()):
        told = kind.get_device_properties(index) if hasattr(kind, "get_device_properties") else None
        name = getattr(told, "name", current_device().type)
        memory = getattr(told, "total_memory", None)
        found.append(name if memory is None else f"{name}, {memory / 1e9:.1f} GB")
    return found


def backends() -> list[str]:
    """The process-group backends that this torch has been built with."""
    if not dist.is_available():
        return []
    return [
        name for name in ("gloo", "nccl", "xccl", "mpi", "ucc") if dist.is_backend_available(name)
    ]


def built_with() -> str:
    """What this torch has been built for."""
    told = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": getattr(torch.version, "xpu", None),
    }
    found = [f"{name} {version}" for name, version in told.items() if version]
    return ", ".join(found) or "CPU only"


def lacks_fused_kernels() -> str:
    """Why optimizers run without torch's fused kernels; empty where they run with them."""
    device = current_device()
    return "" if has_fused_kernels(device) else f"torch has none for {device.type}"


def lacks_compiler() -> str:
    """Why `engine.compile` cannot work here; empty where nothing is seen to stand against it."""
    if current_device().type == "cpu":
        found = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
        return "" if found else "torch needs a C++ compiler for CPUs: install g++"
    found = importlib.util.find_spec("triton") is not None
    return "" if found else "triton is not installed: pip install triton"
