"""The files of a DeepSpeed checkpoint, recognized by their names alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hadal.checkpoint.files import items_of, system_errors
from hadal.checkpoint.index import read_index
from hadal.checkpoint.storage import Location, sync_folder
from hadal.errors import CheckpointError, NotBuiltYetError

LATEST_UNIVERSAL = "latest_universal"
_WHOLE = re.compile(r"mp_rank_(?P<part>\d+)_model_states\.pt")
_MODEL = re.compile(r"zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt"
)
_EXPERT = re.compile(
    r"(?:layer_(?P<layer>\d+)_)?expert_(?P<number>\d+)_mp_rank_(?P<part>\d+)_model_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d+)(?:-model_00)?-model_states\.pt")
_ELSEWHERE = re.compile(r"layer_\d+.*model_states\.pt|offloaded_tensors")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one checkpoint, in the order of the stages of a pipeline and of their ranks."""

    model: tuple[Path, ...]
    """One for all ranks, or one for each of them; of a pipeline one for each stage."""
    optimizer: tuple[Path, ...]
    """One for each rank; none if nothing was sharded, or in the universal format."""
    values: Path | None
    """The folder of the universal format, with one folder for each parameter."""
    experts: tuple[Path, ...] = ()
    """One for each expert of each layer of experts."""
    layers: Mapping[int, Path] = field(default_factory=dict)
    """One for each layer of a pipeline that is a module, by its index."""

    @property
    def stages(self) -> int:
        """The number of the pipeline's stages; 1 if there is no pipeline."""
        return len(self.model) if self.layers else 1

    @property
    def all(self) -> list[Path]:
        """All files of the checkpoint."""
        values = [] if self.values is None else sorted(self.values.rglob("*.pt"))
        return [*self.model, *self.layers.values(), *self.experts, *self.optimizer, *values]


def is_deepspeed(folder: Location) -> bool:
    """Return whether a folder looks like a DeepSpeed checkpoint."""
    return any(not _OPTIMIZER.fullmatch(name) for name in names_of_ranks(folder))


def names_of_ranks(folder: Location) -> list[str]:
    """Return the names of the files of DeepSpeed's ranks in a folder."""
    kinds = (_WHOLE, _MODEL, _OPTIMIZER)
    names = [item.name for item in items_of(folder)]
    return [name for name in names if any(kind.fullmatch(name) for kind in kinds)]


ORDER = "deepspeed_files"
"""The index's key of the parameters in the model's order; only of saves that wrote such files."""


def has_rank_files(folder: Location) -> bool:
    """Return whether the checkpoint of ours in a folder was saved with files of DeepSpeed's."""
    with suppress(CheckpointError):
        return isinstance(folder, Path) and ORDER in read_index(folder)
    return False


def move_rank_files(home: Path, folder: Path) -> None:
    """Move such files, as far as they are not moved yet.

    Raises:
        CheckpointError: a file cannot be moved.
    """
    with system_errors(folder, "written"):
        for name in names_of_ranks(home):
            os.replace(home / name, folder / name)
        sync_folder(folder)


def files_of(folder: Path) -> Files:
    """Return the files of a checkpoint.

    Raises:
        CheckpointError: some are missing.
        NotBuiltYetError: it holds tensor-parallel parts, or state on disk.
    """
    model: dict[int, dict[int, Path]] = {}
    optimizer: dict[int, dict[int, Path]] = {}
    experts: dict[int, dict[int, Path]] = {}
    with system_errors(folder, "read"):
        names = sorted(path.name for path in folder.iterdir())
    found_layers = [found for found in map(_LAYER.fullmatch, names) if found]
    layers = {int(found["layer"]): folder / found.string for found in found_layers}
    for name in names:
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            if int(expert["part"]) != 0:
                _refuse(folder / name, "one of several model-parallel parts")
            layer = experts.setdefault(int(expert["layer"] or 0), {})
            layer[int(expert["number"])] = folder / name
            continue
        if _ELSEWHERE.fullmatch(name) and not _LAYER.fullmatch(name):
            _refuse(folder / name, "one of several tensor-parallel parts, or of state on disk")
        found = _WHOLE.fullmatch(name) or _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if found is None:
            continue
        part = int(found["part"])
        if part != 0 and not layers:
            _refuse(folder / name, "one of several model-parallel parts")
        rows = (optimizer if found.re is _OPTIMIZER else model).setdefault(part, {})
        rank = int(found.groupdict().get("rank") or 0)
        # In the universal format one file may have both names, each for other stages.
        if rank in rows and (folder / "zero").is_dir():
            continue
        if rank in rows:
            raise CheckpointError(f"{folder / name} and {rows[rank]} belong to the same rank")
        rows[rank] = folder / name
    values = folder / "zero"
    return Files(
        model=_of_stages(folder, "model states of rank", model),
        optimizer=_of_stages(folder, "optim states of rank", optimizer),
        values=values if values.is_dir() else None,
        experts=tuple(
            path
            for layer, found in sorted(experts.items())
            for path in _in_order(folder, f"states of layer {layer}'s expert", found)
        ),
        layers=layers,
    )


def _of_stages(folder: Path, what: str, found: dict[int, dict[int, Path]]) -> tuple[Path, ...]:
    return tuple(
        path for _, ranks in sorted(found.items()) for path in _in_order(folder, what, ranks)
    )


def _in_order(folder: Path, what: str, found: dict[int, Path]) -> tuple[Path, ...]:
    for rank in range(max(found, default=-1) + 1):
        if rank not in found:
            raise CheckpointError(f"{folder} has no {what} {rank}")
    return tuple(found[rank] for rank in range(len(found)))


def _refuse(path: Path, what: str) -> None:
    raise NotBuiltYetError(
        f"{path} is {what}, which is not supported yet; merge the checkpoint into a whole model"
        " with DeepSpeed first"
    )
