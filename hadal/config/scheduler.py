"""`scheduler`: the learning-rate schedule, stepped once for each applied update."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BeforeValidator

from hadal.config.optimizer import OpenParams
from hadal.config.section import AUTO_IS_A_WORD, Child, Section, key
from hadal.config.values import Boolean, Integer, Number, NumberOrNumbers, Text, counted

Count: TypeAlias = Annotated[int, BeforeValidator(counted)]
_CURVE = 'Curve of the warm-up: "log" or "linear"; any other word warns and means "log".'
_TOTAL = "Updates of the whole training. Must be said."
_WARMUP = "Updates of the warm-up, 10.0 is no integer; 0 and 1 count as 2."


class _Params(Section):
    """What every native schedule takes."""

    last_batch_iteration: Integer = key(-1, "Update to resume after; -1 starts anew.", ge=-1)


class LRRangeTestParams(_Params):
    """LRRangeTest: raise the rate to see where training breaks."""

    lr_range_test_min_lr: NumberOrNumbers = key(1e-3, "Rate at the start, or one per group.")
    lr_range_test_step_size: Count = key(2000, "Updates of one interval; 10.0 is none.", gt=0)
    lr_range_test_step_rate: Number = key(1.0, "Added to the multiplier at each interval.")
    lr_range_test_staircase: Boolean = key(False, "Move at each interval, not at each update.")


class OneCycleParams(_Params):
    """OneCycle: up, down, then decay; the momentum (the first beta) moves the other way."""

    required: ClassVar[tuple[str, ...]] = ("cycle_min_lr", "cycle_max_lr")

    cycle_min_lr: NumberOrNumbers | None = key(None, "Rate at both ends. Must be said.")
    cycle_max_lr: NumberOrNumbers | None = key(None, "Rate at the peak. Must be said.")
    decay_lr_rate: Number = key(0.0, "Decay of the rate after the cycle, per decay step.", ge=0)
    cycle_first_step_size: Integer = key(2000, "Updates of the rise.", gt=0)
    cycle_second_step_size: Integer | None = key(None, "Updates of the fall; null: as many.", ge=0)
    cycle_first_stair_count: Integer = key(0, "Stairs of the rise; 0 is continuous.", ge=0)
    cycle_second_stair_count: Integer | None = key(None, "Stairs of the fall; null: as many.", ge=0)
    decay_step_size: Integer = key(0, "Updates of one decay step; 0 does not decay.", ge=0)
    cycle_momentum: Boolean = key(
        True,
        "Move each group's first beta against the rate and hold its second at 0.99. Off, with a "
        "warning, where the optimizer has no betas (SGD's momentum stays).",
    )
    cycle_min_mom: NumberOrNumbers = key(0.8, "Momentum at the peak of the rate.")
    cycle_max_mom: NumberOrNumbers = key(0.9, "Momentum at both ends.")
    decay_mom_rate: Number = key(0.0, "Growth of the momentum after the cycle, per decay step.")


class WarmupLRParams(_Params):
    """WarmupLR: warm up, then hold."""

    warmup_min_lr: NumberOrNumbers = key(0.0, "Rate at the start, or one per group.")
    warmup_max_lr: NumberOrNumbers | None = key(
        None, "Rate after the warm-up; null is the optimizer's own rate."
    )
    warmup_num_steps: Count = key(1000, _WARMUP, ge=0)
    warmup_type: Text = key("log", _CURVE)


class WarmupDecayLRParams(WarmupLRParams):
    """WarmupDecayLR: warm up, then fall in a line."""

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    warmup_max_lr: NumberOrNumbers = key(1e-3, "Rate after the warm-up, or one per group.")
    total_num_steps: Integer | None = key(None, _TOTAL, gt=0)


class WarmupCosineLRParams(_Params):
    """WarmupCosineLR: warm up, then fall along a cosine; rates are shares of the optimizer's."""

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    total_num_steps: Integer | None = key(None, _TOTAL, gt=0)
    warmup_min_ratio: Number = key(0.0, "Share of the rate at the start.", ge=0, le=1)
    warmup_num_steps: Count = key(1000, _WARMUP, ge=0)
    cos_min_ratio: Number = key(1e-4, "Share of the rate at the end.", ge=0, le=1)
    warmup_type: Text = key("log", _CURVE)


PARAMS: Mapping[str, type[_Params]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}


class Scheduler(Section):
    """The schedule, by name. Not used where the program hands over its own.

    It is stepped once for each applied update: not where fp16 overflows and the update is skipped.
    """

    required: ClassVar[tuple[str, ...]] = ("type",)

    type: Text = key(
        None,
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of "
        "torch.optim.lr_scheduler; the case matters.",
        mark=AUTO_IS_A_WORD,
    )
    params: dict[str, Any] = key({}, "Arguments of the schedule; see the tables of each type.")

    @classmethod
    def child(cls, name: str, raw: Mapping[str, Any]) -> Child | None:
        """Let the type say which params there are; a torch class takes any."""
        if name != "params":
            return super().child(name, raw)
        kind = raw.get("type")
        return Child(PARAMS.get(kind, OpenParams) if isinstance(kind, str) else OpenParams, "one")
