"""Models in stages: `pipeline.auto` splits a decoder, and a stage is prepared for its engine."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import reduce
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm import Ranks
from hadal.config import Config
from hadal.config.reading import read
from hadal.engine.arguments import InitializeArguments
from hadal.engine.parallel import plan_before_stages, size_asked_for
from hadal.errors import Fault, UsageError, raise_faults
from hadal.plugins.activation_checkpointing import Recomputation
from hadal.plugins.moe.blocks import find_blocks
from hadal.plugins.pipeline import PipelineModule, PipelineParallelGrid
from hadal.plugins.pipeline.decoder import DecoderModule
from hadal.plugins.pipeline.orders import check_schedule
from hadal.plugins.pipeline.topology import ProcessTopology
from hadal.plugins.sequence.cross_entropy import whole_value
from hadal.plugins.sequence.huggingface import attach
from hadal.plugins.sequence.loader import is_cut, padded, slice_of_rank
from hadal.plugins.sequence.tiles import IGNORED
from hadal.zero import sharded_init
from hadal.zero.boxes import Box
from hadal.zero.policy import STAGES
from hadal.zero.sharing import Tied

_SECTIONS = ("pipeline", "tensor_parallel", "expert_parallel", "sequence_parallel_size")


def cut_by_configuration(
    model: nn.Module | None, source: Any, arguments: InitializeArguments
) -> tuple[nn.Module | None, InitializeArguments]:
    """Return the model in stages, if `pipeline.auto` is set, and the arguments for this stage.

    All ranks must call it.

    Raises:
        ConfigError: the number of stages is missing, or the degrees do not fit the ranks.
        UsageError: the caller passed an optimizer over the whole model's parameters.
        ModelError: the model cannot be split.
    """
    _, raw = read(source)
    try:
        config = Config.model_validate({name: raw[name] for name in _SECTIONS if name in raw})
    except ValueError:
        return model, arguments  # reported with all other faults
    section = config.pipeline
    if not section.auto or model is None or isinstance(model, PipelineModule):
        return model, arguments
    topology = _topology(config, Ranks.world().size)
    _check(model, arguments)
    tensor, experts = config.tensor_parallel, config.expert_parallel
    plan = plan_before_stages(model, tensor) if tensor.is_on else None
    if experts.enabled:
        find_blocks(model, experts)  # a stage may have none
    method = "parameters" if section.partition == "best" else section.partition
    found = DecoderModule(
        model, topology=topology, partition_method=method, chunks=section.chunks, plan=plan
    )
    if config.sequence_parallel_size > 1:
        found.sequences = StageSequences(found.whole_model, found.mpu().sequence)
    own = set(found.parameters())
    given = arguments.model_parameters
    return found, arguments._replace(model_parameters=_own_among(given, own))


def _topology(config: Config, size: int) -> ProcessTopology:
    """Return the grid of ranks: slices of layers are nearest to each other, then sequences."""
    if config.pipeline.stages == "auto":
        why = '"auto", but pipeline.auto needs the number of stages'
        raise_faults([Fault("pipeline.stages", why)])
    stages, sequence = int(config.pipeline.stages), config.sequence_parallel_size
    slices = config.tensor_parallel.autotp_size if config.tensor_parallel.is_on else 1
    together = stages * sequence * slices
    if size % together:
        others = {"sequence_parallel_size": sequence, "tensor_parallel.autotp_size": slices}
        factors = "".join(f" x {count} of {key}" for key, count in others.items() if count > 1)
        why = f"{stages} stages{factors} need a multiple of {together} ranks, and there are {size}"
        raise_faults([Fault("pipeline.stages", why)])
    axes = {"pipe": stages, "data": size // together, "sequence": sequence, "model": slices}
    kept = {axis: count for axis, count in axes.items() if count > 1 or axis in ("pipe", "data")}
    return ProcessTopology(list(kept), list(kept.values()))


def _check(model: nn.Module, arguments: InitializeArguments) -> None:
    if isinstance(arguments.optimizer, Optimizer):
        raise UsageError(
            "initialize(optimizer=...) has parameters that other stages will hold; configure it in"
            " the optimizer section, or pass a function that builds it"
        )
    if any(sharded_init.sharing_at_init(parameter) is not None for parameter in model.parameters()):
        raise UsageError(
            "pipeline.auto: the model was made in zero.Init, and stages hold their weights whole;"
            " leave zero.Init out"
        )
    if size_asked_for(model) is not None:
        raise UsageError(
            "pipeline.auto: tp_model_init was called for the model, which will be cut into stages"
            " first; leave the call out, and set tensor_parallel.autotp_size"
        )


def _own_among(given: Any, own: Container[nn.Parameter]) -> Any:
    """Return the parameters, or param groups, without those of other stages."""
    if given is None:
        return None
    found: list[Any] = []
    for one in given:
        if isinstance(one, dict):
            found.append({**one, "params": [p for p in one["params"] if p in own]})
        elif one in own:
            found.append(one)
    return found


class StageSequences:
    """Slices of the sequences of a stage's micro-batches in training, and the loss of the whole.

    All ranks of a sequence read the same micro-batches. Its attention exchanges heads.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        attach(model, ranks.group, disable_in_eval=True)

    def cut(self, inputs: Mapping[str, Any], labels: Tensor) -> tuple[dict[str, Any], Any]:
        """Return this rank's slice of a micro-batch, and the labels that `loss` needs.

        Args:
            inputs: token ids [batch, length], and the model's other inputs.
            labels: [batch, length].
        """
        size, rank = self._ranks.size, self._ranks.rank
        whole = padded({**inputs, "labels": labels}, size)
        targets = whole["shift_labels"]
        count = (targets != IGNORED).sum().clamp(min=1)
        mine = {
            name: slice_of_rank(value, rank, size) if is_cut(value) else value
            for name, value in whole.items()
        }
        return mine, {"shift_labels": mine.pop("shift_labels"), "num_items_in_batch": count}

    def whole_loss(self, part: Tensor) -> Tensor:
        """Return the loss of whole sequences, with the gradient of this rank's part."""
        return whole_value(part, self._ranks.group)


# ---- stages and the configuration ----------------------------------------------------------------

# Features that see a whole model, or change its inputs but not the labels, which are elsewhere.
_UNBUILT = (
    "compression_training",
    "curriculum_learning",
    "data_efficiency.data_routing.random_ltd",
    "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_sampling.dynamic_batching",
    "eigenvalue",
    "flops_profiler",
    "progressive_layer_drop",
    "quantize_training",
)


def groups_of_stages(module: PipelineModule, mpu: Any) -> PipelineParallelGrid:
    """Return the groups of ranks of a model in stages.

    Raises:
        UsageError: the program passes other groups.
    """
    grid = module.mpu()
    if mpu is not None and mpu is not grid:
        raise UsageError(
            f"initialize(mpu={type(mpu).__name__}, model=PipelineModule): the module has groups of"
            " its own, by its topology; leave mpu out"
        )
    return grid


def prepare_stage(module: PipelineModule, config: Config) -> None:
    """Apply the configuration to a stage, and mark parameters that other stages hold too.

    Raises:
        ConfigError: keys that do not fit a pipeline.
        UsageError: this stage has nothing to train.
    """
    raise_faults(_faults(module, config))
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UsageError(
            f"{module.chunk_name(module.stage_id)} has no trainable parameters: use another"
            " partition_method, or fewer stages"
        )
    interval = config.pipeline.activation_checkpoint_interval
    if interval:
        module.set_checkpoint_interval(interval)
    if module.activation_checkpoint_func is None:
        slices = module.mpu().slices
        shared = slices if slices.size > 1 else None
        recomputation = Recomputation(config.activation_checkpointing, shared)
        module.activation_checkpoint_func = recomputation.call
    for parameter, name in module.renamed.items():
        parameter.hadal_box = Box.whole(name, tuple(parameter.shape))  # type: ignore[attr-defined]
    for key, tie in module.tied_comms.items():
        for parameter in tie.module.parameters():
            parameter.hadal_tied = Tied(key, tie.ranks)  # type: ignore[attr-defined]


def _faults(module: PipelineModule, config: Config) -> Iterator[Fault]:
    if STAGES[config.zero_optimization.stage].weights:
        yield Fault(
            "zero_optimization.stage",
            "3, but stages of a pipeline hold their weights whole: each micro-batch would gather"
            " them again; choose 0, 1 or 2",
        )
    if not config.managed_gradient_accumulation:
        yield Fault(
            "managed_gradient_accumulation",
            "false, but train_batch() counts the micro-batches of a pipeline; leave the key out",
        )
    if config.zero_optimization.groups:
        why = "not built yet for a model in stages, which may lack a group's modules; leave it out"
        yield Fault("zero_optimization.groups", why)
    stages = config.pipeline.stages
    if stages not in ("auto", module.num_stages):
        why = f"{stages}, but the PipelineModule has {module.num_stages} stages; leave the key out"
        yield Fault("pipeline.stages", why)
    yield from _faults_of_schedule(module, config)
    for path in _UNBUILT:
        section: Any = reduce(getattr, path.split("."), config)
        switch = "changes_modules" if path == "compression_training" else "enabled"
        if getattr(section, switch, False):
            yield Fault(path, "not built yet for a model in stages; switch it off")
    if module.has_ties and config.sparse_gradients:
        why = "true, but copies of tied weights on several stages add up dense gradients; leave out"
        yield Fault("sparse_gradients", why)


def _faults_of_schedule(module: PipelineModule, config: Config) -> Iterator[Fault]:
    path, schedule, chunks = "pipeline.schedule", config.pipeline.schedule, len(module.chunks)
    if (schedule == "interleaved") != (chunks > 1):
        yield Fault(
            path,
            f'"{schedule}", but PipelineModule has chunks={chunks}: use "interleaved" if and'
            " only if chunks >= 2",
        )
    if schedule == "interleaved" and module.num_stages == 1:
        yield Fault(path, '"interleaved" needs at least 2 stages; leave it and chunks out')
    try:
        check_schedule(schedule, config.gradient_accumulation_steps, module.num_stages)
    except UsageError as error:
        yield Fault("gradient_accumulation_steps", str(error))
