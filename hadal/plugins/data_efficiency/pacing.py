"""Schedules of a difficulty: arithmetic, and the state of a custom one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hadal.config.data_efficiency import CurriculumLearning, CurriculumMetric, Pace, PaceConfig
from hadal.errors import UsageError

CustomPace = Callable[[int], int]
"""Returns the difficulty of a step; the first step is 1."""


@dataclass(frozen=True, slots=True)
class PaceRule:
    """Schedule of a difficulty from `first` to `last`."""

    kind: Pace
    first: int
    last: int
    total: int = 1
    """fixed_linear, fixed_root: steps until `last`."""
    multiple: int = 1
    """fixed_linear, fixed_root: difficulties are multiples of it, except `last`."""
    degree: float = 1.0
    """fixed_root: degree of the root."""
    levels: tuple[int, ...] = ()
    """fixed_discrete: the difficulties."""
    ends: tuple[int, ...] = ()
    """fixed_discrete: the last step of each level except the last."""


def pace_rule_of(section: CurriculumLearning | CurriculumMetric) -> PaceRule:
    """Return the schedule of a section whose required keys are given."""
    config = section.schedule_config or PaceConfig()
    assert section.schedule_type is not None  # the rules of the configuration check it
    assert section.min_difficulty is not None
    assert section.max_difficulty is not None
    return PaceRule(
        section.schedule_type,
        section.min_difficulty,
        section.max_difficulty,
        total=config.total_curriculum_step or 1,
        multiple=config.difficulty_step or 1,
        degree=config.root_degree or 1.0 if section.schedule_type == "fixed_root" else 1.0,
        levels=tuple(config.difficulty or ()),
        ends=tuple(config.max_step or ()),
    )


def difficulty_at(rule: PaceRule, step: int) -> int:
    """Return the difficulty of a step; the first step is 1. Not for custom schedules.

    A difficulty that has reached `rule.last` stays there.
    """
    if rule.first >= rule.last:
        return rule.first
    if rule.kind == "fixed_discrete":
        level = next((n for n, end in enumerate(rule.ends) if step <= end), len(rule.ends))
        reached = (each for each in rule.levels[: level + 1] if each >= rule.last)
        return next(reached, rule.levels[level])
    share: float = (float(step) / rule.total) ** (1.0 / rule.degree)
    value = math.floor(share * (rule.last - rule.first) + rule.first)
    value -= value % rule.multiple
    # Rounded down, the first values could be less than `first`, even 0: no sequence is empty.
    lowest = -(-rule.first // rule.multiple) * rule.multiple
    return min(max(value, lowest), rule.last)


class Pacer:
    """Difficulty of one metric during training: a schedule, or the caller's function."""

    def __init__(self, rule: PaceRule, where: str, least: int | None = None) -> None:
        self.rule = rule
        self.current = rule.first
        """The difficulty of the last requested step."""
        self._where = where
        self._least = least
        self._custom: CustomPace | None = None

    def set_custom(self, custom: CustomPace) -> None:
        """Use `custom` from now on.

        Raises:
            UsageError: the schedule is not custom, or `custom` is not a function.
        """
        if self.rule.kind != "custom":
            raise UsageError(
                f"set_custom_schedules: {self._where}.schedule_type is"
                f' "{self.rule.kind}"; set it to "custom", or remove the call'
            )
        if not callable(custom):
            raise UsageError(
                f"set_custom_schedules: expected a function of the step for"
                f" {self._where}, got {type(custom).__name__}"
            )
        self._custom = custom

    def at(self, step: int) -> int:
        """Return the difficulty of a step, and store it. A custom one stays at the maximum.

        Raises:
            UsageError: the schedule is custom and has no function, or it did not return an integer,
                or one that is too small.
        """
        if self.rule.kind != "custom":
            self.current = difficulty_at(self.rule, step)
        elif self.current < self.rule.last:
            self.current = self._asked(step)
        return self.current

    def _asked(self, step: int) -> int:
        if self._custom is None:
            raise UsageError(
                f'{self._where}.schedule_type is "custom", but its function is missing; call'
                " hadal.data_efficiency.ordered.set_custom_schedules before the first forward"
                " (after a resume too)"
            )
        value: Any = self._custom(step)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise UsageError(
                f"{self._where}: the custom schedule returned {value!r} for step {step}; expected"
                " an integer"
            )
        if self._least is not None and int(value) < self._least:
            raise UsageError(
                f"{self._where}: the custom schedule returned {value} for step {step}; expected"
                f" {self._least} or more"
            )
        return int(value)
