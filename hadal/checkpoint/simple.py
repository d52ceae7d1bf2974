"""What is in a checkpoint: each rank's shards as safetensors, everything else as JSON.

A checkpoint is read by as many ranks as wrote it, at the same stage. It holds no code: loading
reads tensors and JSON only. How it gets to disk whole is in `folders.py` and `files.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.checkpoint import folders, randomness
from hadal.checkpoint.files import Seal, check_file, check_inside
from hadal.checkpoint.index import read_index, seals_of, strict_json, write_index
from hadal.checkpoint.keep import Keep, prune
from hadal.checkpoint.plain import decoded, encoded
from hadal.checkpoint.shards import read_tensors, write_tensors
from hadal.comm import Ranks
from hadal.comm.collectives import gather_codes, gather_objects
from hadal.errors import CheckpointError, HadalError
from hadal.zero.runtime import ZeroRuntime

_log = logging.getLogger(__name__)

_CLIENT = "client_state.safetensors"
_OWN = "hadal"
"""The header's text of what each rank has for itself."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says of saving and loading."""

    verifies: bool = True
    """Whether loading compares every byte with its checksum; else sizes and headers alone."""
    keep: Keep = field(default_factory=Keep)


@dataclass(frozen=True, slots=True)
class Saved:
    """What belongs to a checkpoint: where values come from when saving, and go to when loading."""

    module: nn.Module
    runtime: ZeroRuntime
    optimizer: Optimizer | None
    schedule: Any
    scalars: dict[str, Any]
    """Numbers of the engine, in lists and dicts; what is loaded must be built alike."""
    client_state: dict[str, Any]
    loader: Any = None
    """The training loader; each rank's place in the data is its own."""
    rules: Rules = Rules()


@dataclass(frozen=True, slots=True)
class _Found:
    """One rank's part of a checkpoint, read and checked."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    client_state: dict[str, Any]
    schedule: Any
    groups: list[dict[str, Any]]
    optimizer_state: list[tuple[Tensor, str, Any]]
    place: Any
    random: dict[str, Any]


@contextmanager
def _together(ranks: Ranks, what: str) -> Iterator[None]:
    """Run a block without collectives; where it raises on one rank, raise on all, and say why."""
    fault: Exception | None = None
    try:
        yield
    except Exception as error:  # of whatever kind: the others must not wait for this rank
        fault = error
    if not any(gather_codes(int(fault is not None), ranks)):
        return
    told = None if fault is None else str(fault)
    if fault is not None and not isinstance(fault, HadalError):
        told = f"{type(fault).__name__}: {fault}"
    faults = [f"rank {r}: {text}" for r, text in enumerate(gather_objects(told, ranks)) if text]
    more = f"; and {len(faults) - 4} more ranks" if len(faults) > 4 else ""
    raise CheckpointError(f"{what}: {'; '.join(faults[:4])}{more}") from fault


# ---- saving --------------------------------------------------------------------------------------


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
        _log.warning("%s (rank 0's is taken)", told)


def save(save_dir: Path, tag: str, state: Saved, save_latest: bool) -> None:
    """Write a checkpoint: every rank its own file, and when all are on disk rank 0 names it.

    Then `latest` moves, and old checkpoints go. Whatever fails before the new checkpoint is
    complete leaves the one that was there under this tag, and `latest`, as they are; where
    `latest` itself cannot be written, the new one stands and `latest` names what it named.

    Raises:
        CheckpointError: on every rank, with the file and the reason.
    """
    runtime = state.runtime
    ranks = runtime.ranks
    what = f"checkpoint {save_dir / tag!s} was not saved"
    runtime.reshard_all()
    draft: Path | None = None
    with _together(ranks, what):
        folders.check_tag(tag)
        own, client = _own(state), _client(state)
        if ranks.rank == 0:
            draft = folders.begin(save_dir, tag)
    draft = save_dir / gather_objects(draft and draft.name, ranks)[0]
    try:
        seals: dict[str, Seal] = {}
        with _together(ranks, what):
            seals = _write(draft, state, own, client)
        seals = {name: seal for part in gather_objects(seals, ranks) for name, seal in part.items()}
        with _together(ranks, what):
            if ranks.rank == 0:
                _complete(draft, seals, _index(state, seals, client, save_latest))
                folders.commit(draft, save_dir / tag)
    except CheckpointError:
        if ranks.rank == 0:
            folders.discard(draft)
        raise
    # Nobody returns before `latest` says so.
    with _together(ranks, f"{save_dir / folders.LATEST} was not moved to {tag!r}"):
        if ranks.rank == 0:
            if save_latest:
                folders.set_latest(save_dir, tag)
            prune(save_dir, tag, state.rules.keep)


@dataclass(frozen=True, slots=True)
class _Plain:
    """State as JSON, and the tensors that stand beside it."""

    values: Any
    tensors: dict[str, Tensor]


def _client(state: Saved) -> _Plain:
    tensors: dict[str, Tensor] = {}
    return _Plain(encoded(state.client_state, "client_state", tensors), tensors)


def _own(state: Saved) -> _Plain:
    """What each rank has for itself, as it may differ from rank to rank.

    Plain state of the parameters that its optimizer steps, its random generators, and where it
    stands in the data.
    """
    tensors: dict[str, Tensor] = {}
    place = None
    if state.loader is not None:
        try:
            place = state.loader.state_dict()
        except Exception as error:  # the data set's own code
            raise CheckpointError(
                f"the training loader cannot tell its place: {error!r}"
            ) from error
    stepped = {} if state.optimizer is None else _optimizer_scalars(state.optimizer)
    values = {
        "optimizer": encoded(stepped, "the optimizer's state"),
        "loader": encoded(place, "the state of the training loader", tensors),
        "random": encoded(randomness.states(), "the random generators", tensors),
    }
    return _Plain(values, tensors)


def _write(draft: Path, state: Saved, own: _Plain, client: _Plain) -> dict[str, Seal]:
    """Write this rank's files, and tell what they must be from now on."""
    rank = state.runtime.ranks.rank
    name = _shard_name(rank)
    # The mark in the folder's name is that of this save: a file of another one is told at once.
    text = json.dumps({"rank": rank, "save": draft.name, **own.values}, allow_nan=False)
    tensors = {**_tensors(state), **own.tensors}
    seals = {name: write_tensors(draft / name, tensors, {_OWN: text})}
    if rank == 0 and client.tensors:
        seals[_CLIENT] = write_tensors(draft / _CLIENT, client.tensors, {_OWN: draft.name})
    return seals


def _complete(draft: Path, seals: dict[str, Seal], index: dict[str, Any]) -> None:
    """See that all ranks have written into the folder that this one sees, and write the index."""
    for name, seal in seals.items():
        check_file(draft / name, seal, whole=False)
    write_index(draft, index)


def _index(
    state: Saved, seals: dict[str, Seal], client: _Plain, save_latest: bool
) -> dict[str, Any]:
    optimizer = state.optimizer
    groups = [] if optimizer is None else [_plain(group) for group in optimizer.param_groups]
    return {
        "saved_at": time.time(),
        "was_latest": save_latest,
        "world_size": state.runtime.ranks.size,
        "layout": _layout(state),
        "files": seals,
        "scalars": encoded(state.scalars, "the engine's counters"),
        "client_state": client.values,
        "schedule": _schedule_state(state.schedule),
        "param_groups": groups,
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


def _plain(values: dict[str, Any]) -> Any:
    """What of a param group is plain data; objects of a running program are left out."""
    kept = {}
    for key, value in values.items():
        if key == "params":
            continue
        try:
            encoded(value, key)
        except CheckpointError:
            continue
        kept[key] = value
    return encoded(kept, "a param group")


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


def _tensors(state: Saved) -> dict[str, Tensor]:
    tensors = dict(_weights(state))
    if state.optimizer is not None:
        found = _optimizer_tensors(state.optimizer)
        tensors |= {name: value for name, value in found if isinstance(value, Tensor)}
    return tensors


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


def _layout(state: Saved) -> str:
    """A short digest of everything that decides what lies where."""
    parts = [
        (b.name, str(b.partition), str(b.precision), b.layout.numel, str(b.layout.slots))
        for b in state.runtime.buckets
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


# ---- loading -------------------------------------------------------------------------------------


def find(load_dir: Path, tag: str | None, ranks: Ranks) -> Path | None:
    """The folder of the checkpoint `tag`, or of the latest one; None where there is none.

    Raises:
        CheckpointError: a tag was asked for that is not there, `latest` names a missing folder, or
            the ranks find different ones.
    """
    with _together(ranks, f"no checkpoint was loaded from {load_dir}"):
        folder = folders.find(load_dir, tag)
    found = gather_objects(None if folder is None else folder.name, ranks)
    if len(set(found)) > 1:
        raise CheckpointError(
            f"the ranks find different checkpoints in {load_dir}: {found}; all of them must see the"
            " same folder"
        )
    return folder


def load(folder: Path, state: Saved) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put a checkpoint's values where `state` points, and return its scalars and client state.

    Everything is read and checked on every rank before anything is changed on one.

    Raises:
        CheckpointError: damaged, or written by another world size, stage or model.
    """
    runtime = state.runtime
    runtime.reshard_all()
    with _together(runtime.ranks, f"checkpoint {folder} was not loaded"):
        found = _read(folder, state)
    if state.optimizer is not None:
        for group, saved in zip(state.optimizer.param_groups, found.groups, strict=True):
            _restore_group(group, saved)
        state.optimizer.state.clear()
        for parameter, key, value in found.optimizer_state:
            state.optimizer.state[parameter][key] = value
    for name, target in _weights(state):
        target.copy_(found.tensors[name])
    runtime.after_load()
    if state.schedule is not None and found.schedule is not None:
        state.schedule.load_state_dict(found.schedule)
    if found.place is not None:
        state.loader.load_state_dict(found.place)
    randomness.restore(found.random)
    return found.scalars, found.client_state


def _read(folder: Path, state: Saved) -> _Found:
    """This rank's part of a checkpoint, checked against what it will be put into."""
    path = folder / folders.INDEX
    index = read_index(folder)
    try:
        return _read_parts(folder, index, state)
    except CheckpointError:
        raise
    except (
        *(ValueError, TypeError, KeyError, IndexError, AttributeError),
        *(RuntimeError, OverflowError),
    ) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _read_parts(folder: Path, index: dict[str, Any], state: Saved) -> _Found:
    rank = state.runtime.ranks.rank
    shard = folder / _shard_name(rank)
    _check_fit(folder, index, state)
    names = [_shard_name(number) for number in range(state.runtime.ranks.size)]
    has_client = _CLIENT in index["files"]
    seals = seals_of(index, names + [_CLIENT] * has_client, folder / folders.INDEX)
    mine = [shard.name] + [_CLIENT] * has_client
    for name in mine:
        check_inside(folder / name, folder)
        check_file(folder / name, seals[name], whole=state.rules.verifies)
    tensors, texts = read_tensors(shard)
    own = _read_own(shard, texts, tensors)
    client = read_tensors(folder / _CLIENT)[0] if has_client else {}
    scalars = decoded(index["scalars"])
    if not _is_like(scalars, state.scalars):
        raise ValueError(f"the engine's counters are {scalars}")
    _check_weights(shard, tensors, state)
    return _Found(
        tensors=tensors,
        scalars=scalars,
        client_state=decoded(index["client_state"], client),
        schedule=decoded(index["schedule"]),
        groups=_found_groups(folder, index, state),
        optimizer_state=_found_state(shard, own["optimizer"] | tensors, state),
        place=_found_place(folder, own["loader"], state),
        random=own["random"],
    )


def _check_fit(folder: Path, index: dict[str, Any], state: Saved) -> None:
    expected = {"world_size": state.runtime.ranks.size, "layout": _layout(state)}
    for key, value in expected.items():
        if index.get(key) != value:
            raise CheckpointError(
                f"{folder}: {key} is {index.get(key)!r}, expected {value!r}. Loading a checkpoint"
                " of another world size, stage, dtype or model is not built yet: use the same ones."
            )


def _check_weights(shard: Path, tensors: dict[str, Tensor], state: Saved) -> None:
    for name, target in _weights(state):
        source = tensors.get(name)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"{shard}: {name} is missing or has another shape or dtype;"
                f" expected {tuple(target.shape)} {target.dtype}"
            )


def _read_own(shard: Path, texts: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What this rank has saved for itself, such that it can be restored."""
    try:
        saved = strict_json(texts[_OWN], shard)
        own = {name: decoded(saved[name], tensors) for name in ("optimizer", "loader", "random")}
        randomness.check(own["random"])
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{shard} is damaged: {type(error).__name__}: {error}") from error
    return own


def _found_place(folder: Path, place: Any, state: Saved) -> Any:
    """This rank's place in the data; None where the checkpoint or the engine has no loader."""
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


def _found_groups(folder: Path, index: dict[str, Any], state: Saved) -> list[dict[str, Any]]:
    saved = [dict(decoded(group)) for group in index["param_groups"]]
    if state.optimizer is not None and len(saved) != len(state.optimizer.param_groups):
        raise CheckpointError(
            f"{folder / folders.INDEX}: {len(saved)} param groups were saved,"
            f" {len(state.optimizer.param_groups)} are expected"
        )
    return saved


def _found_state(
    shard: Path, values: dict[str, Any], state: Saved
) -> list[tuple[Tensor, str, Any]]:
    """The saved optimizer state, in memory of its own: (parameter, key, value)."""
    if state.optimizer is None:
        return []
    saved = {name: value for name, value in values.items() if name.startswith("optimizer.")}
    found = []
    for name, value in saved.items():
        try:
            _, g, p, key = name.split(".", 3)
            parameter = state.optimizer.param_groups[int(g)]["params"][int(p)]
        except (ValueError, IndexError):
            raise CheckpointError(f"{shard}: {name} belongs to no parameter here") from None
        if isinstance(value, Tensor):
            value = torch.empty_like(value, device=parameter.device).copy_(value)
        found.append((parameter, key, value))
    return found


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _is_like(found: Any, wanted: Any) -> bool:
    """Whether both are built alike: the same keys, as many items, finite numbers."""
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(_is_like(found[key], value) for key, value in wanted.items())
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(map(_is_like, found, wanted))
        )
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return is_number and math.isfinite(found)
