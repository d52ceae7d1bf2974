"""Contradictions of the batch and the accumulation boundary."""

from __future__ import annotations

from collections.abc import Iterator

from hadal.config.rules.rule import reading
from hadal.config.top_level import Config
from hadal.errors import Fault

_MANAGED = "managed_gradient_accumulation"
_STAGE = "zero_optimization.stage"
_OVERLAP = "zero_optimization.overlap_comm"


@reading(_MANAGED, _STAGE, _OVERLAP)
def _unmanaged_overlap(config: Config) -> Iterator[Fault]:
    zero = config.zero_optimization
    if not config.managed_gradient_accumulation and zero.overlap_comm and zero.stage < 2:
        yield Fault(_MANAGED, f"false needs stage 2 or 3, or {_OVERLAP} false")


@reading(_MANAGED, "compile.deepcompile", "amp.enabled")
def _unmanaged_elsewhere(config: Config) -> Iterator[Fault]:
    if config.managed_gradient_accumulation:
        return
    if config.compile.deepcompile:
        yield Fault(
            _MANAGED, "false cannot be combined with compile.deepcompile; change one of them"
        )
    elif config.amp is not None and config.amp.enabled:
        yield Fault(_MANAGED, "false cannot be combined with amp.enabled; change one of them")


RULES = (_unmanaged_overlap, _unmanaged_elsewhere)
