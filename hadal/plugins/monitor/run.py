"""The description of a run that is stored with its scalars."""

from __future__ import annotations

import os
import platform
import socket
import time
from typing import Any

import torch
from torch import nn

from hadal import __version__
from hadal.config import Config
from hadal.device import current_device, total_memory
from hadal.device.inventory import built_with, devices

FORMAT = 1


def describe_run(config: Config, model: nn.Module, ranks: dict[str, int]) -> dict[str, Any]:
    """Return the description as plain JSON values, without secrets.

    Args:
        config: the effective configuration.
        model: the trained model, or this rank's part of it.
        ranks: the number of ranks, and of each kind of parallelism.
    """
    origins = {path: origin for path, origin in config.origins.items() if origin != "default"}
    return {
        "format": FORMAT,
        "time": time.time(),
        "world_size": ranks["world"],
        "ranks": ranks,
        "model": _model(model),
        "versions": {
            "hadal": __version__,
            "torch": str(torch.__version__),
            "built_for": built_with(),
            "python": platform.python_version(),
        },
        "machine": _machine(),
        "config": config.as_public_dict(),
        "origins": origins,
    }


def _model(model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__,
        "tensors": len(parameters),
        "parameters": sum(one.numel() for one in parameters),
        "trained": sum(one.numel() for one in parameters if one.requires_grad),
    }


def _machine() -> dict[str, Any]:
    device = current_device()
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "device": device.type,
        "device_memory": total_memory(device).total,
        "devices": devices(),
    }
