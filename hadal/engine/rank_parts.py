"""One rank's part of a model, made as `initialize` makes it, for ranks that need not exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hadal.comm import Ranks
from hadal.comm.imagined import ImaginedWorld
from hadal.config import Config
from hadal.engine.activations import copied
from hadal.engine.apply import change_modules, cut_model, plan_for_ranks
from hadal.engine.arguments import InitializeArguments
from hadal.engine.checks import is_in_stages
from hadal.engine.topology import (
    RequestedRanks,
    make_groups,
    requested_ranks,
    stages_of,
    with_slices,
)


class RankPart:
    """The part of a model that one rank holds, on the meta device, or with values on the CPU.

    Args:
        model: the whole model, or one in stages, or one that is a part among the program's groups.
        config: the configuration.
        ranks: all ranks.
        stage: its stage of a pipeline, of which the first rank is meant.
        requested: the program's own groups.
        with_values: copy values.

    Raises:
        ConfigError, ModelError, UsageError, NotBuiltYetError: as `initialize`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        ranks: int,
        stage: int,
        requested: RequestedRanks,
        *,
        with_values: bool,
    ) -> None:
        # Stages are the slowest axis of a grid of ranks, unless a program has one of its own.
        first = ranks // stages_of(config) * stage
        if is_in_stages(model):
            first = model.mpu().stage_to_global(stage)
        self.world = ImaginedWorld(first, ranks)
        """A context in which its ranks exist."""
        with self.world:
            world = Ranks.world()
            device = torch.device("cpu" if with_values else "meta")
            part: Any = copied(model, device, with_values=with_values)
            if is_in_stages(part):
                part.restage(with_values=with_values)
            elif config.pipeline.auto:
                from hadal.engine import stages  # for this alone

                nothing = InitializeArguments(None, None, None, None, None)
                part, _ = stages.cut_by_configuration(part, config.as_dict(), nothing)
            if is_in_stages(part):
                from hadal.engine import stages  # for this alone

                stages.prepare_stage(part, config)
                requested = requested_ranks(part.mpu(), None, world)
            self.topology = make_groups(with_slices(requested, config), config, world)
            self.modules = plan_for_ranks(part, config, requested, self.topology, world)
            change_modules(part, self.modules)
            cut_model(part, None, self.modules, config, self.topology, world)
        self.model: nn.Module = part
