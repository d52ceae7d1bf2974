"""The files of a DeepSpeed checkpoint, recognized by their names alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hadal.checkpoint.files import items_of, system_errors
from hadal.checkpoint.storage import Location
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
_ELSEWHERE = re.compile(r"layer_\d+.*model_states\.pt|offloaded_tensors")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one checkpoint, in the order of the ranks."""

    model: tuple[Path, ...]
    """One for all ranks, or one for each of them."""
    optimizer: tuple[Path, ...]
    """One for each rank; none if nothing was sharded, or in the universal format."""
    values: Path | None
    """The folder of the universal format, with one folder for each parameter."""
    experts: tuple[Path, ...] = ()
    """One for each expert of each layer of experts."""

    @property
    def all(self) -> list[Path]:
        """All files of the checkpoint."""
        values = [] if self.values is None else sorted(self.values.rglob("*.pt"))
        return [*self.model, *self.experts, *self.optimizer, *values]


def is_deepspeed(folder: Location) -> bool:
    """Return whether a folder looks like a DeepSpeed checkpoint."""
    names = [item.name for item in items_of(folder)]
    return any(_WHOLE.fullmatch(name) or _MODEL.fullmatch(name) for name in names)


def files_of(folder: Path) -> Files:
    """Return the files of a checkpoint.

    Raises:
        CheckpointError: some are missing.
        NotBuiltYetError: it holds model-parallel parts or a pipeline.
    """
    model: dict[int, Path] = {}
    optimizer: dict[int, Path] = {}
    experts: dict[int, dict[int, Path]] = {}
    with system_errors(folder, "read"):
        names = sorted(path.name for path in folder.iterdir())
    for name in names:
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            if int(expert["part"]) != 0:
                _refuse(folder / name, "one of several model-parallel parts")
            layer = experts.setdefault(int(expert["layer"] or 0), {})
            layer[int(expert["number"])] = folder / name
            continue
        if _ELSEWHERE.fullmatch(name):
            _refuse(folder / name, "part of a pipeline, or of state on disk")
        found = _WHOLE.fullmatch(name) or _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if found is None:
            continue
        if int(found["part"]) != 0:
            _refuse(folder / name, "one of several model-parallel parts")
        rows = optimizer if found.re is _OPTIMIZER else model
        rank = int(found.groupdict().get("rank") or 0)
        # In the universal format one file may have both names, each for other stages.
        if rank in rows and (folder / "zero").is_dir():
            continue
        if rank in rows:
            raise CheckpointError(f"{folder / name} and {rows[rank]} belong to the same rank")
        rows[rank] = folder / name
    values = folder / "zero"
    return Files(
        model=_in_order(folder, "model states of rank", model),
        optimizer=_in_order(folder, "optim states of rank", optimizer),
        values=values if values.is_dir() else None,
        experts=tuple(
            path
            for layer, found in sorted(experts.items())
            for path in _in_order(folder, f"states of layer {layer}'s expert", found)
        ),
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
