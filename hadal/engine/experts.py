"""Experts that are distributed over ranks: their groups, which must exist before their buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from hadal.checkpoint.live import plain_name
from hadal.comm import Ranks
from hadal.comm.ranks import (
    expert_groups,
    expert_tables,
    make_expert_groups,
    size_in_name,
)
from hadal.config import Config
from hadal.engine.checks import is_in_stages
from hadal.engine.topology import RequestedRanks, Topology, with_slices
from hadal.errors import Fault, NotBuiltYetError, raise_faults
from hadal.zero.boxes import ATTRIBUTE, Box
from hadal.zero.sharded_init import sharing_at_init
from hadal.zero.sharing import holders_of

if TYPE_CHECKING:
    from hadal.plugins.pipeline import PipelineModule


def make_groups_of_experts(model: nn.Module, config: Config, topology: Topology) -> None:
    """Make the groups that the model's parameters name. All ranks must call it together.

    Other names are the program's own, which makes them itself. Each expert's parameters say which
    expert of the whole model it is, for checkpoints.

    Raises:
        UsageError: a number of ranks does not divide those with the same dense parameters.
    """
    names = {holders_of(parameter).experts for parameter in model.parameters()}
    found = (size_in_name(name) for name in names if name is not None)
    sizes = sorted(size for size in found if size is not None)
    for size in sizes:
        make_expert_groups(
            size, topology.sharding, data_first=config.use_data_before_expert_parallelism
        )
    if any(size > 1 for size in sizes):
        for parameter, box in _boxes(model):
            setattr(parameter, ATTRIBUTE, box)


def _boxes(model: nn.Module) -> Iterator[tuple[nn.Parameter, Box]]:
    """Yield this rank's expert parameters, and their place in the whole model."""
    from hadal.plugins.moe.blocks import DistributedExperts  # for this alone
    from hadal.plugins.moe.layer import MOELayer

    for path, module in model.named_modules():
        if isinstance(module, MOELayer) and module.ep_size > 1:
            first = expert_groups(module.ep_group_name).parallel.rank * module.num_local_experts
            for number, expert in enumerate(module.experts.deepspeed_experts, first):
                for name, parameter in expert.named_parameters():
                    whole = f"{path}.experts.deepspeed_experts.{number}.{name}"
                    yield parameter, Box.whole(plain_name(whole), tuple(parameter.shape))
        elif isinstance(module, DistributedExperts):
            rank = expert_groups(module.expert_group_name).parallel.rank
            for name, parameter in module.named_parameters():
                shape = (module.total_experts, *parameter.shape[1:])
                offsets = (rank * len(parameter), *(0 for _ in parameter.shape[1:]))
                whole = plain_name(f"{path}.{name}")
                yield parameter, Box(whole, shape, offsets, tuple(parameter.shape))


def distribute_experts(
    model: nn.Module, config: Config, requested: RequestedRanks, ranks: Ranks
) -> None:
    """Keep only this rank's slice of the model's experts, if `expert_parallel` is enabled.

    Raises:
        ConfigError: the ranks cannot share experts evenly.
        ModelError: the model has no such blocks, or their sizes do not fit.
        NotBuiltYetError: an mpu splits the model over ranks, or it was created sharded.
    """
    section = config.expert_parallel
    if not section.enabled:
        return
    grid = None
    if is_in_stages(model):
        grid, model = model.mpu(), _whole_model(model)
    elif requested.cuts_the_model:
        raise NotBuiltYetError(
            "expert_parallel.enabled: with an mpu whose ranks hold parts of the model it is not"
            " built yet; leave the section out, or replace the mpu by tensor_parallel.autotp_size"
        )
    if any(sharing_at_init(parameter) is not None for parameter in model.parameters()):
        raise NotBuiltYetError(
            "expert_parallel.enabled: for models whose parameters were created sharded (zero.Init)"
            " it is not built yet; create the model outside of it"
        )
    size, slices = section.autoep_size, with_slices(requested, config).tensor_parallel_size
    # Consecutive ranks hold slices of the same layers; they all have the same experts.
    copies, number = ranks.size // slices, ranks.rank // slices
    if grid is not None:
        copies, number = grid.sharing.size, grid.sharing.rank
    if copies % size:
        path = "expert_parallel.autoep_size"
        is_part = copies < ranks.size
        alike = f" (of {ranks.size}) that hold the same dense parameters" if is_part else ""
        raise_faults([Fault(path, f"{size} does not divide the {copies} ranks{alike}; lower it")])
    from hadal.plugins.moe.blocks import ExpertPlace, distribute  # for this alone

    data_first = config.use_data_before_expert_parallelism
    parallel, _ = expert_tables(range(copies), size, data_first=data_first)
    mine = next(group for group in parallel if number in group)
    place = ExpertPlace(size, mine.index(number))
    distribute(model, section, place, may_have_none=grid is not None)


def _whole_model(module: PipelineModule) -> nn.Module:
    from hadal.plugins.pipeline.decoder import DecoderModule  # for this alone

    if not isinstance(module, DecoderModule):
        raise NotBuiltYetError(
            "expert_parallel.enabled: finding blocks of experts in the layers of a PipelineModule"
            " is not built yet; make them with hadal.moe.MoE(ep_size=) and leave the section out,"
            " or let pipeline.auto cut a model of transformers"
        )
    return module.whole_model
