"""Files of single layers, in which DeepSpeed's programs store a pipeline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hadal.errors import CheckpointError

if TYPE_CHECKING:
    from hadal.plugins.pipeline.grid import PipelineParallelGrid

_END = "model_states.pt"


def prefix(grid: PipelineParallelGrid, folder: str | Path, tag: object) -> str:
    """Return the common prefix of the paths of one rank's checkpoint files."""
    place = grid.topology().get_rank_repr(grid.global_rank, omit_axes=("data",))
    return os.path.join(folder, str(tag), f"module{'-' * bool(place)}{place}")


def path(grid: PipelineParallelGrid, folder: str | Path, index: int) -> str:
    """Return the path of a layer's file; each rank with a slice of the layer has its own."""
    place = grid.topology().get_rank_repr(grid.global_rank)
    return os.path.join(folder, f"layer_{index:02d}{'-' * bool(place)}{place}-{_END}")


def paths(folder: str | Path, index: int) -> list[str]:
    """Return the paths of a layer's files that exist, one for each slice of it."""
    return sorted(map(str, Path(folder).glob(f"layer_{index:02d}-*{_END}")))


def state_of(module: nn.Module, *, exclude_frozen: bool) -> dict[str, Tensor]:
    """Return a copy of a layer's state: views would save the whole memory behind them."""
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    return {
        name: value.detach().clone()
        for name, value in module.state_dict().items()
        if not (exclude_frozen and name in frozen)
    }


def load(
    grid: PipelineParallelGrid,
    folder: str | Path,
    index: int,
    module: nn.Module,
    engine: Any,
    strict: bool,
) -> None:
    """Load one layer from the file of this rank's slice of it.

    Raises:
        CheckpointError: the file does not exist.
    """
    file = path(grid, folder, index)
    if not os.path.exists(file):
        found = ", ".join(paths(folder, index)) or "none"
        raise CheckpointError(
            f"{file} does not exist, the file of layer {index} ({type(module).__name__}); files of"
            f" this layer: {found}. Pass the directory that save_state_dict wrote to, for a model"
            " with as many slices of each layer"
        )
    if engine is None:
        state = torch.load(file, map_location="cpu", weights_only=True)
    else:
        state = engine.load(file, map_location="cpu")
    module.load_state_dict(state, strict=strict)
