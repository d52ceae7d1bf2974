"""fp32 weights of a checkpoint, through functions with DeepSpeed's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hadal.checkpoint.export import export, state_dict_of
from hadal.checkpoint.files import location_of
from hadal.checkpoint.huggingface import MAX_SHARD, NAME, PICKLE
from hadal.checkpoint.opening import opened
from hadal.units import nbytes_of


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
    part: int | None = None,
) -> dict[str, Any]:
    """Return all weights and buffers of a checkpoint, Hadal's or DeepSpeed's, in fp32 on the host.

    Args:
        checkpoint_dir: the folder or URL given to `save_checkpoint`, or one checkpoint in it.
        tag: the checkpoint; by default the latest one.
        exclude_frozen_parameters: leave out frozen parameters.
        lazy_mode: return objects that read their tensor when `contiguous()` is called.
        part: the part to read, if the model was saved in model-parallel parts.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    source = opened(checkpoint_dir, tag, part)
    state = state_dict_of(
        source, torch.float32, exclude_frozen=exclude_frozen_parameters, lazy=lazy_mode
    )
    if not lazy_mode:
        source.close()
    return state


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None, part: int | None = None
) -> nn.Module:
    """Load a checkpoint's fp32 weights into a model, move it to the host and return it.

    Names that only one of the two has are ignored. `part` selects the part to load, if the model
    was saved in model-parallel parts.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    source = opened(checkpoint_dir, tag, part)
    model.cpu()
    model.load_state_dict(state_dict_of(source, torch.float32), strict=False)
    source.close()
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = MAX_SHARD,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    part: int | None = None,
) -> None:
    """Write a checkpoint's fp32 weights as `pytorch_model.bin`, in several files if it is large.

    Args:
        checkpoint_dir: the folder or URL given to `save_checkpoint`, or one checkpoint in it.
        output_dir: the folder or URL to write to.
        max_shard_size: the largest file, as "5GB" or in bytes; None: one file.
        safe_serialization: write `model.safetensors` instead, in small chunks.
        tag: the checkpoint; by default the latest one.
        exclude_frozen_parameters: leave out frozen parameters.
        part: the part to read, if the model was saved in model-parallel parts.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or the files cannot be written.
        ValueError: `max_shard_size` is not a size.
    """
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
        part,
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: torch.dtype | None = torch.float32,
    max_shard_size: str | int | None = MAX_SHARD,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    part: int | None = None,
) -> None:
    """Write a checkpoint's weights as above, in `dtype`; None keeps each weight's own dtype."""
    nbytes = nbytes_of("1000TB" if max_shard_size is None else max_shard_size)
    source = opened(checkpoint_dir, tag, part)
    export(
        source,
        location_of(output_dir),
        NAME if safe_serialization else PICKLE,
        dtype=dtype,
        max_shard_nbytes=nbytes,
        exclude_frozen=exclude_frozen_parameters,
    )
    source.close()
