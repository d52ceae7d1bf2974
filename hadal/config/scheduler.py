"""`scheduler`: the learning-rate schedule, stepped once per applied update."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from hadal.config.section import Section, Typed, default_of, key
from hadal.config.values import Boolean, Integer, Number, NumberOrNumbers, Text, counted

TORCH_SCHEDULES = (
    *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"),
    *("CyclicLR", "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR"),
    *("OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "SequentialLR", "StepLR"),
)
"""The classes of torch that a `type` may name, known without importing torch."""
Count: TypeAlias = Annotated[int, BeforeValidator(counted)]
_CURVE = 'Curve of the warm-up: "log" or "linear"; any other word logs a warning and means "log".'
_TOTAL = "Updates in the whole training. Required. 0 is accepted if no optimizer is named."
_WARMUP = "Updates of warm-up, an integer literal (10.0 is refused); 0 and 1 count as 2."


class _Params(Section):
    """Arguments common to all built-in schedules."""

    last_batch_iteration: Integer = key(
        -1, "Update to resume after; -1 starts from the beginning.", ge=-1
    )


class LRRangeTestParams(_Params):
    """LRRangeTest: raises the learning rate until training diverges, to find its upper limit."""

    lr_range_test_min_lr: NumberOrNumbers = key(1e-3, "Initial learning rate, or one per group.")
    lr_range_test_step_size: Count = key(
        2000, "Updates in one interval, an integer literal (10.0 is refused).", gt=0
    )
    lr_range_test_step_rate: Number = key(1.0, "Added to the multiplier at each interval.")
    lr_range_test_staircase: Boolean = key(
        False, "Change the rate at each interval, not at each update."
    )


class OneCycleParams(_Params):
    """OneCycle: increase, decrease, then decay; the momentum (the first beta) changes in the
    opposite direction.
    """

    required = ("cycle_min_lr", "cycle_max_lr")

    cycle_min_lr: NumberOrNumbers | None = key(
        None, "Learning rate at both ends of the cycle. Required."
    )
    cycle_max_lr: NumberOrNumbers | None = key(None, "Learning rate at the peak. Required.")
    decay_lr_rate: Number = key(
        0.0, "Decay of the learning rate after the cycle, per decay step.", ge=0
    )
    cycle_first_step_size: Integer = key(2000, "Updates of the increase.", gt=0)
    cycle_second_step_size: Integer | None = key(
        None, "Updates of the decrease; null uses cycle_first_step_size.", ge=0
    )
    cycle_first_stair_count: Integer = key(0, "Stairs of the increase; 0 is continuous.", ge=0)
    cycle_second_stair_count: Integer | None = key(
        None, "Stairs of the decrease; null uses cycle_first_stair_count.", ge=0
    )
    decay_step_size: Integer = key(0, "Updates in one decay step; 0 does not decay.", ge=0)
    cycle_momentum: Boolean = key(
        True,
        "Change each group's first beta against the rate and hold its second at 0.99. Disabled "
        "with a warning if the optimizer has no betas (SGD's momentum does not change).",
    )
    cycle_min_mom: NumberOrNumbers = key(0.8, "Momentum at the peak of the rate.")
    cycle_max_mom: NumberOrNumbers = key(0.9, "Momentum at both ends.")
    decay_mom_rate: Number = key(0.0, "Growth of the momentum after the cycle, per decay step.")


class WarmupLRParams(_Params):
    """WarmupLR: warms up, then holds the rate."""

    warmup_min_lr: NumberOrNumbers = key(0.0, "Initial learning rate, or one per group.")
    warmup_max_lr: NumberOrNumbers | None = key(
        None, "Learning rate after the warm-up; null is the optimizer's own rate."
    )
    warmup_num_steps: Count = key(1000, _WARMUP, ge=0)
    warmup_type: Text = key("log", _CURVE)


class WarmupDecayLRParams(WarmupLRParams):
    """WarmupDecayLR: warms up, then decays linearly to the initial rate."""

    required = ("total_num_steps",)

    warmup_max_lr: NumberOrNumbers = key(
        1e-3,
        "Learning rate after the warm-up, or one per group; replaces the optimizer's own rates, "
        "unlike by WarmupLR's default.",
    )
    total_num_steps: Integer | None = key(None, _TOTAL, ge=0)


class WarmupCosineLRParams(_Params):
    """WarmupCosineLR: warms up, then follows a cosine down; scales the optimizer's rates."""

    required = ("total_num_steps",)

    total_num_steps: Integer | None = key(None, _TOTAL, ge=0)
    warmup_min_ratio: Number = key(0.0, "Fraction of the rate at the start.", ge=0, le=1)
    warmup_num_steps: Count = key(1000, _WARMUP, ge=0)
    cos_min_ratio: Number = key(1e-4, "Fraction of the rate at the end.", ge=0, le=1)
    warmup_type: Text = key("log", _CURVE)


PARAMS: Mapping[str, type[Section]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}


_REPLACING: Mapping[str, str] = {
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycle": "cycle_max_lr",
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycleLR": "max_lr",
    "CyclicLR": "max_lr",
}
"""The key, by type, that replaces the optimizer's learning rates; other types scale these."""


class Scheduler(Typed):
    """The learning-rate schedule and its arguments. Not used if the program passes its own.

    It steps once per applied update, but not if fp16 overflows and the update is skipped.
    """

    types = PARAMS
    torch_types = TORCH_SCHEDULES
    home = "torch.optim.lr_scheduler"

    type: Text = key(
        None,
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class in "
        "torch.optim.lr_scheduler; case matters.",
    )
    params: dict[str, Any] = key({}, "Arguments of the schedule; see the table for its type.")

    def replaced(self, rates: Sequence[float]) -> str | None:
        """Return a note if one value replaces these rates of the optimizer's param groups."""
        name = _REPLACING.get(self.type)
        if name is None:
            return None
        is_default = name not in self.params
        own = PARAMS.get(self.type)
        value = default_of(own.model_fields[name]) if own and is_default else self.params.get(name)
        if not isinstance(value, (int, float)) or all(rate == value for rate in rates):
            return None
        default = "the default " if is_default else ""
        each = [f"{rate:g}" for rate in rates]
        different = list(dict.fromkeys(each))
        if len(different) == 1:
            lost, kept = f"learning rate {each[0]}", f"{each[0]} to keep it"
        else:
            first = ", ".join(different[:4]) + (", ..." if len(different) > 4 else "")
            lost, kept = f"learning rates {first}", f"[{', '.join(each)}] to keep them"
        return (
            f"scheduler.params.{name}: {default}{value:g} replaces the optimizer's {lost}; set it"
            f" to {kept}"
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """The required arguments of a built-in schedule that are absent: they were "auto"."""
        made = PARAMS.get(self.type)
        return () if made is None else tuple(set(made.required) - set(self.params))
