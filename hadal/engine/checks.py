"""Checks before an engine is made: on each rank alone, then between the ranks."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from hadal.checkpoint.files import location_of
from hadal.comm import Ranks
from hadal.comm.collectives import gather_objects
from hadal.comm.faults import is_same_everywhere, raised_on_all
from hadal.config import Config
from hadal.config.section import leaves
from hadal.config.zero_optimization import ZeroOptimization
from hadal.errors import (
    CheckpointError,
    ConfigError,
    Fault,
    MismatchError,
    ModelError,
    OffloadError,
    OptimizerError,
    UsageError,
    few,
    raise_faults,
)
from hadal.offload.file import OwnFolder
from hadal.zero import access, sharded_init
from hadal.zero.layout import order_of
from hadal.zero.parameters import is_foreign, refusal_of
from hadal.zero.sharing import Sharing

if TYPE_CHECKING:
    from hadal.plugins.pipeline import PipelineModule

_log = logging.getLogger(__name__)

_SCHEDULED = ("max_train_batch_size", "micro_batch_sizes", "version")


def check_model(model: object) -> nn.Module:
    """Return `model`; raise `UsageError` unless it is a module."""
    if isinstance(model, type):
        hint = f" (did you mean {model.__name__}()?)" if issubclass(model, nn.Module) else ""
        raise UsageError(
            f"model must be a torch.nn.Module instance, got the class {model.__name__}{hint}"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module instance, got {type(model).__name__}")
    return model


def check_accelerate(ranks: Ranks, device: torch.device) -> None:
    """Check that Accelerate, which the Hugging Face Trainer uses, counts the same processes.

    It shards data and chooses the process that writes files. If only its state was created, the
    program may not use it for either, and this is a warning.

    Raises:
        UsageError: an `Accelerator` counts other processes.
    """
    state: Any = sys.modules.get("accelerate.state")
    number = state and state.PartialState._shared_state.get("num_processes")
    if number in (None, ranks.size):
        return
    remedy = (
        "On CPUs pass use_cpu=True to TrainingArguments, or call accelerate.PartialState(cpu=True)"
        " before Accelerator()"
        if device.type == "cpu"
        else "It counts those of a launcher that sets LOCAL_RANK, such as hadal run"
    )
    message = (
        f"accelerate counts {number} process{'es' * (number != 1)}, expected {ranks.size} ranks:"
        f" whatever it shards, such as the Trainer's data, is the same on several ranks. {remedy}"
    )
    if state.AcceleratorState._shared_state:
        raise UsageError(message)
    if ranks.rank == 0:
        _log.warning("%s", message)


def check_parameters(
    named: Iterable[tuple[str, nn.Parameter]], device: torch.device, ranks: Ranks
) -> None:
    """Raise `ModelError` for a parameter that ranks, or this one, cannot hold or train."""
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"rank {ranks.rank}: parameter {name} has no shape yet; run its module once first"
            )
        if access.is_kept_by_engine(parameter):
            raise UsageError(
                f"rank {ranks.rank}: parameter {name} belongs to another engine, one of"
                " another model or one that is gone; call its destroy() first, or build the model"
                " anew"
            )
        refusal = refusal_of(parameter, trains=parameter.requires_grad)
        if refusal is not None:
            raise ModelError(f"rank {ranks.rank}: parameter {name} {refusal}")
        if _has_holes(parameter):
            raise ModelError(
                f"rank {ranks.rank}: parameter {name} of shape {tuple(parameter.shape)} has strides"
                f" {parameter.stride()}: it is expanded, overlaps itself or has holes; expected one"
                " that fills its memory (contiguous, channels_last or permuted). Call"
                " `parameter.data = parameter.contiguous()` first"
            )
        if parameter.device.type == "meta":
            raise ModelError(
                f"rank {ranks.rank}: parameter {name} is on meta and has no values; initialize it"
                " (model.to_empty(device=...), then its values), or build the model inside"
                " hadal.zero.Init()"
            )
        misplaced = parameter.device.type not in ("cpu", device.type)
        elsewhere = parameter.device.type == device.type != "cpu" and parameter.device != device
        if misplaced or elsewhere:
            raise ModelError(
                f"rank {ranks.rank}: parameter {name} is on {parameter.device}, expected {device}"
                f" or the cpu; move it with .to({str(device)!r}) first"
            )


def _has_holes(parameter: nn.Parameter) -> bool:
    """Return whether a parameter's elements leave gaps in memory or overlap."""
    if is_foreign(parameter) or sharded_init.sharing_at_init(parameter) is not None:
        return False
    return order_of(parameter.shape, parameter.stride()) is None


def check_birth(
    named: Iterable[tuple[str, nn.Parameter]],
    sharing_of: Callable[[nn.Parameter], Sharing],
    zero: ZeroOptimization,
) -> None:
    """Raise `UsageError` for a parameter created sharded for a different setup."""
    for name, parameter in named:
        born, sharing = sharded_init.sharing_at_init(parameter), sharing_of(parameter)
        ranks = sharing.ranks
        if born is not None and born.ranks.numbers != ranks.numbers:
            raise UsageError(
                f"parameter {name} was created sharded over ranks {born.ranks.numbers}, but is"
                f" trained on ranks {ranks.numbers}; pass hadal.zero.Init the same mpu= as"
                " initialize"
            )
        near = None if born is None else born.node
        if near is not None and (sharing.node is None or near.numbers != sharing.node.numbers):
            raise UsageError(
                f"parameter {name} was created with zero_param_parallel_group= ranks"
                f" {near.numbers}; set zero_optimization.zero_hpz_partition_size {near.size} and"
                " stage 3, or leave the group out"
            )
        for key in sharded_init.required_keys(parameter):
            if not getattr(zero, key):
                raise UsageError(
                    f"parameter {name} was created with {key}=True; set"
                    f" zero_optimization.{key} true, or leave it out of hadal.zero.Init"
                )


def check_same_versions(ranks: Ranks) -> None:
    """Raise MismatchError if ranks run different versions of Hadal or torch.

    By torch's own collective, because the messages of two versions may differ.
    """
    from hadal import __version__  # the package has not finished its import when this file is read

    mine = {"hadal": __version__, "torch": str(torch.__version__)}
    if not is_same_everywhere(json.dumps(mine), ranks, is_by_torch=True):
        theirs = gather_objects(mine, ranks)
        raise MismatchError(_first_difference("version", theirs, ranks.numbers))


def check_same_keys(config: Config, ranks: Ranks) -> None:
    """Raise MismatchError if ranks have different configurations."""
    compare("configuration", _texts(_common(config)), ranks)


def _common(config: Config) -> dict[str, Any]:
    """Return the keys that must be the same on all ranks.

    Ranks may have different disks, and different objects for groups of ranks.
    """
    values = config.as_dict()
    degree = {**values["tensor_parallel"]["tp"], "mpu": None, "tp_group": None}
    values["tensor_parallel"] = {**values["tensor_parallel"], "tp": degree}
    zero = values["zero_optimization"]
    for name in ("offload_param", "offload_optimizer"):
        if zero.get(name):
            zero[name] = {**zero[name], "nvme_path": None}
    return values


def check_same(
    model: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    described: dict[str, Any],
    ranks: Ranks,
    world: Ranks,
) -> None:
    """Raise MismatchError if ranks of the same part have different models, groups or arguments.

    Parts of a model may differ; each is compared among its own `ranks`.
    """
    group_of = {id(p): number for number, members in enumerate(groups) for p in members}
    parameters = {
        name: f"{described_parameter(p)} in param group {group_of.get(id(p))}"
        for name, p in model.named_parameters()
    }
    with raised_on_all(world, "initialize"):
        compare("configuration", _texts(described), ranks)
        compare("model", parameters, ranks)


def described_parameter(parameter: nn.Parameter) -> str:
    """Describe everything that must be the same on every rank."""
    strides = "" if parameter.is_contiguous() else f" strides {parameter.stride()}"
    return (
        f"{tuple(parameter.shape)}{strides} {parameter.dtype}"
        f" requires_grad={parameter.requires_grad}"
    )


def _texts(values: dict[str, Any]) -> dict[str, str]:
    return {path: json.dumps(value, default=str) for path, value in leaves(values)}


def compare(what: str, mine: dict[str, str], ranks: Ranks) -> None:
    """Raise MismatchError if ranks describe `what` differently."""
    if not is_same_everywhere(json.dumps(mine), ranks):
        theirs = gather_objects(mine, ranks)
        raise MismatchError(_first_difference(what, theirs, ranks.numbers))


def _first_difference(what: str, by_rank: Sequence[dict[str, str]], numbers: Sequence[int]) -> str:
    first = by_rank[0]
    for rank, other in zip(numbers[1:], by_rank[1:], strict=True):
        for name in [*first, *(key for key in other if key not in first)]:
            here, there = first.get(name, "nothing"), other.get(name, "nothing")
            if here != there:
                return (
                    f"the ranks have different {what}s: {name} is {here} on rank {numbers[0]}"
                    f" and {there} on rank {rank}. Use the same {what} on every rank."
                )
    return f"the ranks have the same {what} in different orders; build it the same on every rank"


def check_groups(optimizer: Optimizer, known: Sequence[nn.Parameter], rank: int) -> None:
    """Raise `OptimizerError` if the optimizer holds a parameter that the model does not have, or
    another optimizer with param groups of its own.
    """
    groups = {id(group) for group in optimizer.param_groups}
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer) and not groups.issuperset(map(id, inner.param_groups)):
            raise OptimizerError(
                f"{type(optimizer).__name__}.{name} is an {type(inner).__name__} with param groups"
                " of its own, which would change no weight: the engine's masters are put into the"
                " groups of the optimizer it is given. Share them and the state:"
                f" self.param_groups = [*self.{name}.param_groups, ...];"
                f" self.state = self.{name}.state = ..."
            )
    in_model = {id(parameter) for parameter in known}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in in_model:
                raise OptimizerError(
                    f"rank {rank}: parameter {index} of param group {number}"
                    f" ({tuple(parameter.shape)}, {parameter.dtype}) is not a parameter of the"
                    " model. Make the optimizer after the model has its final form and device."
                )


def members_of_groups(
    model: nn.Module, optimizer: Optimizer | None, ranks: Ranks
) -> list[list[nn.Parameter]]:
    """Return the model's parameters that will be trained, per param group."""
    everything = list(model.parameters())
    if optimizer is None:
        return []
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"the optimizer callable returned a {type(optimizer).__name__}, expected a"
            " torch.optim.Optimizer"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise OptimizerError(
            f"{type(optimizer).__name__} was not initialised as a torch.optim.Optimizer; let its"
            " constructor call super().__init__(params, defaults)"
        )
    check_groups(optimizer, everything, ranks.rank)
    groups = []
    for group in optimizer.param_groups:
        groups.append([p for p in group["params"] if p.requires_grad])
    return groups


def check_scores(model: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Refuse an optimizer without the scores that pruning learns.

    Raises:
        UsageError: it was made before `init_compression`.
    """
    trained = {parameter for group in groups for parameter in group}
    named = model.named_parameters()
    others = [name for name, p in named if p.requires_grad and p not in trained]
    if not others or not trained:
        return
    from hadal.plugins.compression.layers import is_score  # for this alone

    found = list(filter(is_score, others))
    if found:
        raise UsageError(
            f"pruning learns scores that the optimizer does not train: {', '.join(found[:3])}"
            f" ({len(found)} in all); call init_compression before the parameters for the"
            " optimizer are collected"
        )


def warn_untrained(
    model: nn.Module, groups: Sequence[Sequence[nn.Parameter]], *, is_chosen: bool
) -> None:
    """Warn of parameters that require gradients but are not trained, and of a model with none.

    Args:
        model: the model.
        groups: per param group, the parameters that are trained.
        is_chosen: True if the caller or the configuration names an optimizer.
    """
    trained = {id(parameter) for members in groups for parameter in members}
    named = list(model.named_parameters())
    asking = [name for name, p in named if p.requires_grad]
    left_out = [name for name, p in named if p.requires_grad and id(p) not in trained]
    if not is_chosen:
        # A model that is to be evaluated needs no optimizer.
        if asking and model.training:
            _log.warning(
                "neither initialize nor the configuration names an optimizer: initialize returns"
                " None for it. If backward is called, the engine trains with a default one. Name"
                ' one in the configuration ("optimizer": {"type": "AdamW", "params": {"lr":'
                " ...}}), or call model.eval() before initialize if the model is only evaluated"
            )
    elif not asking and named and model.training:
        _log.warning(
            "there is nothing to train: an optimizer is named, but all %d parameters of the model"
            " are frozen. Call requires_grad_(True) on those to be trained before initialize, or"
            " model.eval() if the model is only evaluated",
            len(named),
        )
    elif left_out:
        _log.warning(
            "%d of %d parameters that require gradients are in no param group and are not trained:"
            " %s. Give them to the optimizer (or to model_parameters), or freeze them"
            " (requires_grad_(False))",
            len(left_out),
            len(asking),
            few(left_out, 4),
        )


def check_places(config: Config) -> None:
    """Check that the configured locations of checkpoints can be used.

    Raises:
        ConfigError: a URL's scheme is unknown, or the package for it is not installed; or a local
            path is not a directory.
    """
    section, found = config.checkpoint, []
    if section.on_signal is not None and section.on_signal.save_dir is not None:
        try:
            location_of(section.on_signal.save_dir)
        except CheckpointError as error:
            found.append(Fault("checkpoint.on_signal.save_dir", str(error)))
    if section.staging.folder is not None:
        try:
            if not isinstance(location_of(section.staging.folder), Path):
                raise CheckpointError(
                    f"{section.staging.folder} is a URL; name a directory of a local disk"
                )
            OwnFolder(Path(section.staging.folder), "checkpoint.staging.folder").remove()
        except (CheckpointError, OffloadError) as error:
            found.append(Fault("checkpoint.staging.folder", str(error)))
    raise_faults(found)


def check_scheduler(config: Config, variable: str | None) -> None:
    """Raise if a scheduler of elastic jobs expects another batch than the configuration's."""
    section = config.elasticity
    if section is None or not section.enabled or variable is None:
        return
    name = "DEEPSPEED_ELASTICITY_CONFIG"
    try:
        theirs = json.loads(variable)
        scheduled = {key: theirs[key] for key in _SCHEDULED}
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the variable {name} must hold the `elasticity` section as JSON, with"
            f" {', '.join(_SCHEDULED)}; found {variable!r} ({error!r})"
        ) from None
    for key, value in scheduled.items():
        own = getattr(section, key)
        own = list(own) if isinstance(own, tuple) else own
        if own != value:
            raise ConfigError(
                f"elasticity.{key}: {own}, but the scheduler expects {value} ({name}); make them"
                " equal"
            )


def is_in_stages(model: Any) -> TypeGuard[PipelineModule]:
    """Return whether a model is a `PipelineModule`, without importing that class."""
    known = sys.modules.get("hadal.plugins.pipeline.module")
    return known is not None and isinstance(model, known.PipelineModule)


def check_without_stages(config: Config, rank: int) -> None:
    """Warn, on rank 0, of keys that have no effect on a model without stages.

    Raises:
        ConfigError: the configuration requests stages.
    """
    stages = config.pipeline.stages
    if stages != "auto" and stages > 1:
        raise ConfigError(
            f"pipeline.stages: {stages}, but the model is no PipelineModule; set pipeline.auto to"
            " true to cut a causal language model of transformers, or leave the key out"
        )
    if config.pipeline.activation_checkpoint_interval and rank == 0:
        _log.warning(
            "pipeline.activation_checkpoint_interval acts on a PipelineModule alone, and the model"
            " is none: nothing is recomputed by it; see activation_checkpointing.modules"
        )
