"""A model as a list of layers; each stage builds its own layers."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hadal.comm import Ranks, init_distributed
from hadal.comm.faults import is_same_everywhere, raised_on_all
from hadal.errors import CheckpointError, MismatchError, NotBuiltYetError, UsageError, few
from hadal.plugins.pipeline.grid import PipelineParallelGrid, group_of
from hadal.plugins.pipeline.partition import Weigher, built_without_memory, cut, matches
from hadal.plugins.pipeline.specs import (
    Layer,
    LayerSpec,
    Tie,
    TiedLayerSpec,
    begin_equal,
    check_weights,
    groups_of,
    name_of,
    owners_of,
    sum_gradients,
)
from hadal.plugins.pipeline.topology import PipeDataParallelTopology, ProcessTopology

_log = logging.getLogger(__name__)

Seeding = Callable[[int], Any]

Recompute = Callable[..., Any]
"""Called with a function and its arguments; returns the function's result, and calls it again in
backward."""

# Programs derived from Megatron's; recomputing their other layers is useless.
_MEGATRON_MODELS = ("GPTModelPipe", "GPT2ModelPipe")
_LAYER_OF_MEGATRON = "ParallelTransformerLayerPipe"


class PipelineModule(nn.Module):
    """The layers of this rank's stage; each gets the output of the previous one.

    Parameters have the names of the whole model: `<index>.<name>` by the layer's index in the list,
    and `tied_modules.<key>.<name>`. All ranks must create it, with the same layers. Layers are
    built once, and only on their stage.

    Args:
        layers: descriptions (`LayerSpec`, `TiedLayerSpec`), modules, and functions of one argument.
        num_stages: the number of stages, if there is no `topology`.
        topology: the grid of ranks; by default stages times data-parallel ranks.
        loss_fn: called with the last layer's output and the labels; without it the last layer
            returns the loss.
        seed_layers: seed random numbers before each layer is built, and before it runs.
        seed_fn: called with the seed; by default torch's, numpy's and Python's generators get it.
        base_seed: the first seed.
        partition_method: "parameters", "uniform" or "type:PATTERN": see `hadal.pipeline.partition`.
        activation_checkpoint_interval: layers that are recomputed together in backward; 0: none.
        activation_checkpoint_func: the function that recomputes; by default Hadal's.
        checkpointable_layers: names of the classes that are recomputed; None: all with parameters.
        dynamic_shape: True if micro-batches have different shapes.
        chunks: parts of each stage, for the schedule "interleaved": with 2 stages of 2 chunks, the
            first stage has the first and the third quarter of the model.

    Raises:
        UsageError: the number of ranks does not fit the stages, a stage would be empty, or an
            argument is invalid.
        NotBuiltYetError: a PipelineModule is a layer.
        ChoiceError: the method is another one.
        MismatchError: the ranks were given different layers.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Seeding | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Recompute | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        init_distributed()
        world = Ranks.world()
        with raised_on_all(world, "PipelineModule"):
            self._topo = topology or _topology_of(num_stages, world.size)
            self._layer_specs = _checked(layers)
            if chunks < 1:
                raise UsageError(f"PipelineModule(chunks={chunks}): expected at least 1")
        self._find_stage(world)
        self.loss_fn = loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.checkpointable_layers = checkpointable_layers
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.dynamic_shape = dynamic_shape
        self.curr_layer: int | None = None
        """The layer that is running or ran last."""
        with raised_on_all(world, "PipelineModule"):
            self._parts_wanted = self.num_stages * chunks
            self._partition_layers(partition_method)
        self._check_same(world)
        self._forwards = [0] * chunks
        self._make_layer: Callable[[LayerSpec], nn.Module] = LayerSpec.build
        self._make_stage(world)
        if world.rank == 0:
            self._tell()

    # ---- building --------------------------------------------------------------------------------

    def _find_stage(self, world: Ranks) -> None:
        self._grid = PipelineParallelGrid(self._topo)
        self.num_stages = self._grid.pipe_parallel_size
        self.stage_id = self._grid.stage_id
        self.global_rank, self.world_size = world.rank, world.size

    def _make_stage(self, world: Ranks) -> None:
        """Build the layers of this rank's stage."""
        own = range(self.stage_id, self._parts_wanted, self.num_stages)
        self.chunks = [range(*self.parts[number : number + 2]) for number in own]
        """The layers of each chunk of this stage."""
        self.renamed: dict[nn.Parameter, str] = {}
        """Names in the whole model of parameters that have a different name on this stage."""
        self._functions: dict[int, Callable[[Any], Any]] = {}
        self.fwd_map: dict[str, int] = {}
        self.tied_modules = nn.ModuleDict()
        with raised_on_all(world, "PipelineModule"):
            self._build()
        self.tied_comms: dict[str, Tie] = self._tie()
        begin_equal(self.tied_comms)

    def restage(self, *, with_values: bool) -> None:
        """Replace the layers by those of this rank in the current world, for plans.

        They are built on the meta device, unless `with_values`.
        """
        for name in self.fwd_map:
            del self._modules[name]
        world = Ranks.world()
        self._find_stage(world)
        self.seed_layers = False
        self._make_layer = LayerSpec.build if with_values else built_without_memory
        self._make_stage(world)

    # Programs replace these two, under DeepSpeed's names, by splits of their own.

    def _partition_layers(self, method: str = "uniform") -> None:
        """Set `parts`: the bounds of each stage's layers."""
        self.parts = cut(
            self._layer_specs, self._parts_wanted, method, lambda _: self._count_layer_params()
        )

    def _count_layer_params(self) -> list[int]:
        """Return the weights of the layers for "parameters": their trainable elements."""
        return Weigher().weights(self._layer_specs)

    def _set_bounds(self, start: int | None = None, stop: int | None = None) -> None:
        """Do nothing: a stage's layers follow from `parts`."""

    def _find_layer_type(self, layername: str) -> list[int]:
        """Return the layers whose class or function matches a regular expression.

        Raises:
            UsageError: none does.
        """
        weights = matches(self._layer_specs, layername)
        return [index for index, found in enumerate(weights) if found]

    def _check_same(self, world: Ranks) -> None:
        names = [f"{name_of(layer)} {getattr(layer, 'key', '')}" for layer in self._layer_specs]
        if not is_same_everywhere(f"{names} {self.parts}", world):
            raise MismatchError(
                f"rank {world.rank} has a PipelineModule of {len(names)} layers"
                f" ({few(names)}) in parts {self.parts}, but another rank has"
                " different ones; pass the same list of layers on all ranks"
            )

    def _build(self) -> None:
        for place, index in enumerate(index for chunk in self.chunks for index in chunk):
            layer = self._layer_specs[index]
            if self.seed_layers:
                self._seed(self.base_seed + index)
            if isinstance(layer, TiedLayerSpec):
                self._functions[index] = self._built_tied(layer)
            elif isinstance(layer, LayerSpec | nn.Module):
                self.fwd_map[str(index)] = place
                module = layer if isinstance(layer, nn.Module) else self._built(layer)
                self.add_module(str(index), module)
                self._functions[index] = module
            else:
                self._functions[index] = layer

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """This stage's layers as functions, in order."""
        return list(self._functions.values())

    @property
    def micro_offset(self) -> int:
        """The forwards so far."""
        return self._forwards[0]

    def _built(self, spec: LayerSpec) -> nn.Module:
        spec.global_rank = self.global_rank
        return self._make_layer(spec)

    def _built_tied(self, spec: TiedLayerSpec) -> Callable[[Any], Any]:
        if spec.key not in self.tied_modules:
            module = self._built(spec)
            check_weights(spec.key, module, spec.tied_weight_attr)
            self.tied_modules[spec.key] = module
        found: nn.Module = self.tied_modules[spec.key]
        return found if spec.forward_fn is None else partial(spec.forward_fn, found)

    def _tie(self) -> dict[str, Tie]:
        """Return the tied modules of this stage that other stages have too."""
        found: dict[str, Tie] = {}
        for key, stages in owners_of(self._layer_specs, self.parts, self.num_stages).items():
            if len(stages) > 1 and self.stage_id in stages:
                ranks = group_of([self._grid.stage_to_global(stage) for stage in stages])
                specs = (one for one in self._layer_specs if isinstance(one, TiedLayerSpec))
                names = next(one.tied_weight_attr for one in specs if one.key == key)
                found[key] = Tie(key, self.tied_modules[key], tuple(names), ranks)
        return found

    def _seed(self, seed: int) -> None:
        (self.seed_fn or seed_all)(seed)

    def _tell(self) -> None:
        if self.seed_layers:
            function = "torch, numpy and random" if self.seed_fn is None else name_of(self.seed_fn)
            _log.info("each layer is seeded, from %d on (%s)", self.base_seed, function)
        for number in range(len(self.parts) - 1):
            _log.info("%s", self.chunk_name(number))
            for index in range(*self.parts[number : number + 2]):
                _log.info("  %3d: %s", index, name_of(self._layer_specs[index]))
        if self.loss_fn is not None:
            _log.info("  loss: %s", name_of(self.loss_fn))

    # ---- computing -------------------------------------------------------------------------------

    def forward(self, forward_input: Any, chunk: int = 0) -> Any:
        """Return the output of this stage's layers (of one chunk of them)."""
        value, offset = forward_input, self._forwards[chunk]
        self._forwards[chunk] += 1
        for layers, recompute in _calls_of(self, self.chunks[chunk]):
            run = partial(self._run_layers, layers, offset)
            if recompute is None:
                value = run(value)
            elif isinstance(value, tuple):
                value = recompute(run, *value)
            else:
                value = recompute(run, value)
        return value

    def _run_layers(self, layers: Sequence[int], offset: int, *values: Any) -> Any:
        value = values[0] if len(values) == 1 else values
        for index in layers:
            self.curr_layer = index
            if self.seed_layers:
                self._seed(self.base_seed * (offset + 1) + index)
            value = self._functions[index](value)
        return value

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute this many layers together; 0 recomputes none.

        Raises:
            UsageError: it is negative.
        """
        if interval < 0:
            raise UsageError(f"set_checkpoint_interval({interval}): expected 0 or more layers")
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> Mapping[str, Tensor] | None:
        """Return further losses of the last micro-batch by name, for reports; None if there are
        none.

        Subclasses override it. It is called on the last stage, after the loss.
        """
        return None

    def pair_of(self, batch: Any) -> Any:
        """Return the inputs and the labels of a micro-batch, which is that pair by default."""
        return batch

    def halves_of(self, batch: Any) -> Any:
        """Return the pair of a micro-batch that was read.

        Raises:
            UsageError: it is none.
        """
        pair = self.pair_of(batch)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(
                f"a micro-batch is a {type(pair).__name__}; expected a pair of inputs and labels."
                " set_batch_fn() takes a function that makes one"
            )
        return pair

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer of this stage in place, as `nn.Module.compile`."""
        for layer in self.children():
            for module in layer.children() if layer is self.tied_modules else (layer,):
                module.compile(*args, **kwargs)

    # ---- stages and layers -----------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """Return the grid of ranks."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Return this rank's groups."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    def partitions(self) -> list[int]:
        """Return the bounds of each stage's layers."""
        return self.parts

    @property
    def has_ties(self) -> bool:
        """True if any module is on several stages."""
        owners = owners_of(self._layer_specs, self.parts, self.num_stages)
        return any(len(stages) > 1 for stages in owners.values())

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that has a layer.

        Raises:
            UsageError: there is no such layer.
        """
        if not 0 <= layer_idx < len(self._layer_specs):
            raise UsageError(
                f"stage_owner({layer_idx}): the model has layers 0 to {len(self._layer_specs) - 1}"
            )
        number = next(n for n, stop in enumerate(self.parts[1:]) if layer_idx < stop)
        return number % self.num_stages

    def chunk_name(self, number: int) -> str:
        """Return a chunk of the model by its stage and layers, for messages."""
        first, stop = self.parts[number : number + 2]
        layers = f"layers {first} to {stop - 1}" if stop - first > 1 else f"layer {first}"
        return f"stage {number % self.num_stages} ({layers})"

    def layer(self, index: int) -> Callable[[Any], Any]:
        """Return a layer of this stage, by its index in the model."""
        return self._functions[index]

    def layer_name(self, index: int) -> str:
        """Return a layer and its class, for messages."""
        return f"layer {index} ({name_of(self._layer_specs[index])})"

    # ---- tied weights ----------------------------------------------------------------------------

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, dist.ProcessGroup]]:
        """Return each weight of this stage that other stages share, with the ranks that have it."""
        return groups_of(self.tied_comms)

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum the gradients of tied weights over their copies, if no engine trains them.

        An engine does so itself, and keeps gradients outside `.grad`.
        """
        sum_gradients(self.tied_comms)

    # ---- files of layers -------------------------------------------------------------------------

    def ckpt_prefix(self, checkpoints_path: str | Path, tag: object) -> str:
        """Return the common prefix of the paths of this rank's checkpoint files."""
        return _checkpoint_prefix(self._grid, checkpoints_path, tag)

    def ckpt_layer_path(self, ckpt_dir: str | Path, local_layer_idx: int) -> str:
        """Return the path of the file of one of this stage's layers."""
        return _layer_path(self._grid, ckpt_dir, self._own_index(local_layer_idx))

    def ckpt_layer_path_list(self, ckpt_dir: str | Path, local_layer_idx: int) -> list[str]:
        """Return the paths of the files of one of this stage's layers, one for each slice of it."""
        return _layer_paths(ckpt_dir, self._own_index(local_layer_idx))

    def save_state_dict(
        self, save_dir: str | Path, checkpoint_engine: Any, exclude_frozen_params: bool = False
    ) -> None:
        """Write a file for each layer of this stage, for programs that read these files.

        `checkpoint_engine` has `save(state, path)`; None uses torch's. Only the first of the ranks
        with the same layers writes.
        """
        if self._grid.data_parallel_id == 0:
            write = torch.save if checkpoint_engine is None else checkpoint_engine.save
            for index, module in self._own_modules():
                state = _layer_state(module, exclude_frozen=exclude_frozen_params)
                write(state, _layer_path(self._grid, save_dir, index))

    def load_state_dir(
        self, load_dir: str | Path, checkpoint_engine: Any, strict: bool = True
    ) -> None:
        """Load this stage's layers from files of layers, which any split into stages may have
        written.

        `checkpoint_engine` has `load(path, map_location=)`; None uses torch's.
        """
        for index, module in self._own_modules():
            _load_layer(self._grid, load_dir, index, module, checkpoint_engine, strict)
        begin_equal(self.tied_comms)

    def _own_index(self, place: int) -> int:
        """Return the index in the model of this stage's layer number `place`."""
        return list(self._functions)[place]

    def _own_modules(self) -> Iterable[tuple[int, nn.Module]]:
        """Yield this stage's layers that are called as modules, with their indices in the model."""
        for index, function in self._functions.items():
            if isinstance(function, nn.Module):
                yield index, function


def _topology_of(num_stages: int | None, size: int) -> ProcessTopology:
    if num_stages is None:
        raise UsageError("PipelineModule requires num_stages= or topology=; pass one of them")
    if num_stages < 1 or size % num_stages:
        raise UsageError(
            f"PipelineModule(num_stages={num_stages}): the number of stages must divide the number"
            f" of ranks, {size}"
        )
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=size // num_stages)


def _checked(layers: Iterable[Layer]) -> list[Layer]:
    found = list(layers)
    for index, layer in enumerate(found):
        if isinstance(layer, PipelineModule):
            raise NotBuiltYetError(
                f"layer {index} of a PipelineModule is a PipelineModule, which is not built yet;"
                " pass its layers"
            )
        if not callable(layer) and not isinstance(layer, LayerSpec):
            raise UsageError(
                f"layer {index} of a PipelineModule is a {type(layer).__name__}; expected a"
                " LayerSpec, a module or a function"
            )
    return found


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def recomputed(function: Callable[..., Any], *values: Any) -> Any:
    """Return `function(*values)`, and call it again in backward."""
    if not torch.is_grad_enabled():
        return function(*values)
    return checkpoint(function, *values, use_reentrant=False)


def _calls_of(
    module: PipelineModule, layers: Sequence[int]
) -> Iterator[tuple[Sequence[int], Recompute | None]]:
    """Yield groups of these layers, and how each is recomputed; None if it is not."""
    interval = module.activation_checkpoint_interval
    if interval == 0 or not torch.is_grad_enabled():
        yield layers, None
        return
    for start in range(0, len(layers), interval):
        some = layers[start : start + interval]
        wanted = _is_recomputed(module, [module.layer(index) for index in some])
        yield some, (module.activation_checkpoint_func or recomputed) if wanted else None


def _is_recomputed(module: PipelineModule, layers: Sequence[Callable[..., Any]]) -> bool:
    names = {type(layer).__name__ for layer in layers}
    if type(module).__name__ in _MEGATRON_MODELS:
        return names <= {_LAYER_OF_MEGATRON, *(module.checkpointable_layers or ())}
    if module.checkpointable_layers is not None:
        return names <= set(module.checkpointable_layers)
    # A function may hold a tied module.
    held = (getattr(layer, "args", (layer,)) for layer in layers)
    modules = (one for each in held for one in each if isinstance(one, nn.Module))
    return any(True for one in modules for _ in one.parameters())


# ---- files of single layers, in which DeepSpeed's programs store a pipeline ----------------------

_FILE_END = "model_states.pt"


def _checkpoint_prefix(grid: PipelineParallelGrid, folder: str | Path, tag: object) -> str:
    """Return the common prefix of the paths of one rank's checkpoint files."""
    place = grid.topology().get_rank_repr(grid.global_rank, omit_axes=("data",))
    return os.path.join(folder, str(tag), f"module{'-' * bool(place)}{place}")


def _layer_path(grid: PipelineParallelGrid, folder: str | Path, index: int) -> str:
    """Return the path of a layer's file; each rank with a slice of the layer has its own."""
    place = grid.topology().get_rank_repr(grid.global_rank)
    return os.path.join(folder, f"layer_{index:02d}{'-' * bool(place)}{place}-{_FILE_END}")


def _layer_paths(folder: str | Path, index: int) -> list[str]:
    """Return the paths of a layer's files that exist, one for each slice of it."""
    return sorted(map(str, Path(folder).glob(f"layer_{index:02d}-*{_FILE_END}")))


def _layer_state(module: nn.Module, *, exclude_frozen: bool) -> dict[str, Tensor]:
    """Return a copy of a layer's state: views would save the whole memory behind them."""
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    return {
        name: value.detach().clone()
        for name, value in module.state_dict().items()
        if not (exclude_frozen and name in frozen)
    }


def _load_layer(
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
    file = _layer_path(grid, folder, index)
    if not os.path.exists(file):
        found = ", ".join(_layer_paths(folder, index)) or "none"
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
