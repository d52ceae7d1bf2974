"""Export of a checkpoint's weights, without ranks: as files or as a state dict."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hadal.checkpoint.contents import BUFFER, MASTER, WEIGHT
from hadal.checkpoint.files import location_of
from hadal.checkpoint.huggingface import Value, write_model
from hadal.checkpoint.opening import opened
from hadal.checkpoint.rules import MAX_SHARD, NAME, PICKLE
from hadal.checkpoint.source import Source
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError
from hadal.units import nbytes_of

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
"""The dtypes that weights can be converted to, by their names in configurations."""
_log = logging.getLogger(__name__)
_CUT_NUMEL = 1 << 19
Progress = Callable[[int], object]
"""Called with the number of bytes that were processed since the last call."""


def untold(nbytes: int) -> None:
    """Report to nobody: the default `Progress`."""


def values_to_export(
    source: Source,
    dtype: torch.dtype | None = None,
    *,
    exclude_frozen: bool = False,
    is_exact: bool = False,
) -> list[Value]:
    """Return the weights and buffers in the order of the source, in `dtype` or their own dtype.

    A weight whose own dtype is not wanted is read from its master; with `is_exact` the own dtype
    of a weight that has a master is the master's. A buffer may become wider, but never narrower:
    models keep fp32 buffers with 16-bit weights deliberately.

    Raises:
        CheckpointError: the checkpoint does not distinguish frozen parameters from trained ones.
    """
    trained = {name for group in source.groups for name in group.names}
    if exclude_frozen and not trained:
        raise CheckpointError(
            f"{source.path} does not record which parameters were trained; include frozen ones"
        )
    found = []
    for (name, kind), entry in source.entries.items():
        if kind not in (WEIGHT, BUFFER) or (
            kind == WEIGHT and exclude_frozen and name not in trained
        ):
            continue
        wanted = entry.dtype
        if is_exact and kind == WEIGHT and (name, MASTER) in source.entries:
            wanted = source.entries[name, MASTER].dtype
        if dtype is not None and wanted.is_floating_point:
            wanted = dtype if kind == WEIGHT else torch.promote_types(wanted, dtype)
        if wanted != entry.dtype and (name, MASTER) in source.entries:
            kind = MASTER
        found.append(Value(name, entry.shape, wanted, kind))
    return found


def tied_names(source: Source, stored: Iterable[Value]) -> dict[str, str]:
    """Return the other names of the exported values, each with the name it is exported under."""
    kept = {value.name for value in stored}
    return {alias: name for alias, name in source.aliases.items() if name in kept}


def export(
    source: Source,
    folder: Location,
    filename: str,
    *,
    dtype: torch.dtype | None,
    max_shard_nbytes: int,
    exclude_frozen: bool = False,
    progress: Progress = untold,
) -> list[Location]:
    """Write the weights of a checkpoint in the Hugging Face layout.

    `progress` is called with the bytes of each chunk that was read.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the files cannot be written.
    """
    _warn_if_rounded(source, dtype)
    stored = values_to_export(source, dtype, exclude_frozen=exclude_frozen)
    # Wide dtypes first, so that each tensor is aligned.
    values = sorted(stored, key=lambda value: -value.dtype.itemsize)
    cuts = _cuts(source, values, progress)
    aliases = tied_names(source, stored)
    return write_model(folder, filename, values, cuts, aliases, max_shard_nbytes)


def nbytes_of_export(
    source: Source, dtype: torch.dtype | None, *, exclude_frozen: bool = False
) -> int:
    """Return the number of bytes that an export reports to its `progress`."""
    stored = values_to_export(source, dtype, exclude_frozen=exclude_frozen)
    return sum(value.nbytes for value in stored)


def _cuts(source: Source, values: list[Value], progress: Progress) -> Iterator[Tensor]:
    for value in values:
        for start in range(0, value.numel, _CUT_NUMEL):
            stop = min(start + _CUT_NUMEL, value.numel)
            yield source.read(value.name, value.kind, start, stop).to(value.dtype)
            progress((stop - start) * value.dtype.itemsize)


def _warn_if_rounded(source: Source, dtype: torch.dtype | None) -> None:
    """Log a warning if fp32 values are requested and the checkpoint has only rounded ones."""
    kinds = {kind for _, kind in source.entries}
    narrow = [
        name
        for (name, kind), entry in source.entries.items()
        if kind == WEIGHT and entry.dtype in (torch.bfloat16, torch.float16)
    ]
    if dtype == torch.float32 and narrow and MASTER not in kinds:
        _log.warning(
            "%s holds no fp32 masters with names (DeepSpeed's stage 0 saves none): the exported"
            " values are those of the 16-bit weights",
            source.path,
        )


class LazyTensor:
    """A tensor of a checkpoint that is read when `contiguous()` is called."""

    def __init__(self, source: Source, value: Value) -> None:
        self._source = source
        self._value = value
        self.shape = torch.Size(value.shape)
        self.dtype = value.dtype

    def contiguous(self) -> Tensor:
        """Read the tensor and return it."""
        return read_whole(self._source, self._value)


def read_whole(source: Source, value: Value) -> Tensor:
    """Read a whole value and return it."""
    found = torch.empty(value.numel, dtype=value.dtype)
    fill(found, source, value)
    return found.view(value.shape)


def fill(out: Tensor, source: Source, value: Value, start: int = 0) -> None:
    """Read the elements of a value from `start` on into `out`, 1-D, a piece at a time."""
    for piece in out.split(_CUT_NUMEL) if out.numel() else ():
        stop = start + piece.numel()
        piece.copy_(source.read(value.name, value.kind, start, stop))
        start = stop


def state_dict_of(
    source: Source, dtype: torch.dtype | None, *, exclude_frozen: bool = False, lazy: bool = False
) -> dict[str, Tensor | LazyTensor]:
    """Return all weights and buffers under all their names; tied ones are one tensor."""
    _warn_if_rounded(source, dtype)
    stored = values_to_export(source, dtype, exclude_frozen=exclude_frozen)
    state: dict[str, Tensor | LazyTensor] = {
        value.name: LazyTensor(source, value) if lazy else read_whole(source, value)
        for value in stored
    }
    return state | {alias: state[name] for alias, name in tied_names(source, stored).items()}


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
    convert_zero_checkpoint_to_state_dict(**locals(), dtype=torch.float32)


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
