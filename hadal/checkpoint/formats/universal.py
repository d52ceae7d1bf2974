"""Writing of DeepSpeed's universal format: a folder for each parameter, with a file for each value.

From any source, so that DeepSpeed continues at any stage and number of ranks what Hadal began; and
from DeepSpeed's own checkpoints of stages 1 to 3, file for file as its converter does.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hadal.checkpoint.contents import BUFFER, MASTER, WEIGHT, SavedGroup, state_key
from hadal.checkpoint.deepspeed.folder import LATEST_UNIVERSAL
from hadal.checkpoint.deepspeed.layouts import EXPERT
from hadal.checkpoint.deepspeed.pickles import STAND_INS, Attributes, read_pickle
from hadal.checkpoint.deepspeed.source import OWN_KEYS, DeepSpeedSource
from hadal.checkpoint.export import Progress, fill, read_whole, untold, values_to_export
from hadal.checkpoint.files import inside, is_file, replace_file, system_errors, torch_save_errors
from hadal.checkpoint.formats.drafts import drafted_folder
from hadal.checkpoint.huggingface import Value
from hadal.checkpoint.live import COUNTERS
from hadal.checkpoint.plain import decoded
from hadal.checkpoint.source import Source
from hadal.checkpoint.storage import Location
from hadal.errors import CheckpointError, NotBuiltYetError, few

VERSION = "0.19.8"
"""The release of DeepSpeed whose format this is: it asks for one when it loads."""
MODEL_STATES = "mp_rank_00_model_states.pt"
_MODEL_STATES_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""The name under which stage 3 looks for the same file."""
_FP32, _STEP = "fp32", "step"
_COMMON = "zero/optimizer_state.pt"
"""The file of what is common to all parameters."""


def is_universal(folder: Location) -> bool:
    """Return whether a folder is a checkpoint in the universal format."""
    return is_file(folder / _COMMON)


def export_universal(
    source: Source, folder: Location, *, strict: bool = True, progress: Progress = untold
) -> Location:
    """Write a checkpoint in the universal format, and `latest_universal` in its parent.

    One parameter's value is in memory at a time; `progress` is called with the bytes of each. A
    checkpoint of DeepSpeed becomes, file for file, what `ds_to_universal` makes of it; `strict`
    raises if a pattern of `universal_checkpoint_info`, which programs such as Megatron-DeepSpeed
    put into the client state, matches no parameter. Returns the folder.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the files cannot be written.
        NotBuiltYetError: it holds what the format has no place for.
    """
    if is_universal(source.path):
        raise CheckpointError(f"{source.path} is in the universal format already")
    if not source.groups:
        raise CheckpointError(
            f"{source.path} holds no optimizer state with names; the universal format needs it"
        )
    patterns = _Patterns(source.client_state().get("universal_checkpoint_info") or {}, source.path)
    with drafted_folder(folder, _COMMON) as draft:
        # Its converter gives experts of different ranks one name, and a pipeline no tied weights.
        if isinstance(source, DeepSpeedSource) and not (
            source.by_role.experts or source.by_role.layers
        ):
            _convert(source, draft, patterns, progress)
        else:
            _write(source, draft, patterns, progress)
        if strict:
            patterns.expect_matches()
    folder = folder.absolute() if isinstance(folder, Path) else folder
    replace_file(folder.parent / LATEST_UNIVERSAL, folder.name)
    return folder


def nbytes_of_universal(source: Source) -> int:
    """Return the number of bytes that an export reports to its `progress`."""
    return sum(4 * entry.numel for (_, kind), entry in source.entries.items() if kind != MASTER)


# ---- from any source -----------------------------------------------------------------------------


def _write(source: Source, draft: Path, patterns: _Patterns, progress: Progress) -> None:
    zero = draft / "zero"
    kinds = trained_kinds(source)
    for name in kinds:
        for stem, value in _values_of(source, name, kinds[name]):
            write_named(patterns.described(name, value), inside(zero, name) / f"{stem}.pt")
            progress(value.nbytes)
        for key, value in source.state.get(name, {}).items():
            write_named(value, inside(zero, name) / f"{key}.pt")
    for (name, kind), entry in source.entries.items():
        if kind in (WEIGHT, BUFFER) and name not in kinds:
            value = read_whole(source, Value(name, entry.shape, torch.float32, kind))
            write_named({"param": value}, inside(zero, name) / f"{_FP32}.pt")
            progress(value.nbytes)
    for alias, name in source.aliases.items():
        shutil.copytree(inside(zero, name), inside(zero, alias), copy_function=_link)
    groups = list(_split_groups(source.groups))
    write_named(optimizer_state(source, groups), draft / _COMMON)
    scratch = draft / ".module"
    write_named(model_states(source, groups, module_of(source, scratch)), draft / MODEL_STATES)
    shutil.rmtree(scratch)
    _link(str(draft / MODEL_STATES), str(draft / _MODEL_STATES_3))


def trained_kinds(source: Source) -> dict[str, list[str]]:
    """Return the kinds of values of each trained parameter, its most precise weight first."""
    names = [name for group in source.groups for name in group.names]
    kinds = {name: [MASTER if (name, MASTER) in source.entries else WEIGHT] for name in names}
    for name, kind in source.entries:
        if name in kinds and state_key(kind) is not None:
            kinds[name].append(kind)
    return kinds


def _link(origin: str, target: str) -> None:
    """Give a file another name; where the file system cannot, copy it."""
    try:
        Path(target).hardlink_to(origin)
    except OSError:
        shutil.copyfile(origin, target)


def _values_of(source: Source, name: str, kinds: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a trained parameter's values in fp32, with the stems of their files."""
    shape = source.entries[name, WEIGHT].shape
    for kind in kinds:
        entry = source.entries[name, kind]
        if entry.shape != shape:
            raise NotBuiltYetError(
                f"{source.path}: {kind} of {name} has shape {entry.shape}, but the universal format"
                f" has a place only for state of the parameter's shape {shape}"
            )
        value = Value(name, shape, torch.float32, kind)
        yield state_key(kind) or _FP32, read_whole(source, value)


def _split_groups(groups: Sequence[SavedGroup]) -> Iterator[SavedGroup]:
    """Yield the param groups, and then their experts in groups of their own, as there."""
    for of_experts in (False, True):
        for group in groups:
            names = [name for name in group.names if bool(EXPERT.match(name)) == of_experts]
            if names or not (group.names or of_experts):
                yield SavedGroup(group.options, tuple(names))


def optimizer_state(source: Source, saved: Sequence[SavedGroup]) -> dict[str, Any]:
    """Return the state that is common to all parameters, for every stage that may load it."""
    stage = source.stage or 0
    groups = [
        {**dict(decoded(group.options)), "params": [number]} for number, group in enumerate(saved)
    ]
    states = ([source.state.get(name, {}) for name in group.names] for group in saved)
    steps = [next((one[_STEP] for one in some if _STEP in one), None) for some in states]
    scale = _scale(source)
    return {
        **({} if scale is None else {"loss_scaler": scale}),
        "dynamic_loss_scale": isinstance(scale, _DYNAMIC),
        "overflow": False,
        "zero_stage": stage,
        "group_paddings": [0] * len(groups),
        "param_alignment_paddings": [[0] * len(group.names) for group in saved],
        "partition_count": [source.world_size // source.parts] * len(groups),
        "ds_version": VERSION,
        "param_groups": groups,
        # Stage 3 looks here.
        "optimizer_state_dict": {
            "state": {
                number: {} if step is None else {_STEP: step} for number, step in enumerate(steps)
            },
            "param_groups": groups,
        },
    }


def _scale(source: Source) -> Any:
    """Return the loss scale as DeepSpeed's object; None if the checkpoint has none.

    A checkpoint holds what has become of the scale, not its settings: these are DeepSpeed's
    defaults.
    """
    if not isinstance(source.scalars, dict) or "scale" not in source.scalars:
        return None
    scale, spare, iteration, last_overflow = source.scalars["scale"]
    weights = {entry.dtype for (_, kind), entry in source.entries.items() if kind == WEIGHT}
    if torch.float16 not in weights or not iteration:
        found = _LOSS_SCALER()
        vars(found).update(cur_scale=scale, dynamic=False)
        return found
    found = _DYNAMIC()
    vars(found).update(
        cur_scale=scale,
        dynamic=True,
        cur_iter=iteration,
        last_overflow_iter=last_overflow,
        scale_factor=2.0,
        scale_window=1000,
        min_scale=1,
        delayed_shift=2,
        cur_hysteresis=spare,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )
    return found


def model_states(
    source: Source, groups: Sequence[SavedGroup], module: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return rank 0's model states with these weights and buffers, tied ones under all names."""
    scalars = source.scalars if isinstance(source.scalars, dict) else {}
    counters = scalars.get(COUNTERS, {})
    steps, micro = counters.get("global_steps", 0), counters.get("micro_steps", 0)
    shapes = [
        {name: torch.Size(source.entries[name, WEIGHT].shape) for name in group.names}
        for group in groups
    ]
    states = {
        "module": dict(module) | {alias: module[name] for alias, name in source.aliases.items()},
        "buffer_names": [name for name, kind in source.entries if kind == BUFFER],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "shared_params": dict(source.aliases),
        "frozen_param_fragments": None,
        "lr_scheduler": source.schedule,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": counters.get("skipped_steps", 0),
        "global_steps": steps,
        "global_samples": counters.get("global_samples", 0),
        "dp_world_size": source.world_size // source.parts,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {
            "gradient_accumulation_steps": max(micro // max(steps, 1), 1),
            "optimizer": {"type": source.optimizer},
            "zero_optimization": {"stage": source.stage or 0},
        },
        "ds_version": VERSION,
    }
    client_state = source.client_state()
    if taken := sorted(map(str, OWN_KEYS & client_state.keys())):
        raise CheckpointError(
            f"{source.path}: client_state has the keys {few(taken)}, which DeepSpeed uses for its"
            " own state; save the checkpoint with other keys"
        )
    return {**states, **client_state}


def module_of(source: Source, scratch: Path) -> dict[str, Tensor]:
    """Return all weights and buffers in their own dtypes, each in the memory of a file."""
    scratch.mkdir()
    module = {}
    for number, value in enumerate(values_to_export(source)):
        whole = torch.empty(0, dtype=value.dtype)
        if value.numel:
            place = str(scratch / str(number))
            whole = torch.from_file(place, shared=True, size=value.numel, dtype=value.dtype)
            fill(whole, source, value)
        module[value.name] = whole.view(value.shape)
    return module


# ---- from a checkpoint of DeepSpeed --------------------------------------------------------------


def _convert(source: DeepSpeedSource, draft: Path, patterns: _Patterns, progress: Progress) -> None:
    zero = draft / "zero"
    model = read_named(source.by_role.model[0])
    optimizer = read_named(source.by_role.optimizer[0])["optimizer_state_dict"]
    kinds = trained_kinds(source)
    state = optimizer.get("base_optimizer_state", {}).get("state", {})
    stage = source.stage or 0
    for number, group in enumerate(source.groups):
        for name in group.names:
            for stem, value in _values_of(source, name, kinds[name]):
                described = patterns.described(name, value)
                # At stage 3 a file is the value alone, end to end.
                entry = value.view(-1) if stage == 3 else described
                write_named(entry, inside(zero, name) / f"{stem}.pt")
                progress(value.nbytes)
            step = state.get(number, {}).get(_STEP) if stage < 3 else None
            if step is not None:
                write_named(step, inside(zero, name) / f"{_STEP}.pt")
    if stage < 3:
        for name, value in model["module"].items():
            place = inside(zero, name) / f"{_FP32}.pt"
            if isinstance(value, Tensor) and not place.exists():
                write_named({"param": value.float()}, place)
                progress(4 * value.numel())
    write_named(_common_state(optimizer), draft / _COMMON)
    for path in source.by_role.model:
        with system_errors(draft / path.name, "written"):
            shutil.copy2(path, draft)


def _common_state(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's optimizer state without the parts that are in the parameters' folders."""
    sharded = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")
    inner = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    kept = {key: value for key, value in optimizer.items() if key not in sharded}
    return {**kept, "param_groups": inner["param_groups"]}


class _Patterns:
    """The patterns of `universal_checkpoint_info`: how a parameter was split over tensor ranks."""

    _KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
        ("tp_replicated_parameter_patterns", {}),
        ("parameter_to_average_patterns", {}),
        ("parameter_with_2_sub_params_cat_dim_0", {"cat_dim": 0, "param_n_sub_params": 2}),
        ("parameter_with_row_parallelism_patterns", {"cat_dim": 1}),
    )
    _VOCABULARY = "vocabulary_parameter_patterns"

    def __init__(self, info: Mapping[str, Any], path: Location) -> None:
        if info.get("parameter_with_sub_params") or info.get("affine_map"):
            raise NotBuiltYetError(
                f"{path} has parameters made of sub-parameters of different sizes, which is not"
                " supported yet; convert it with DeepSpeed"
            )
        self._info, self._path = info, path
        kinds = (*(kind for kind, _ in self._KINDS), self._VOCABULARY)
        self._unused = {one for kind in kinds for one in info.get(kind, [])}

    def _match(self, kind: str, name: str) -> bool:
        found = [one for one in self._info.get(kind, []) if re.match(one, name)]
        self._unused.difference_update(found)
        return bool(found)

    def expect_matches(self) -> None:
        """Raise if a pattern has matched no parameter."""
        if self._unused:
            raise CheckpointError(
                f"{self._path}: {few(sorted(self._unused))} in universal_checkpoint_info match no"
                " parameter; correct them, or convert with --no_strict"
            )

    def described(self, name: str, value: Tensor) -> dict[str, Any]:
        """Return a value with what another number of tensor ranks has to know."""
        found = next(
            (more for kind, more in self._KINDS if self._match(kind, name)), {"cat_dim": 0}
        )
        entry: dict[str, Any] = dict(found)
        if self._match(self._VOCABULARY, name):
            value = value[: self._info["original_vocab_size"]].clone()
            entry["vocab_tensor"] = True
        return {**entry, "param": value}


# ---- pickles with another library's names --------------------------------------------------------


class _Number(int):
    """A member of an enumeration, by its number."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self),)


def _named(name: str, base: type) -> type:
    """Return a stand-in of its own for one name, so that it is written under that name."""
    module, _, leaf = name.rpartition(".")
    return type(leaf, (base,), {"__module__": module, "__qualname__": leaf})


_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_BASES = {
    f"{_SCALER}.LossScaler": Attributes,
    f"{_SCALER}.DynamicLossScaler": Attributes,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Number,
    "deepspeed.utils.tensor_fragment.fragment_address": Attributes,
}
_OWN = {name: _named(name, base) for name, base in _BASES.items()}
_LOSS_SCALER = _OWN[f"{_SCALER}.LossScaler"]
_DYNAMIC = _OWN[f"{_SCALER}.DynamicLossScaler"]


# The one in Python, which asks for the name of each class; stubs do not describe it.
_Base: Any = pickle._Pickler


class _Pickler(_Base):  # type: ignore[misc]
    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write the name of a class; that of a stand-in need not be importable here."""
        if isinstance(obj, type) and issubclass(obj, (Attributes, _Number)):
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


_MODULE = ModuleType("pickle_of_names")
vars(_MODULE)["Pickler"] = _Pickler


def read_named(path: Path) -> Any:
    """Return the contents of a file as `read_pickle` does, for `write_named` to write again.

    Raises:
        CheckpointError: as `read_pickle`.
    """
    return read_pickle(path, {**STAND_INS, **_OWN})


def write_named(value: Any, path: Path) -> None:
    """Write a file with `torch.save`; objects of stand-ins are written under the names they have.

    Raises:
        CheckpointError: it cannot be written.
    """
    with torch_save_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path, pickle_module=_MODULE)
