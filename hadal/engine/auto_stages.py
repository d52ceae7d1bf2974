"""`pipeline.auto`: splits a decoder into stages, together with other kinds of parallelism."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hadal.comm import Ranks
from hadal.config import Config
from hadal.config.reading import read
from hadal.engine.requested import InitializeArguments
from hadal.engine.tensor import plan_before_stages, size_asked_for
from hadal.errors import Fault, UsageError, raise_faults
from hadal.plugins.moe.blocks import find_blocks
from hadal.plugins.pipeline import PipelineModule
from hadal.plugins.pipeline.decoder import DecoderModule
from hadal.plugins.pipeline.topology import ProcessTopology
from hadal.plugins.sequence.batches import is_cut, padded, slice_of_rank
from hadal.plugins.sequence.huggingface import attach
from hadal.plugins.sequence.loss import whole_value
from hadal.plugins.sequence.tiles import IGNORED
from hadal.zero import sharded_init

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
    return found, replace(arguments, model_parameters=_own_among(given, own))


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
