"""fp32 weights of a checkpoint, by the names that users of DeepSpeed know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hadal.checkpoint.export import export, load_weights, state_dict_of
from hadal.checkpoint.huggingface import MAX_SHARD, NAME, PICKLE, nbytes_of
from hadal.checkpoint.opening import opened


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
    part: int | None = None,
) -> dict[str, Any]:
    """All weights and buffers of a checkpoint, Hadal's or DeepSpeed's, in fp32 on the host.

    Args:
        checkpoint_dir: the folder that `save_checkpoint` wrote to, or one checkpoint in it.
        tag: the checkpoint; by default the latest one.
        exclude_frozen_parameters: leave out what was not trained.
        lazy_mode: give objects that read their tensor when `contiguous()` is called.
        part: which part, of a model that was saved in model-parallel parts.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    source = opened(Path(checkpoint_dir), tag, part)
    state = state_dict_of(
        source, torch.float32, exclude_frozen=exclude_frozen_parameters, lazy=lazy_mode
    )
    if not lazy_mode:
        source.close()
    return state


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None, part: int | None = None
) -> nn.Module:
    """Put a checkpoint's fp32 weights into a model, which is moved to the host; return it.

    Names that only one of the two has are left as they are. `part` says which part the model is of
    one that was saved in model-parallel parts.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    source = opened(Path(checkpoint_dir), tag, part)
    load_weights(model, source)
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
    """Write a checkpoint's fp32 weights as `pytorch_model.bin`, in several files where it is long.

    Args:
        checkpoint_dir: the folder that `save_checkpoint` wrote to, or one checkpoint in it.
        output_dir: the folder to write to.
        max_shard_size: the longest file, as "5GB" or in bytes; None: one file.
        safe_serialization: write `model.safetensors` instead, a small cut at a time.
        tag: the checkpoint; by default the latest one.
        exclude_frozen_parameters: leave out what was not trained.
        part: which part, of a model that was saved in model-parallel parts.

    Raises:
        CheckpointError: there is none, it is damaged, or the files cannot be written.
        ValueError: `max_shard_size` is no size.
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
    """The same in another dtype; None: each weight in its own."""
    nbytes = nbytes_of("1000TB" if max_shard_size is None else max_shard_size)
    source = opened(Path(checkpoint_dir), tag, part)
    export(
        source,
        Path(output_dir),
        NAME if safe_serialization else PICKLE,
        dtype=dtype,
        max_shard_nbytes=nbytes,
        exclude_frozen=exclude_frozen_parameters,
    )
    source.close()
