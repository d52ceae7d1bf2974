"""The files of DeepSpeed's checkpoints by rank, for tools that convert them to fewer ranks.

A rank has three indices: its stage of the pipeline, its tensor-parallel part, its data-parallel
rank. Files are numbered in the order of the data-parallel rank, the stage, the part. Fewer ranks
each take the files of several, one after another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hadal.checkpoint.deepspeed.pickles import read_pickle
from hadal.compat.kinds import also
from hadal.compat.surface import modules
from hadal.errors import CheckpointError, UsageError

_FACTS = modules()["deepspeed.checkpoint.deepspeed_checkpoint"].constants
_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_LAYER = re.compile(_FACTS["LAYER_FILE_PREFIX_PATTERN"])
_DEGREES = "checkpoint_parallel_dimensions"


def get_files(dir: str | Path) -> list[str]:
    """Return the files in a folder and below it; none if there is no folder."""
    return sorted(str(path) for path in Path(dir).rglob("*") if path.is_file())


def get_files_with_prefix(all_files: Iterable[str], prefix: str) -> list[str]:
    """Return the files whose names begin so, in order."""
    return sorted(file for file in all_files if Path(file).name.startswith(prefix))


def get_zero_files(dir: str | Path) -> list[str]:
    """Return the files of the optimizer's states by data-parallel rank, then by model part."""
    found = ((_SHARD.search(file), file) for file in get_files(dir))
    numbered = sorted((int(each[1]), int(each[2]), file) for each, file in found if each)
    return [file for _, _, file in numbered]


@also(AssertionError)
def partition_data(data_list: Sequence[Any], num_partitions: int) -> list[list[Any]]:
    """Cut a list into equal parts.

    Raises:
        UsageError: its length is no multiple of their number.
    """
    size, rest = divmod(len(data_list), num_partitions)
    if rest:
        raise UsageError(
            f"{len(data_list)} files cannot be distributed evenly over {num_partitions} ranks;"
            " convert to a number of ranks that divides them"
        )
    return [list(data_list[at * size : (at + 1) * size]) for at in range(num_partitions)]


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Join the states of two ranks: tensors end to end, numbers and others are the first's.

    Raises:
        ValueError: they differ in kind or in length.
    """
    if type(state_a) is not type(state_b):
        raise ValueError(f"{'.'.join(key_list)}: {type(state_a)} and {type(state_b)} do not merge")
    if isinstance(state_a, Tensor) and state_a.dim():  # else a count, the same on all ranks
        return torch.cat([state_a, state_b])
    if isinstance(state_a, dict):
        both = {
            k: merge_state(state_a[k], state_b[k], [*key_list, str(k)])
            for k in state_a.keys() & state_b
        }
        return type(state_a)({**state_a, **state_b, **both})
    if isinstance(state_a, (list, tuple)):
        pairs = zip(state_a, state_b, strict=True)
        return type(state_a)(merge_state(a, b, key_list) for a, b in pairs)
    return state_a


@dataclass
class SubparamShape:
    """The parts of a fused weight: what a model's `universal_checkpoint_info` tells of it."""

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


@dataclass
class meg_2d_parallel_map:
    """File numbers by stage and part."""

    pp_degree: int
    tp_degree: int
    map: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """Return the files of a rank, of all stages or of all parts."""
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        parts = range(self.tp_degree) if tp_index is None else [tp_index]
        return [at for stage in stages for part in parts for at in self.map[stage, part]]


def reshape_meg_2d_parallel(
    old_pp_degree: int,
    old_tp_degree: int,
    new_pp_degree: int,
    new_tp_degree: int,
    verbose: bool = False,
) -> meg_2d_parallel_map:
    """Return the files of each of fewer ranks: parts are joined first, then stages."""
    ranks = range(old_pp_degree * old_tp_degree)
    stages = [partition_data(own, new_tp_degree) for own in partition_data(ranks, old_pp_degree)]
    found = {}
    for part in range(new_tp_degree):
        joined = [at for parts in stages for at in parts[part]]
        for stage, share in enumerate(partition_data(joined, new_pp_degree)):
            found[stage, part] = share
    return meg_2d_parallel_map(new_pp_degree, new_tp_degree, found)


@dataclass
class model_3d_desc:
    """The numbers of stages, of tensor-parallel parts and of data-parallel ranks."""

    pp_degree: int = 1
    tp_degree: int = 1
    dp_degree: int = 1

    @also(AssertionError)
    def reshape(
        self, target_3d_desc: model_3d_desc, verbose: bool = False
    ) -> list[meg_2d_parallel_map]:
        """Return the files of each of fewer ranks, one map for each data-parallel rank.

        Raises:
            UsageError: there are more ranks of a kind, or they do not divide the files.
        """
        possible, faults = self.can_reshape(target_3d_desc)
        if not possible:
            raise UsageError(f"the checkpoint cannot be converted: {', '.join(faults)}")
        stages, parts = target_3d_desc.pp_degree, target_3d_desc.tp_degree
        flat = reshape_meg_2d_parallel(self.pp_degree, self.tp_degree, stages, parts)
        found = [meg_2d_parallel_map(stages, parts) for _ in range(target_3d_desc.dp_degree)]
        step = self.pp_degree * self.tp_degree
        for place, numbers in flat.map.items():
            files = [at + rank * step for at in numbers for rank in range(self.dp_degree)]
            for one, share in zip(found, partition_data(files, len(found)), strict=True):
                one.map[place] = share
        return found

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Return whether the target has no more ranks of any kind, and the faults."""
        sizes = zip(
            ("PP", "TP", "DP"), vars(self).values(), vars(target_3d_desc).values(), strict=True
        )
        faults = [f"{name}: {old} to {new} would be more" for name, old, new in sizes if new > old]
        return not faults, faults


@also(AssertionError, RuntimeError)
def get_model_3d_descriptor(dir: str | Path) -> model_3d_desc:
    """Return the ranks that wrote a checkpoint.

    Raises:
        CheckpointError: its files contradict each other.
    """
    files = get_files(dir)
    models = get_files_with_prefix(files, "mp_rank_")
    return _ranks_of(dir, files, [(file, read_pickle(Path(file))) for file in models])


def _ranks_of(
    dir: str | Path, files: Sequence[str], models: Sequence[tuple[str, Mapping[str, Any]]]
) -> model_3d_desc:
    told = {file: state.get(_DEGREES) for file, state in models}
    if any(told.values()):
        lost = [file for file, degrees in told.items() if degrees is None]
        if lost:
            raise CheckpointError(f"{_DEGREES} is missing from model-state files: {lost}")
        pairs = {(each["pp_degree"], each["tp_degree"]) for each in told.values() if each}
        if len(pairs) > 1:
            raise CheckpointError(f"{_DEGREES} disagrees across model-state files: {told}")
        ((stages, parts),) = pairs
    else:
        parts = len(get_files_with_prefix(files, "layer_01-"))
        stages = len(models) // parts if parts else 1
        parts = parts or len(models)
    shards, each = len(get_zero_files(dir)), stages * parts
    if not each or each != len(models) or shards % each:
        raise CheckpointError(
            f"{dir}: {len(models)} files mp_rank_* and {shards} of optimizers do not fit {stages}"
            f" stages of {parts} parts; pass a whole folder that DeepSpeed wrote with ZeRO 1 or 2"
        )
    return model_3d_desc(stages, parts, max(1, shards // each))


class ZeROCheckpoint:
    """The optimizer's states of a checkpoint, by rank."""

    @also(AssertionError, RuntimeError)
    def __init__(self, dir: str | Path, source_3d: model_3d_desc | None = None) -> None:
        self.dir, self.file_list = dir, get_zero_files(dir)
        self.num_files = len(self.file_list)
        if not self.num_files:
            raise CheckpointError(f"{dir} has no files *zero_pp_rank_*_optim_states.pt")
        self.src_3d = get_model_3d_descriptor(dir) if source_3d is None else source_3d
        self.reshape(self.src_3d)

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Set the ranks that `get_state_for_rank` is asked for."""
        self.target_3d = target_3d_desc
        self._maps = self.src_3d.reshape(target_3d_desc)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return a rank's files."""
        return [self.file_list[at] for at in self._maps[dp_index].get_data(pp_index, tp_index)]

    def get_src_tp_degree(self) -> int:
        """Return the tensor-parallel parts of the ranks that wrote it."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Return the stages of the ranks that wrote it."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Return the data-parallel ranks that wrote it."""
        return self.src_3d.dp_degree

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> Any:
        """Return a rank's states, joined from its files; without the padding at their ends."""
        made: Any = None
        for file in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = read_pickle(Path(file))
            state = {name: value for name, value in state.items() if name not in keys_to_ignore}
            optimizer = state.get("optimizer_state_dict") or {}
            if strip_tensor_paddings and "group_paddings" in optimizer:
                _strip(optimizer)
            made = state if made is None else merge_state(made, state)
        optimizer = made.get("optimizer_state_dict") or {}
        if counts := optimizer.get("partition_count"):
            optimizer["partition_count"] = [self.target_3d.dp_degree] * len(counts)
        return made


def _strip(optimizer: dict[str, Any]) -> None:
    """Remove the padding of each group's tensors."""
    paddings = optimizer["group_paddings"]
    for at, values in optimizer.get("base_optimizer_state", {}).get("state", {}).items():
        for name, value in values.items():
            if name != "step" and isinstance(value, Tensor) and paddings[at]:
                values[name] = value[: -paddings[at]].clone()
    optimizer["group_paddings"] = [0] * len(paddings)


class DeepSpeedCheckpoint:
    """A checkpoint of DeepSpeed's as fewer ranks would have it; by default as it was written.

    Args:
        dir: the folder of a tag.
        tp_degree: the tensor-parallel parts.
        pp_degree: the stages of the pipeline.
        dp_degree: the data-parallel ranks.
        final_layer_norm_idx: the index of the last layer norm among the pipeline's layers.

    Raises:
        CheckpointError: files are missing, or contradict each other.
    """

    @also(AssertionError, RuntimeError)
    def __init__(
        self,
        dir: str | Path,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = -1,
    ) -> None:
        self.dir, self.final_layer_norm_idx = dir, final_layer_norm_idx
        self.file_list = get_files(dir)
        self.mp_rank_files = get_files_with_prefix(self.file_list, "mp_rank_")
        models = [(file, read_pickle(Path(file))) for file in self.mp_rank_files]
        if not models:
            raise CheckpointError(f"{dir} has no files mp_rank_*_model_states.pt")
        self.global_state: dict[str, Any] = dict(models[0][1])
        source = _ranks_of(dir, self.file_list, models)
        self.zero_checkpoint = ZeROCheckpoint(dir, source)
        self.pp_degree = pp_degree or source.pp_degree
        self.tp_degree = tp_degree or source.tp_degree
        self.dp_degree = dp_degree or source.dp_degree
        target = model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree)
        self.original_world_size, self.world_size = source.world_size(), target.world_size()
        self.zero_checkpoint.reshape(target)
        self.new_2d_map = reshape_meg_2d_parallel(
            source.pp_degree, source.tp_degree, self.pp_degree, self.tp_degree
        )
        self.layer_files = [file for file in self.file_list if _LAYER.fullmatch(Path(file).name)]
        keys = {Path(file).name.partition("-")[0] for file in self.layer_files}
        self.layer_keys = sorted(keys, key=lambda key: int(key.partition("_")[2]))
        self._layers = [
            get_files_with_prefix(self.layer_files, f"{key}-") for key in self.layer_keys
        ]
        self.layer_count = len(self.layer_keys)
        self.pp_to_transformer_map = dict(enumerate(self._of_stages(self.layer_keys)))
        self.transformer_file_map = {
            (part, stage): [partition_data(files, self.tp_degree)[part] for files in share]
            for stage, share in enumerate(self._of_stages(self._layers))
            for part in range(self.tp_degree)
        }
        self.tp_to_embedding_map = self._by_part(0)
        self.tp_to_final_norm_map = self._by_part(final_layer_norm_idx)

    def _of_stages(self, layers: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the layers between the embedding and the last norm, by stage."""
        inner = layers[1 : self.final_layer_norm_idx]
        size = len(inner) // self.pp_degree
        return [inner[at * size : (at + 1) * size] for at in range(self.pp_degree)]

    def _by_part(self, layer: int) -> dict[int, list[str]]:
        return (
            dict(enumerate(partition_data(self._layers[layer], self.tp_degree)))
            if self._layers
            else {}
        )

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> Any:
        """Return a rank's states of the optimizer."""
        place = pp_index, tp_index, dp_index
        return self.zero_checkpoint.get_state_for_rank(
            *place, ["param_shapes"], strip_tensor_paddings
        )

    def get_iteration(self) -> int:
        """Return the program's count of updates; 0 if it saved none."""
        return int(self.global_state.get("iteration", 0))

    def get_args(self) -> Any:
        """Return the program's arguments, if it saved them."""
        return self.global_state.get("args")

    def get_checkpoint_info(self, info_key: str = "checkpoint_info") -> Any:
        """Return another value that the program saved; None if it did not."""
        return self.global_state.get(info_key)

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Return the files of a rank's model states."""
        return [self.mp_rank_files[at] for at in self.new_2d_map.get_data(pp_index, tp_index)]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> Any:
        """Return a rank's model states."""
        first, *others = map(_read, self.get_2d_parallel_files(tp_index, pp_index))
        for other in others:
            first = merge_state(first, other)
        return first

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """Return a part's first layer."""
        return _joined(self.tp_to_embedding_map[tp_index])

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """Return the last norm, which all parts have whole."""
        return dict(_read(self.tp_to_final_norm_map[tp_index][0]))

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """Return the layers of a rank."""
        return [_joined(files) for files in self.transformer_file_map[tp_index, pp_index]]


def _read(file: str) -> Any:
    return read_pickle(Path(file))


def _joined(files: Sequence[str]) -> dict[str, Any]:
    """Return a layer of several parts: biases after sums and norms are whole in each of them."""
    states = [_read(file) for file in files]
    return {
        name: value
        if name in _FACTS["SEQUENTIAL_LAYERS"]
        else torch.cat([state[name] for state in states], _FACTS["LAYER_CONCAT_DIM"].get(name, 0))
        for name, value in states[0].items()
    }
