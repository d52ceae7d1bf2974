"""The test device's C++, compiled once for each release of torch and state of its files."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
PARTS = ("device", "hccl")
NAME = "_npu"
WRITTEN_FOR = "2.13."  # another release of torch may have other headers


def lacking() -> str:
    """The tools that are missing to compile it; empty if none are."""
    if sys.platform != "linux":
        return "the test device is written for Linux"
    if shutil.which("g++") is None:
        return "g++ is not installed: the test device cannot be compiled"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python.h is not installed: the test device cannot be compiled"
    if not torch.distributed.is_gloo_available():
        return "this torch has no gloo"
    return ""


def built() -> Path:
    """The compiled module's file; whoever comes meanwhile waits for it."""
    told = [torch.__version__, sys.version, *(path.read_text() for path in _sources())]
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"hadal_test_device_{os.getuid()}", key)
    made = folder / f"{NAME}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _compile(folder, made)
    return made


def loaded() -> ModuleType:
    """The module; importing it joins the device to torch, in this process and for good."""
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sources() -> list[Path]:
    return sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])


def _compile(folder: Path, made: Path) -> None:
    home = Path(torch.__file__).parent
    places = [
        home / "include",
        home / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    ]
    words = ["g++", "-std=c++20", "-O1", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}"]
    words += ["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", *(f"-I{place}" for place in places)]
    running = [
        subprocess.Popen(
            [*words, "-c", str(HERE / f"{part}.cpp"), "-o", str(folder / f"{part}.o")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in PARTS
    ]
    for process in running:
        _, told = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the test device does not compile:\n{told[:4000]}")
    half = folder / f"{NAME}.half"
    objects = [str(folder / f"{part}.o") for part in PARTS]
    libraries = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    subprocess.run(["g++", "-shared", *objects, "-o", str(half), *libraries], check=True)
    half.replace(made)
    for path in objects:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    print(built())
