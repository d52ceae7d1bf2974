"""Installs DeepSpeed into its own virtual environment, so Hadal's stays clean."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TORCH_VERSION = "2.13.0"
DEEPSPEED_VERSION = "0.19.8"
DEFAULT_ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-deepspeed"

_BUILD_TOOLS = ("setuptools", "wheel", "ninja", "packaging", "psutil", "py-cpuinfo", "numpy")


def environment_python(directory: Path) -> Path:
    """The interpreter of the virtual environment in ``directory``."""
    return directory / "bin" / "python"


def deepspeed_variables(directory: Path) -> dict[str, str]:
    """Environment variables under which DeepSpeed runs on the CPU from ``directory``.

    Its just-in-time built operators are kept inside the environment, and the environment's
    ``ninja`` is found first.
    """
    binaries = str((directory / "bin").absolute())
    return {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str((directory / "torch_extensions").absolute()),
        "PATH": os.pathsep.join((binaries, os.environ.get("PATH", ""))),
    }


def is_installed(directory: Path) -> bool:
    """True if ``directory`` is an environment with DeepSpeed."""
    return bool(list(directory.glob("lib/python*/site-packages/deepspeed/__init__.py")))


def _pip(directory: Path, *arguments: str, variables: dict[str, str] | None = None) -> None:
    command = [str(environment_python(directory)), "-m", "pip", "install", *arguments]
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True, env={**os.environ, **(variables or {})})


def _torch_version(directory: Path) -> str:
    command = [str(environment_python(directory)), "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def install_deepspeed(directory: Path) -> None:
    """Create the environment in ``directory`` and install torch, then DeepSpeed, into it.

    Raises ``RuntimeError`` if DeepSpeed's installation changed the torch version.
    """
    if not environment_python(directory).exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    _pip(directory, f"torch=={TORCH_VERSION}", *_BUILD_TOOLS)
    # DeepSpeed's setup imports torch, hence no build isolation; no operator is built ahead.
    _pip(
        directory,
        "--no-build-isolation",
        f"deepspeed=={DEEPSPEED_VERSION}",
        variables={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
    )
    version = _torch_version(directory)
    if version.split("+")[0] != TORCH_VERSION:
        raise RuntimeError(f"torch is {version} after installing DeepSpeed, not {TORCH_VERSION}")
    print(f"DeepSpeed {DEEPSPEED_VERSION} is installed in {directory}, torch is {version}")
