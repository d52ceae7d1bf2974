"""One folder per checkpoint: each rank's shards as safetensors, everything else as JSON.

A checkpoint is read by as many ranks as wrote it, at the same stage. It holds no code: loading
reads tensors and JSON only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.checkpoint.plain import decoded, encoded
from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects
from hadal.comm.faults import told_to_all
from hadal.errors import CheckpointError
from hadal.zero.runtime import ZeroRuntime

_log = logging.getLogger(__name__)

LATEST = "latest"
_INDEX = "index.json"
# What a rank's own file says besides its tensors.
_LOADER = "loader"
_STEPPED = "optimizer"
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Saved:
    """What belongs to a checkpoint: where values come from when saving, and go to when loading."""

    module: nn.Module
    runtime: ZeroRuntime
    optimizer: Optimizer | None
    schedule: Any
    scalars: dict[str, Any]
    loader: Any = None
    """The training loader; each rank's place in the data is its own."""


def find(load_dir: Path, tag: str | None, ranks: Ranks) -> Path | None:
    """The folder of the checkpoint `tag`, or of the latest one; None where there is none.

    Raises:
        CheckpointError: a tag was asked for that is not there, `latest` names a missing folder, or
            the ranks find different ones.
    """
    with told_to_all(ranks, "load_checkpoint", CheckpointError):
        folder = _find(load_dir, tag)
    found = gather_objects(None if folder is None else folder.name, ranks)
    if len(set(found)) > 1:
        raise CheckpointError(
            f"the ranks find different checkpoints in {load_dir}: {found}; all of them must see the"
            " same folder"
        )
    return folder


def _find(load_dir: Path, tag: str | None) -> Path | None:
    if tag is None:
        latest = load_dir / LATEST
        if not latest.is_file():
            return None
        try:
            tag = latest.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{latest} cannot be read: {error}") from error
    folder = load_dir / tag
    if Path(tag).name != tag or not (folder / _INDEX).is_file():
        raise CheckpointError(f"no complete checkpoint {tag!r} in {load_dir} ({_INDEX} is missing)")
    return folder


def agree_on_tag(tag: str, validation: str, ranks: Ranks) -> None:
    """Compare a tag between the ranks: "Warn", "Fail" or, without a look, "Ignore".

    Raises:
        CheckpointError: the ranks have different ones, and that shall be an error.
    """
    if validation == "Ignore":
        return
    tags = gather_objects(tag, ranks)
    if len(set(tags)) > 1:
        told = f"the ranks save under different tags: {tags}; give the same tag on every rank"
        if validation == "Fail":
            raise CheckpointError(told)
        _log.warning("%s", told)


def save(save_dir: Path, tag: str, state: Saved, save_latest: bool) -> None:
    """Write a checkpoint. Every rank writes its own file; `latest` moves when all have."""
    ranks = state.runtime.ranks
    folder = save_dir / tag
    if Path(tag).name != tag:
        raise CheckpointError(f"a checkpoint's tag must be a plain folder name, found {tag!r}")
    fault = _try_to_write(folder, state)
    faults = [found for found in gather_objects(fault, ranks) if found]
    if faults:
        raise CheckpointError(f"checkpoint {folder} was not saved: {'; '.join(faults)}")
    # Nobody returns before `latest` says so.
    with told_to_all(ranks, "save_checkpoint", CheckpointError):
        if ranks.rank == 0 and save_latest:
            try:
                _write_text(save_dir / LATEST, tag)
            except OSError as error:
                raise CheckpointError(f"{save_dir / LATEST} cannot be written: {error}") from error


def _try_to_write(folder: Path, state: Saved) -> str | None:
    rank = state.runtime.ranks.rank
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = _shard_path(folder, rank)
        save_file(dict(_tensors(state)), path.with_suffix(".part"), _own_values(state))
        os.replace(path.with_suffix(".part"), path)
        if rank == 0:
            _write_text(folder / _INDEX, json.dumps(_index(state), indent=1))
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        return f"rank {rank}: {error}"
    return None


def _own_values(state: Saved) -> dict[str, str]:
    """Plain values that may differ from rank to rank, as JSON.

    The optimizer's are of the parameters that this rank steps; and where it stands in the data.
    """
    stepped = {} if state.optimizer is None else _optimizer_scalars(state.optimizer)
    own = {_STEPPED: json.dumps(encoded(stepped, "the optimizer's state"))}
    if state.loader is not None:
        try:
            place = state.loader.state_dict()
        except Exception as error:  # the data set's own code
            raise CheckpointError(
                f"the training loader cannot tell its place: {error!r}"
            ) from error
        own[_LOADER] = json.dumps(encoded(place, "the state of the training loader"))
    return own


def load(folder: Path, state: Saved) -> dict[str, Any]:
    """Put a checkpoint's values where `state` points, and return its scalars.

    Everything is read and checked on every rank before anything is changed on one.

    Raises:
        CheckpointError: damaged, or written by another world size, stage or model.
    """
    runtime = state.runtime
    runtime.reshard_all()
    with told_to_all(runtime.ranks, "load_checkpoint", CheckpointError):
        own = _read_own_values(folder, state.runtime.ranks.rank)
        index, values = _read(folder, state, own)
        place = _read_place(folder, state, own)
    if state.optimizer is not None:
        for group, saved in zip(state.optimizer.param_groups, index["param_groups"], strict=True):
            _restore_group(group, saved)
        state.optimizer.state.clear()
        for parameter, key, value in _found_state(state.optimizer, values, folder):
            state.optimizer.state[parameter][key] = value
    for name, target in _weights(state):
        target.copy_(values[name])
    runtime.after_load()
    if state.schedule is not None and index["schedule"] is not None:
        state.schedule.load_state_dict(decoded(index["schedule"]))
    if place is not None:
        state.loader.load_state_dict(place)
    scalars: dict[str, Any] = index["scalars"]
    return scalars


def _read_own_values(folder: Path, rank: int) -> dict[str, Any]:
    """What `_own_values` wrote."""
    path = _shard_path(folder, rank)
    try:
        with safe_open(path, "pt") as file:
            return {key: decoded(json.loads(text)) for key, text in (file.metadata() or {}).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"rank {rank} cannot read {path}: {error}") from error


def _read(folder: Path, state: Saved, own: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's part of a checkpoint, checked against what it will be put into.

    Returns:
        The index, and all values of this rank by name.
    """
    rank = state.runtime.ranks.rank
    path = _shard_path(folder, rank)
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        values: dict[str, Any] = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"rank {rank} cannot read {folder}: {error}") from error
    keys = ("scalars", "schedule", "param_groups")
    if not isinstance(index, dict) or any(key not in index for key in keys):
        raise CheckpointError(f"{folder / _INDEX} is no index of a checkpoint")
    _check_fit(folder, index, state)
    values |= own[_STEPPED]
    if state.optimizer is not None:
        groups, saved = state.optimizer.param_groups, index["param_groups"]
        if len(saved) != len(groups):
            raise CheckpointError(
                f"{folder}: {len(saved)} param groups were saved, {len(groups)} are expected"
            )
        for _ in _found_state(state.optimizer, values, folder):
            pass
    for name, target in _weights(state):
        source = values.get(name)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"{path}: {name} is missing or has another shape or dtype;"
                f" expected {tuple(target.shape)} {target.dtype}"
            )
    return index, values


def _read_place(folder: Path, state: Saved, own: dict[str, Any]) -> Any:
    """This rank's place in the data; None where the checkpoint or the engine has no loader."""
    place = own.get(_LOADER)
    if (place is None) == (state.loader is None):
        return place
    holder, lacks = ("engine", "checkpoint") if place is None else ("checkpoint", "engine")
    _log.warning(
        "%s: the %s has a training loader and the %s has none; the place in the data is not"
        " restored (make the loader before load_checkpoint)",
        folder,
        holder,
        lacks,
    )
    return None


def _check_fit(folder: Path, index: dict[str, Any], state: Saved) -> None:
    expected = {"format": _FORMAT, "world_size": state.runtime.ranks.size, "layout": _layout(state)}
    for key, value in expected.items():
        if index.get(key) != value:
            raise CheckpointError(
                f"{folder}: {key} is {index.get(key)!r}, expected {value!r}. Loading a checkpoint"
                " of another world size, stage, dtype or model is not built yet: use the same ones."
            )


def _index(state: Saved) -> dict[str, Any]:
    optimizer = state.optimizer
    return {
        "format": _FORMAT,
        "world_size": state.runtime.ranks.size,
        "layout": _layout(state),
        "scalars": state.scalars,
        "schedule": _schedule_state(state.schedule),
        "param_groups": [] if optimizer is None else [_plain(g) for g in optimizer.param_groups],
    }


def _schedule_state(schedule: Any) -> Any:
    """What JSON can hold of a schedule's state; what it cannot is left out, and told."""
    if not hasattr(schedule, "state_dict"):
        return None
    kept = {}
    for key, value in schedule.state_dict().items():
        try:
            encoded(value, key)
        except CheckpointError as error:
            _log.warning("%s is saved without %s", type(schedule).__name__, error)
        else:
            kept[key] = value
    return encoded(kept, type(schedule).__name__)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What of a param group is plain data; objects of a running program are left out."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            kept[key] = value.item()
        elif isinstance(value, tuple):
            kept[key] = list(value)
        elif key != "params" and isinstance(value, (bool, int, float, str, list, type(None))):
            kept[key] = value
    return kept


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _layout(state: Saved) -> str:
    """A short digest of everything that decides what lies where."""
    parts = [
        (b.name, str(b.partition), str(b.precision), b.layout.numel, str(b.layout.slots))
        for b in state.runtime.buckets
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _weights(state: Saved) -> Iterator[tuple[str, Tensor]]:
    for number, bucket in enumerate(state.runtime.buckets):
        yield f"weights.{number}", bucket.shard
        if bucket.master is not None and bucket.precision.keeps_master:
            yield f"master.{number}", bucket.master
    managed = {id(parameter) for parameter in state.runtime.bucket_of}
    for name, parameter in state.module.named_parameters():
        if id(parameter) not in managed:
            yield f"parameter.{name}", parameter.detach()
    for name, buffer in state.module.named_buffers():
        yield f"buffer.{name}", buffer


def _optimizer_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{g}.{p}.{key}", value


def _optimizer_scalars(optimizer: Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in _optimizer_tensors(optimizer)
        if not isinstance(value, Tensor)
    }


def _tensors(state: Saved) -> Iterator[tuple[str, Tensor]]:
    state.runtime.reshard_all()
    for name, tensor in _weights(state):
        yield name, tensor.detach().clone().contiguous()
    if state.optimizer is not None:
        for name, value in _optimizer_tensors(state.optimizer):
            if isinstance(value, Tensor):
                yield name, value.detach().clone().contiguous()


def _found_state(
    optimizer: Optimizer, values: dict[str, Any], folder: Path
) -> Iterator[tuple[Tensor, str, Any]]:
    """The saved optimizer state: (parameter, key, value)."""
    for name, value in values.items():
        if not name.startswith("optimizer."):
            continue
        _, g, p, key = name.split(".", 3)
        try:
            parameter = optimizer.param_groups[int(g)]["params"][int(p)]
        except (ValueError, IndexError):
            raise CheckpointError(f"{folder}: {name} belongs to no parameter here") from None
        yield parameter, key, value.to(parameter.device) if isinstance(value, Tensor) else value


def _shard_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"


def _write_text(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
