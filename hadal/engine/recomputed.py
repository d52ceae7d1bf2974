"""The modules that the section `activation_checkpointing` recomputes."""

from __future__ import annotations

import logging

import torch
from torch import nn

from hadal.config import Config
from hadal.config.report import written
from hadal.device import total_memory
from hadal.errors import ConfigError, Fault
from hadal.zero.grouping import repeated_blocks

_log = logging.getLogger(__name__)
_PATH = "activation_checkpointing.modules"


def recomputed_modules(config: Config, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules to recompute by full name; none if the configuration names none.

    Raises:
        ConfigError: a pattern matches nothing, or a module would be recomputed twice.
    """
    section = config.activation_checkpointing
    wish = "units" if section.modules is None and section.memory_budget else section.modules
    if wish is None:
        return {}
    from hadal.plugins.activation_checkpointing import (  # for this alone
        chosen,
        recomputed_elsewhere,
    )

    found, faults = chosen(model, wish, repeated_blocks(model))
    twice = recomputed_elsewhere(model, list(found))
    faults += [Fault(_PATH, twice)] if twice is not None else []
    if faults:
        raise ConfigError(written("the configuration", tuple(faults)), tuple(faults))
    return found


def budget_of(config: Config, device: torch.device) -> int | None:
    """Return the bytes that may be in use on a device; None if nothing limits them."""
    budget = config.activation_checkpointing.memory_budget
    if budget is None:
        return None
    return int(budget * total_memory(device).total) if budget <= 1 else int(budget)


def log_recomputed(config: Config, found: dict[str, nn.Module]) -> None:
    """Log which modules are recomputed, or that the section waits for calls of the program."""
    section = config.activation_checkpointing
    if found:
        names = list(found)
        some = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        _log.info("%s: %d modules are recomputed (%s)", _PATH, len(names), some)
    elif section.asks:
        _log.warning(
            "activation_checkpointing: without `modules` the section applies only to calls of"
            ' deepspeed.checkpointing.checkpoint; "modules": "units" recomputes every block'
        )
