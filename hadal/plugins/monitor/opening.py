"""The table of monitors, which section opens which writer; and the run that they describe."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hadal import __version__
from hadal.config import Config
from hadal.device import current_device, total_memory
from hadal.device.inventory import built_with, devices
from hadal.errors import MonitorError
from hadal.plugins.monitor.files import CsvWriter, JsonlWriter
from hadal.plugins.monitor.monitor import Writer
from hadal.plugins.monitor.services import (
    CometWriter,
    TensorBoardWriter,
    WandbWriter,
    expect_package,
)

FORMAT = 1
# Their versions are part of the description if the program has imported them.
_LIBRARIES = ("transformers", "accelerate", "lightning", "trl", "peft", "diffusers", "datasets")


def describe_run(
    config: Config, model: nn.Module, ranks: dict[str, int], hosts: Sequence[str]
) -> dict[str, Any]:
    """Return the description as plain JSON values, without secrets.

    Args:
        config: the effective configuration.
        model: the trained model, or this rank's part of it.
        ranks: the number of ranks, and of each kind of parallelism.
        hosts: each rank's host.
    """
    origins = {path: origin for path, origin in config.origins.items() if origin != "default"}
    return {
        "format": FORMAT,
        "time": time.time(),
        "world_size": ranks["world"],
        "ranks": ranks,
        "hosts": Counter(hosts),
        "command": shlex.join(sys.orig_argv),
        "directory": os.getcwd(),
        "commit": _commit(),
        "model": _model(model),
        "versions": {
            "hadal": __version__,
            "torch": str(torch.__version__),
            "built_for": built_with(),
            "python": platform.python_version(),
            **{
                name: str(getattr(sys.modules[name], "__version__", "of unknown version"))
                for name in _LIBRARIES
                if name in sys.modules
            },
        },
        "machine": _machine(),
        "config": config.as_public_dict(),
        "origins": origins,
    }


def _commit() -> str | None:
    """Return the commit of the program's repository, with `-dirty` if files have changed since.

    None if the program is in none, or git is missing or takes too long.
    """
    program = Path(sys.argv[0]) if sys.argv else Path()
    folder = program.parent if program.is_file() else Path()
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        run = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


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


WRITERS: Mapping[str, Callable[[Any, Mapping[str, Any]], Writer]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "csv_monitor": CsvWriter,
    "comet": CometWriter,
    "jsonl_monitor": JsonlWriter,
}
"""Factories by section, in order of writing. Each takes the section and a description of the run,
which may be empty."""


def sections_on(config: Config) -> tuple[str, ...]:
    """Return the monitors that a configuration enables.

    Return none while the autotuner measures: scalars of experiments would mix with training's.
    """
    if config.autotuning.enabled:
        return ()
    return tuple(name for name in WRITERS if getattr(config, name).enabled)


def expect_packages(config: Config) -> None:
    """Import the packages that the monitors of a configuration need.

    Raises:
        MissingPackageError: one cannot be imported.
    """
    for name in sections_on(config):
        expect_package(name)


def open_writers(config: Config, run: Mapping[str, Any]) -> tuple[Writer, ...]:
    """Open the monitors of a configuration; `run` is the description that they store.

    Raises:
        MonitorError: a directory cannot be written, or a service refuses.
    """
    return tuple(_opened(name, getattr(config, name), run) for name in sections_on(config))


def _opened(name: str, section: Any, run: Mapping[str, Any]) -> Writer:
    try:
        return WRITERS[name](section, run)
    except MonitorError:
        raise
    except OSError as error:
        path = getattr(section, "output_path", None)
        if path is None:
            raise MonitorError(f"{name} cannot be started: {error}") from error
        raise MonitorError(
            f"{name} cannot write: {error}; set {name}.output_path to a directory that rank 0"
            f" can write to (it is {path!r})"
        ) from error
    except Exception as error:  # any exception of a service's package
        raise MonitorError(
            f"{name} cannot be started: {type(error).__name__}: {error}; fix that, or set"
            f" {name}.enabled to false"
        ) from error
