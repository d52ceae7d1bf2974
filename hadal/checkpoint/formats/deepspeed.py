"""The files of DeepSpeed's `save_checkpoint`, beside Hadal's own, for tools that read them.

Each rank writes what a rank of DeepSpeed would write, from the values that the save has stored. The
layouts are those of `deepspeed/layouts.py`, which reads them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hadal.checkpoint.contents import BUFFER, WEIGHT, SavedGroup, state_key
from hadal.checkpoint.deepspeed.folder import has_rank_files
from hadal.checkpoint.deepspeed.layouts import RankSlice, slices_of_rank
from hadal.checkpoint.deepspeed.pickles import check_pickle
from hadal.checkpoint.export import fill, read_whole, values_to_export
from hadal.checkpoint.files import system_errors
from hadal.checkpoint.formats.universal import (
    MODEL_STATES,
    VERSION,
    model_states,
    module_of,
    optimizer_state,
    trained_kinds,
    write_named,
)
from hadal.checkpoint.huggingface import Value
from hadal.checkpoint.source import Source
from hadal.checkpoint.storage import Location, sync_folder
from hadal.errors import CheckpointError, NotBuiltYetError


def write_rank_files(source: Source, order: Sequence[str], folder: Location, rank: int) -> None:
    """Write a rank's files; `order` lists the parameters in the model's order.

    Raises:
        CheckpointError: a value cannot be read, or a file cannot be written.
    """
    assert isinstance(folder, Path)  # `expect_directory`
    stage, places = source.stage or 0, {name: place for place, name in enumerate(order)}
    groups = []
    for group in source.groups:
        names = sorted(group.names, key=places.__getitem__)
        if stage > 0:  # no flat group there has empty parameters
            names = [name for name in names if source.entries[name, WEIGHT].numel]
        groups.append(SavedGroup(group.options, tuple(names)))
    model, optimizer = _names_of(source, rank)
    if model:
        scratch = folder / f".module_{rank}"
        found = _module(source, stage, scratch)
        module = {name: found[name] for name in order if name in found} | found
        _write(_model_states(source, groups, stage, rank, module), folder / model)
        shutil.rmtree(scratch, ignore_errors=True)
    if optimizer:
        states = {"optimizer_state_dict": _optimizer_states(source, groups, stage, rank)}
        _write({**states, "ds_version": VERSION}, folder / optimizer)
    sync_folder(folder)


def expect_directory(save_dir: Location) -> None:
    """Check that the files can be written to a place: a directory, no URL."""
    if not isinstance(save_dir, Path):
        raise NotBuiltYetError(
            f"checkpoint.deepspeed_files: writing DeepSpeed's files to {save_dir} is not built yet;"
            " save into a directory, or remove the key"
        )


def faults_of_files(source: Source, folder: Location) -> Iterator[str]:
    """Yield the faults of the files beside a checkpoint that was saved with them."""
    if not has_rank_files(folder):
        return
    assert isinstance(folder, Path)  # as `expect_directory` had it
    for name in names_of_files(source):
        try:
            check_pickle(folder / name)
        except CheckpointError as error:
            yield (
                f"{error}. Only DeepSpeed's tools read it; if the save was killed while it put"
                f" such files in place, `hadal checkpoint clean {folder.parent} --yes` does so"
            )


def names_of_files(source: Source) -> list[str]:
    """Return the names of all ranks' files."""
    return [name for rank in range(source.world_size) for name in _names_of(source, rank) if name]


def _names_of(source: Source, rank: int) -> tuple[str, str]:
    """Return the names of a rank's files of the model and of the optimizer; "" if it has none."""
    stage, shard = source.stage or 0, f"zero_pp_rank_{rank}_"
    weights = {entry.dtype for (_, kind), entry in source.entries.items() if kind == WEIGHT}
    prefix = "bf16_" if torch.bfloat16 in weights else ""
    model = f"{shard}{MODEL_STATES}" if stage == 3 else MODEL_STATES * (rank == 0)
    has_optimizer = stage > 0 and any(True for _ in source.groups)
    return model, f"{prefix}{shard}mp_rank_00_optim_states.pt" * has_optimizer


def _write(value: Any, path: Path) -> None:
    write_named(value, path)
    with system_errors(path, "written"), open(path, "rb") as file:
        os.fsync(file.fileno())


def _module(source: Source, stage: int, scratch: Path) -> dict[str, Tensor]:
    """Return weights and buffers, in the memory of files; at stage 3 weights are empty there."""
    if stage < 3:
        return module_of(source, scratch)
    return {
        one.name: read_whole(source, one) if one.kind == BUFFER else torch.empty(0, dtype=one.dtype)
        for one in values_to_export(source)
    }


def _model_states(
    source: Source,
    groups: Sequence[SavedGroup],
    stage: int,
    rank: int,
    module: Mapping[str, Tensor],
) -> dict[str, Any]:
    states = model_states(source, groups, module)
    if stage == 0:
        whole = _whole_optimizer(source, groups)
        return {**states, "optimizer": whole, "param_shapes": None, "shared_params": None}
    trained = {name for group in groups for name in group.names}
    shapes = {
        name: torch.Size(entry.shape)
        for (name, kind), entry in source.entries.items()
        if kind == WEIGHT and name not in trained
    }
    fragments = {name: module[name] for name in shapes}
    if stage == 3:
        for name, shape in shapes.items():
            slices = slices_of_rank({name: shape}, rank, source.world_size, by_parameter=True)
            fragments[name] = _flat(source, slices, {name: WEIGHT}, module[name].dtype)
    return {**states, "frozen_param_shapes": shapes, "frozen_param_fragments": fragments}


def _whole_optimizer(source: Source, groups: Sequence[SavedGroup]) -> dict[str, Any]:
    """Return the optimizer's state of stage 0: values of each parameter, by its number."""
    states = optimizer_state(source, groups)
    inner = states.pop("optimizer_state_dict")
    kinds, masters = trained_kinds(source), []
    inner["state"] = {}
    for group, saved in zip(inner["param_groups"], groups, strict=True):
        first = len(inner["state"])
        group["params"] = list(range(first, first + len(saved.names)))
        for number, name in enumerate(saved.names, first):
            moments = _moments(source, kinds, [name])
            inner["state"][number] = {
                **source.state.get(name, {}),
                **{key: _whole(source, name, kind) for key, kind in moments.items()},
            }
        masters.append([_whole(source, name, kinds[name][0]) for name in saved.names])
    if all(own[0] == WEIGHT for own in kinds.values()):
        return dict(inner)
    return {**states, "optimizer_state_dict": inner, "fp32_groups": masters}


def _optimizer_states(
    source: Source, groups: Sequence[SavedGroup], stage: int, rank: int
) -> dict[str, Any]:
    """Return a rank's slices of masters and moments, each group's in one flat tensor."""
    states = optimizer_state(source, groups)
    inner = states.pop("optimizer_state_dict")
    kinds, flats = trained_kinds(source), []
    for number, (_, names) in enumerate(groups):
        shapes = {name: source.entries[name, WEIGHT].shape for name in names}
        slices = [*slices_of_rank(shapes, rank, source.world_size, by_parameter=stage == 3)]
        flats.append(_flat(source, slices, {name: kinds[name][0] for name in names}))
        for key, kind in _moments(source, kinds, names).items():
            inner["state"][number][key] = _flat(source, slices, dict.fromkeys(names, kind))
    if stage == 3:
        states |= {"optimizer_state_dict": inner, "fp32_flat_groups": flats}
        return {**states, "partition_count": source.world_size}
    return {**states, "base_optimizer_state": inner, "single_partition_of_fp32_groups": flats}


def _moments(
    source: Source, kinds: Mapping[str, Sequence[str]], names: Sequence[str]
) -> dict[str, str]:
    """Return the kinds, by key, of state that all parameters have for each of their elements."""
    return {
        str(state_key(kind)): kind
        for kind in (kinds[names[0]][1:] if names else ())
        if all(
            kind in kinds[name]
            and source.entries[name, kind].shape == source.entries[name, WEIGHT].shape
            for name in names
        )
    }


def _whole(source: Source, name: str, kind: str) -> Tensor:
    return read_whole(source, Value(name, source.entries[name, WEIGHT].shape, torch.float32, kind))


def _flat(
    source: Source,
    slices: Iterable[RankSlice],
    kinds: Mapping[str, str],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return slices of parameters end to end, with zeros as padding."""
    rows = list(slices)
    found, first = torch.zeros(sum(row.numel + row.padding for row in rows), dtype=dtype), 0
    for row in rows:
        value = Value(row.name, source.entries[row.name, WEIGHT].shape, dtype, kinds[row.name])
        fill(found[first : first + row.numel], source, value, row.start)
        first += row.numel + row.padding
    return found
