"""`hadal report`: versions, devices, what is available here, and why something is not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from pathlib import Path

from hadal import __version__

_LIBRARIES = ("transformers", "accelerate", "peft", "trl", "lightning", "safetensors", "pydantic")
_STARTERS = {"ssh": "ssh", "slurm": "srun", "MPI": "mpirun", "pdsh": "pdsh"}

Section = dict[str, str]


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "report", help="show versions, devices, and what is available here and what is not"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Show it."""
    sections = {
        "versions": versions(),
        "machine": machine(),
        "available": {what: why or "yes" for what, why in lacking().items()},
    }
    if parsed.json:
        print(json.dumps(sections, indent=2))
        return 0
    width = max(len(name) for section in sections.values() for name in section)
    for title, section in sections.items():
        print(title)
        for name, told in section.items():
            print(f"  {name:<{width}}  {told}")
    return 0


def versions() -> Section:
    """What is installed."""
    import torch

    from hadal.device.inventory import built_with

    told = {
        "hadal": f"{__version__}, {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()}, {sys.executable}",
        "torch": f"{torch.__version__}, built for {built_with()}",
        "import deepspeed": deepspeed(),
    }
    return told | {name: _version(name) or "not installed" for name in _LIBRARIES}


def deepspeed() -> str:
    """Where `import deepspeed` leads."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return "nothing; `hadal run --as-deepspeed` or compat/deepspeed-stub lead it to Hadal"
    if Path(spec.origin).with_name("_led_to_hadal.py").exists():
        return f"leads to Hadal, as {_version('deepspeed')}"
    return f"DeepSpeed itself, {_version('deepspeed')}, {spec.origin}"


def machine() -> Section:
    """What it computes with."""
    from hadal.device.inventory import backends, devices

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = devices()
    told = {
        "system": platform.platform(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{memory / 1e9:.1f} GB",
        "process groups": ", ".join(backends()) or "none",
        "accelerators": str(len(found)),
    }
    return told | {f"accelerator {number}": each for number, each in enumerate(found)}


def lacking() -> Section:
    """What is not available, and why; empty texts for what is."""
    from hadal.comm.cross_memory import system
    from hadal.device.inventory import lacks_compiler, lacks_fused_kernels

    told = {
        "fused optimizers": lacks_fused_kernels(),
        "torch.compile": lacks_compiler(),
        "memory of neighbours": ""
        if system() is not None
        else "this system has no cross-memory attach: gloo's sends are taken",
        "hadal plot-schedule": _missing("matplotlib", "pip install matplotlib"),
    }
    for launcher, program in _STARTERS.items():
        found = shutil.which(program)
        told[f"hadal run by {launcher}"] = "" if found else f"no program `{program}` is found"
    return {what: f"no: {why}" if why else "" for what, why in told.items()}


def _missing(module: str, remedy: str) -> str:
    found = importlib.util.find_spec(module) is not None
    return "" if found else f"{module} is not installed: {remedy}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
