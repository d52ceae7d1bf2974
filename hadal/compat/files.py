"""The files of a checkpoint, for programs that open them directly.

Hadal's checkpoints have no such files: their content is written into temporary files, which are
removed when the process ends.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import Any

import torch

from hadal.checkpoint.deepspeed.folder import Files, files_of
from hadal.checkpoint.deepspeed.pickles import read_pickle
from hadal.checkpoint.index import INDEX
from hadal.checkpoint.stored import StoredSource
from hadal.errors import CheckpointError

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Return the file of rank 0's model states.

        For a Hadal checkpoint it contains the caller's state, the counters and the ranks, no
    weights.

        Raises:
            CheckpointError: this is not a checkpoint directory.
    """
    if _is_own(checkpoint_dir):
        source = StoredSource(Path(checkpoint_dir))
        counters = {name: source.scalars.get("counters", {}).get(name, 0) for name in _COUNTERS}
        sizes = {"dp_world_size": source.world_size // source.parts, "mp_world_size": source.parts}
        return _written({**source.client_state(), **counters, **sizes})
    return str(_files(checkpoint_dir).model[0])


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """Return the files of all ranks' model states: one for each part of the model.

    A checkpoint of Hadal's has one, as `get_model_state_file` returns it.

    Raises:
        CheckpointError: this is not the directory of a checkpoint.
    """
    if _is_own(checkpoint_dir):
        return [get_model_state_file(checkpoint_dir, 0)]
    return [str(path) for path in _files(checkpoint_dir).model]


@dataclass
class zero_model_state:
    """The parts of a file of model states that describe its weights."""

    buffers: dict[str, torch.Tensor]
    param_shapes: Any
    shared_params: list[list[str]]
    ds_version: str | None
    frozen_param_shapes: Any
    frozen_param_fragments: Any


def parse_model_states(files: Iterable[str | Path]) -> list[zero_model_state]:
    """Return those parts of each file; buffers in fp32.

    Raises:
        CheckpointError: a file cannot be read, or has no model states of ZeRO.
    """
    found = []
    for file in files:
        state = read_pickle(Path(file))
        if not state.keys() >= {"buffer_names", "param_shapes"}:
            raise CheckpointError(
                f"{file} has no buffer_names and param_shapes; pass files named"
                " *_model_states.pt that DeepSpeed wrote with ZeRO"
            )
        names = state["buffer_names"]
        found.append(
            zero_model_state(
                {name: v.float() for name, v in state["module"].items() if name in names},
                state["param_shapes"],
                [[*pair] for pair in state.get("shared_params", {}).items()],
                state.get("ds_version"),
                state.get("frozen_param_shapes"),
                state.get("frozen_param_fragments"),
            )
        )
    return found


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Return the files of the optimizer's states, ordered by rank.

    For a Hadal checkpoint it is a single file that contains the stage only.

    Raises:
        CheckpointError: this is not a checkpoint directory, or its stage is 0.
    """
    if _is_own(checkpoint_dir):
        stage = StoredSource(Path(checkpoint_dir)).stage
        return [_written({"optimizer_state_dict": {"zero_stage": stage}})]
    found = _files(checkpoint_dir).optimizer
    if not found:
        raise CheckpointError(
            f"{checkpoint_dir} has no files of an optimizer sharded by ZeRO; it is of stage 0, and"
            " its weights are in get_model_state_file(...)"
        )
    return [str(path) for path in found]


def _is_own(folder: str | Path) -> bool:
    return Path(folder, INDEX).is_file()


@cache
def _room() -> Path:
    room = TemporaryDirectory(prefix="hadal_")
    atexit.register(room.cleanup)
    return Path(room.name)


def _written(content: dict[str, Any]) -> str:
    descriptor, path = mkstemp(".pt", dir=_room())
    os.close(descriptor)
    torch.save(content, path)
    return path


def get_model_ckpt_name_for_rank(base_folder: str | Path, mp_rank_str: str) -> str:
    """Return the name of the file of whole model states."""
    return str(Path(base_folder) / f"mp_rank_{mp_rank_str}_model_states.pt")


def _files(folder: str | Path) -> Files:
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; pass that of a checkpoint's tag")
    found = files_of(path)
    if not found.model:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has neither {INDEX} nor *_model_states.pt;"
            " pass the directory of a checkpoint's tag"
        )
    return found
