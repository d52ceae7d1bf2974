"""DeepSpeed's checkpoints under tests/data: unpacking them, and their expected contents."""

from __future__ import annotations

import importlib.util
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

DATA = Path(__file__).parents[1] / "data" / "deepspeed"
# All of the same model; those of models in parts are in test_both_ways.py.
CASES = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("[!ep]*.tar.xz"))


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"deepspeed_{name}", DATA / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toy = _module("toy")
make = _module("make")


@dataclass(frozen=True)
class Unpacked:
    """A checkpoint in a folder, and the values that DeepSpeed reported for it."""

    folder: Path
    tag: str
    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        return self.folder / self.tag

    @classmethod
    def read(cls, case: str, folder: Path) -> Unpacked:
        latest = folder / ("latest_universal" if "universal" in case else "latest")
        return cls(
            folder=folder,
            tag=latest.read_text(),
            tensors=load_file(folder / "expected.safetensors"),
            facts=json.loads((folder / "expected.json").read_text()),
        )


def unpack(case: str, folder: Path) -> Unpacked:
    with tarfile.open(DATA / f"{case}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return Unpacked.read(case, folder)


def group_names() -> list[list[str]]:
    """Return the parameter names of each param group."""
    model = toy.Toy()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in toy.groups_of(model)]
