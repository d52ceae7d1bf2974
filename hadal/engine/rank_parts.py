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
from hadal.engine.topology import make_groups, requested_ranks, stages_of, with_slices
from hadal.errors import NotBuiltYetError


class RankPart:
    """The part of a model that one rank holds, on the meta device, or with values on the CPU.

    Args:
        model: the whole model.
        config: the configuration.
        ranks: all ranks.
        stage: its stage of a pipeline, of which the first rank is meant.
        with_values: copy values.

    Raises:
        ConfigError, ModelError, UsageError, NotBuiltYetError: as `initialize`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        ranks: int,
        stage: int = 0,
        *,
        with_values: bool = False,
    ) -> None:
        if is_in_stages(model):
            raise NotBuiltYetError(
                "planning a PipelineModule is not built yet: each rank builds other layers of it;"
                " plan a model of transformers with pipeline.auto"
            )
        if config.pipeline.auto and config.sequence_parallel_size > 1:
            raise NotBuiltYetError(
                "planning a pipeline whose ranks also share sequences (pipeline.auto with"
                " sequence_parallel_size) is not built yet: their exchanges would be missing; plan"
                " it without one of the two"
            )
        # Stages are the slowest axis of a grid of ranks.
        self.world = ImaginedWorld(ranks // stages_of(config) * stage, ranks)
        """A context in which its ranks exist."""
        with self.world:
            world, mpu = Ranks.world(), None
            device = torch.device("cpu" if with_values else "meta")
            part: Any = copied(model, device, with_values=with_values)
            if config.pipeline.auto:
                from hadal.engine import stages  # for these alone

                nothing = InitializeArguments(None, None, None, None, None)
                part, _ = stages.cut_by_configuration(part, config.as_dict(), nothing)
                mpu = stages.groups_of_stages(part, None)
                stages.prepare_stage(part, config)
            requested = requested_ranks(mpu, None, world)
            self.topology = make_groups(with_slices(requested, config), config, world)
            self.modules = plan_for_ranks(part, config, requested, self.topology, world)
            change_modules(part, self.modules)
            cut_model(part, None, self.modules, config, self.topology, world)
        self.model: nn.Module = part
