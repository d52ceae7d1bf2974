"""A DeepSpeed checkpoint as a source of named values: stages 0 to 3, and the universal format."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hadal.checkpoint.contents import BUFFER, MASTER, WEIGHT, SavedGroup, state_kind
from hadal.checkpoint.deepspeed import layouts
from hadal.checkpoint.deepspeed.folder import files_of
from hadal.checkpoint.deepspeed.layouts import TrainedValues, has_elements
from hadal.checkpoint.deepspeed.pickles import check_pickle, read_pickle
from hadal.checkpoint.files import copy_folder, inside, parsing_errors
from hadal.checkpoint.plain import encoded
from hadal.checkpoint.source import Entry, Source
from hadal.checkpoint.storage import Location
from hadal.config.optimizer import KINDS
from hadal.errors import CheckpointError, NotBuiltYetError

OWN_KEYS = frozenset(
    (
        *("module", "buffer_names", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"),
        *("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
        *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
        *("dp_world_size", "mp_world_size", "num_experts", "ds_autoep_layers"),
        *("checkpoint_parallel_dimensions", "ds_config", "ds_version"),
        "autotp_universal_checkpoint_info",
    )
)
"""DeepSpeed's own keys of the model states; all other keys are the caller's."""
_EXTRA_STATE = "_extra_state"
_LEFT_OUT = ("data_sampler", "random_ltd")


class _FileValue(NamedTuple):
    """A value in the files: flat slices whose concatenation starts with the value's elements."""

    entry: Entry
    pieces: Sequence[Tensor]


class DeepSpeedSource(Source):
    """A checkpoint that DeepSpeed's `save_checkpoint` or `ds_to_universal` wrote.

    One behind a URL is copied to a temporary directory of this machine (`TMPDIR`) until `close`. At
    stage 0 DeepSpeed saves its optimizer without names: `names` lists the parameters of each
    param group, in order; without it, and for experts or a pipeline at stage 0, the source has
    only weights and buffers. Experts have their numbers in the whole model.

    Raises:
        CheckpointError: a file is missing, damaged, or names something not known to be harmless.
        NotBuiltYetError: the format is not supported.
    """

    def __init__(
        self, folder: Location, names: Sequence[Sequence[str]] | None = None, part: int = 0
    ) -> None:
        self.path = folder
        self._values: dict[tuple[str, str], _FileValue] = {}
        with ExitStack() as stack:
            if not isinstance(folder, Path):
                # Its files are mapped into memory, which only a disk's can be.
                copy = Path(stack.enter_context(TemporaryDirectory(prefix="hadal-")))
                copy_folder(folder, copy)
            self.by_role = files_of(folder if isinstance(folder, Path) else copy)
            self._open(names)
            self._kept = stack.pop_all()

    def _open(self, names: Sequence[Sequence[str]] | None) -> None:
        models = [read_pickle(path) for path in self.by_role.model]
        experts = [read_pickle(path) for path in self.by_role.experts]
        rows = [read_pickle(path) for path in self.by_role.optimizer]
        layers = {number: read_pickle(path) for number, path in self.by_role.layers.items()}
        what = f"{self.path} cannot be understood as a DeepSpeed checkpoint, or is damaged"
        with parsing_errors(what):
            self._model: Mapping[str, Any] = models[0]
            if experts:
                self._add_experts(experts)
            if layers:
                self._add_layers(models, layers)
            self._read(models, [row["optimizer_state_dict"] for row in rows], names)

    def _read(
        self,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        names: Sequence[Sequence[str]] | None,
    ) -> None:
        model, files = self._model, self.by_role
        self.ranks_of_part = int(model["dp_world_size"])
        self.world_size = self.ranks_of_part * files.stages
        self.optimizer = _optimizer_of(model["ds_config"])
        kind = "" if files.values is None else " universal"
        self.writer = f"DeepSpeed {model.get('ds_version')}{kind}"
        if optimizers and len(optimizers) != self.world_size:
            raise CheckpointError(
                f"{self.path} was saved by {self.world_size} ranks and has the optimizer states of"
                f" {len(optimizers)}"
            )
        first = self._common_state(optimizers)
        self.stage = int(first.get("zero_stage", model["ds_config"]["zero_optimization"]["stage"]))
        self.schedule = model["lr_scheduler"]
        of_stages = [one["param_shapes"] or [] for one in models[: files.stages]]
        self._shapes: layouts.Shapes = [shapes for stage in of_stages for shapes in stage]
        self._enter_module(models)
        trained = self._trained(optimizers, first, names, of_stages)
        self._enter_trained(trained)
        self.groups = tuple(
            SavedGroup(encoded(options, "a param group"), tuple(row))
            for options, row in zip(trained.options, trained.names, strict=True)
        )
        self.state = {
            name: {key: _count(value) for key, value in values.items()}
            for name, values in trained.scalars.items()
        }
        self.aliases = self._aliases()
        self.entries = {key: value.entry for key, value in self._values.items()}
        self.scalars = self._scalars(first)
        rows = sorted((path.name, path.stat().st_size) for path in self.files)
        self.mark = f"{self.scalars['counters']} {zlib.crc32(repr(rows).encode()):08x}"

    def _add_experts(self, experts: Sequence[Mapping[str, Tensor]]) -> None:
        counts = self._model.get("num_experts")
        if isinstance(counts, list) and sum(counts) != len(experts):
            raise CheckpointError(
                f"{self.path} has the files of {len(experts)} experts, and its model states count"
                f" {sum(counts)}; copy all of its files"
            )
        module = dict(self._model["module"])
        for states in experts:
            module |= states
        self._model = {**self._model, "module": module}

    def _add_layers(self, models: Sequence[Any], layers: Mapping[int, Mapping[str, Any]]) -> None:
        """Add the weights of a pipeline's layers, except tied ones: these are read from masters."""
        if len(models) != self._model["mp_world_size"]:
            raise CheckpointError(
                f"{self.path} has the model states of {len(models)} stages of a pipeline of"
                f" {self._model['mp_world_size']}; copy all of its files"
            )
        trained = {name for one in models for row in one["param_shapes"] or () for name in row}
        tied = {name: name.split(".", 2)[2] for name in trained if name.startswith("tied_modules.")}
        module: dict[str, Any] = {}
        for number, own in layers.items():
            named = {f"{number}.{name}": value for name, value in own.items()}
            if trained.isdisjoint(named) and own.keys() & tied.values():
                known = {name: own[rest] for name, rest in tied.items() if rest in own}
                named = {name: value.new_empty(0) for name, value in known.items()}
            module |= named
        buffers = [name for one in models for name in one["buffer_names"]]
        self._model = {**self._model, "module": module, "buffer_names": buffers}

    def _common_state(self, optimizers: Sequence[Any]) -> Mapping[str, Any]:
        """Return the optimizer state that is common to all parameters."""
        if self.by_role.values is not None:
            state: Mapping[str, Any] = read_pickle(self.by_role.values / "optimizer_state.pt")
            return state
        return optimizers[0] if optimizers else self._model["optimizer"] or {}

    def _trained(
        self,
        optimizers: Sequence[Any],
        first: Mapping[str, Any],
        names: Sequence[Sequence[str]] | None,
        of_stages: Sequence[layouts.Shapes],
    ) -> TrainedValues:
        if (self.by_role.experts or self.by_role.layers) and not optimizers:
            if names is not None:
                raise NotBuiltYetError(
                    f"{self.path} is of a model with experts or of a pipeline at stage 0, where"
                    " DeepSpeed stores optimizer state without names, which is not read; pass"
                    " load_optimizer_states=False to load the weights alone"
                )
            return TrainedValues()
        if self.by_role.values is not None:
            return self._universal(self.by_role.values, first)
        if "fp32_flat_groups" in first:
            return layouts.cut_by_parameter(optimizers, self._shapes)
        if optimizers:
            config, each = self._model["ds_config"], self.ranks_of_part
            data_first = bool(config.get("use_data_before_expert_parallelism"))
            held = (optimizers[start : start + each] for start in range(0, len(optimizers), each))
            cut = partial(layouts.cut_evenly, data_first=data_first)
            return layouts.join_stages(list(map(cut, held, of_stages)))
        if first and names is not None:
            try:
                return layouts.whole(first, names, self._model["module"])
            except ValueError as error:
                raise CheckpointError(
                    f"{self.path} was saved at stage 0, where DeepSpeed stores optimizer state"
                    f" without names, and the param groups here do not fit: {error}. Use those of"
                    " the run that saved it, in the model's order, or pass"
                    " load_optimizer_states=False"
                ) from error
        return TrainedValues()

    def _universal(self, folder: Path, first: Mapping[str, Any]) -> TrainedValues:
        """Parse the universal format: a folder per parameter, with a file per kind of value."""
        inner = first.get("optimizer_state_dict", {}).get("state", {})
        counts = {k: v for row in inner.values() for k, v in row.items() if not has_elements(v)}
        found = TrainedValues(layouts.options_of(first), layouts.names_of(first, self._shapes))
        for shapes in self._shapes:
            for name in shapes:
                place = inside(folder, name)
                files = {path.stem: path for path in sorted(place.glob("*.pt"))}
                values = {key: self._universal_value(path) for key, path in files.items()}
                flat = values.pop("fp32").reshape(-1)
                found.add(name, flat, 0, flat.numel(), {**counts, **values})
        return found

    def _universal_value(self, path: Path) -> Any:
        value = read_pickle(path)
        return value["param"] if isinstance(value, dict) else value

    # ---- what there is ---------------------------------------------------------------------------

    def _enter_module(self, models: Sequence[Any]) -> None:
        """Enter buffers, weights that are not sharded, and the slices of frozen sharded weights."""
        buffers = set(self._model["buffer_names"])
        shared = self._model["shared_params"] or {}
        frozen = self._model["frozen_param_shapes"] or {}
        for name, value in self._model["module"].items():
            if not isinstance(value, Tensor) or name in dict(shared) or _is_extra(name):
                continue
            if name in buffers:
                self._enter(name, BUFFER, value.shape, value.dtype, [value])
            elif name in frozen:
                pieces = [model["frozen_param_fragments"][name] for model in models]
                self._enter(name, WEIGHT, frozen[name], value.dtype, pieces)
            elif value.numel() or not self._is_cut(name):
                self._enter(name, WEIGHT, value.shape, value.dtype, [value])

    def _is_cut(self, name: str) -> bool:
        """Return whether a trained parameter is sharded: its tensor in the module is then empty."""
        return any(prod(shapes[name]) for shapes in self._shapes if name in shapes)

    def _enter_trained(self, trained: TrainedValues) -> None:
        shapes = {name: shape for group in self._shapes for name, shape in group.items()}
        module = self._model["module"]
        for name, pieces in trained.masters.items():
            shape, dtype = shapes.get(name, module[name].shape), module[name].dtype
            if (name, WEIGHT) not in self._values:
                self._enter(name, WEIGHT, shape, dtype, pieces)
            if pieces[0].dtype != dtype:
                self._enter(name, MASTER, shape, pieces[0].dtype, pieces)
        for (name, key), pieces in trained.state.items():
            shape = self._values[name, WEIGHT].entry.shape
            self._enter(name, state_kind(key), shape, pieces[0].dtype, pieces)

    def _enter(
        self,
        name: str,
        kind: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: Sequence[Tensor],
    ) -> None:
        entry = Entry(tuple(int(length) for length in shape), dtype)
        flat = [piece.detach().reshape(-1) for piece in pieces]
        if any(piece.is_meta for piece in flat):
            raise ValueError(f"{kind} of {name} was saved from the device meta, without its values")
        found = sum(piece.numel() for piece in flat)
        # Only even slices have padding.
        if not entry.numel <= found < entry.numel + max(len(flat), 1):
            raise ValueError(f"{kind} of {name} has {found} elements of {entry.numel}")
        self._values[name, kind] = _FileValue(entry, flat)

    def _aliases(self) -> dict[str, str]:
        """Return tied names: those listed in the file, and those of tensors that share memory."""
        aliases = dict(self._model["shared_params"] or {})
        seen: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, value in self._model["module"].items():
            if isinstance(value, Tensor) and value.numel() and name not in aliases:
                source = seen.setdefault((value.data_ptr(), tuple(value.shape)), name)
                if source != name:
                    aliases[name] = source
                    self._values.pop((name, WEIGHT), None)
        return aliases

    def _scalars(self, first: Mapping[str, Any]) -> dict[str, Any]:
        model = self._model
        steps, config = int(model["global_steps"]), model["ds_config"]
        accumulation = config.get("gradient_accumulation_steps")
        if not isinstance(accumulation, int):
            micro = config.get("train_micro_batch_size_per_gpu")
            train = config.get("train_batch_size")
            known = isinstance(micro, int) and isinstance(train, int)
            accumulation = train // (micro * self.ranks_of_part) if known else 1
        counters = {key: int(model[key]) for key in ("global_samples", "skipped_steps")}
        return {
            "counters": {"micro_steps": steps * accumulation, "global_steps": steps, **counters},
            "scale": _scale(first),
        }

    # ---- reading ---------------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """Messages about state that a load does not restore."""
        notes = [
            "DeepSpeed wrote it, which saves neither random generators nor the training loader's"
            " position: these stay as they are"
        ]
        if (self.by_role.experts or self.by_role.layers) and not self.groups:
            notes.append(
                "of a model with experts or of a pipeline at stage 0 only the weights are read, in"
                " the dtype that it computed in: masters begin with these"
            )
        if self.stage == 0 and self.scalars["scale"][0] != 1 and self.state:
            notes.append(
                "at stage 0 in fp16 DeepSpeed divides gradients, and so the moments, by the loss"
                " scale once more than Hadal: the first updates will be too large; with"
                " load_optimizer_states=False the moments start at zero"
            )
        kept = [key for key in _LEFT_OUT if self._model.get(key) is not None]
        kept += [name for name in self._model["module"] if _is_extra(name)]
        if kept:
            notes.append(f"{' and '.join(kept)} {'is' if len(kept) == 1 else 'are'} ignored")
        return notes

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements of a value; a view of the mapped file if one slice holds them."""
        self.expect(name, kind, start, stop)
        entry, pieces = self._values[name, kind]
        found, offset = [], 0
        for piece in pieces:
            first, last = max(start - offset, 0), min(stop - offset, piece.numel())
            if first < last:
                found.append(piece[first:last])
            offset += piece.numel()
        whole = found[0] if len(found) == 1 else torch.cat([*found, pieces[0][:0]])
        return whole.to(entry.dtype)

    def client_state(self) -> dict[str, Any]:
        """Return the caller's own values."""
        return {key: value for key, value in self._model.items() if key not in OWN_KEYS}

    def close(self) -> None:
        """Close all files; remove the copies of those behind a URL."""
        self._values, self._model = {}, {}
        self._kept.close()

    def checks(self) -> Iterator[tuple[Callable[[], None], int]]:
        """Yield the comparison of each file with the checksums in it."""
        for path in self.files:
            yield partial(check_pickle, path), path.stat().st_size

    @property
    def files(self) -> Sequence[Path]:
        """All files of the checkpoint."""
        return self.by_role.all


def _optimizer_of(config: Mapping[str, Any]) -> str | None:
    """Return the configured optimizer's class name, as torch spells it; None: the caller's own."""
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else None
    if name is None:
        return None
    kinds = (kind for kind in KINDS.values() if kind.name.lower() == str(name).lower())
    return next((next(iter(kind.class_names)) for kind in kinds), str(name))


def _is_extra(name: str) -> bool:
    """Return whether an entry of a state dict is a module's extra state rather than a tensor."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def _count(value: Any) -> Any:
    """Convert a step count to torch's form: a 0-dim tensor, where DeepSpeed has a number."""
    return torch.tensor(float(value)) if isinstance(value, int) else value


def _scale(optimizer: Mapping[str, Any]) -> list[Any]:
    """Return the loss scale's state: scale, spare overflows, iteration, last overflow."""
    scaler = optimizer.get("loss_scaler")
    saved = dict(optimizer) if scaler is None else vars(scaler)
    return [
        float(saved.get("cur_scale", 1.0)),
        int(saved.get("cur_hysteresis", 1)),
        int(saved.get("cur_iter", 0)),
        int(saved.get("last_overflow_iter", -1)),
    ]
