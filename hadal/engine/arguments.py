"""The command-line arguments that training scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from hadal.config.reading import read
from hadal.config.scheduler import PARAMS
from hadal.errors import UsageError

# In order of preference: (attribute of `args`, description).
_CONFIG_ATTRIBUTES = ("deepspeed_config", "deepscale_config")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a script's parser, and return it."""
    group = parser.add_argument_group("Hadal", "the names that DeepSpeed's scripts use")
    group.add_argument(
        "--deepspeed", action="store_true", help="say that this run is distributed (for the script)"
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON config")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


def choose_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the one configuration that the caller passed, in whichever argument.

    Raises:
        UsageError: none was passed, or more than one, or `args` is a model.
    """
    if isinstance(args, nn.Module):
        raise UsageError(
            f"initialize got a {type(args).__name__} as args, which is its first argument, as in"
            " DeepSpeed; pass arguments by name: initialize(model=model, config=config)"
        )
    given = {"config=": config, "config_params=": config_params}
    for name in _CONFIG_ATTRIBUTES:
        given[f"args.{name}"] = getattr(args, name, None)
    found = {name: value for name, value in given.items() if value is not None}
    if not found:
        raise UsageError(
            "initialize got no configuration; pass config= a dict or the path of a JSON file, or"
            " start the script with --deepspeed_config FILE"
        )
    if len(found) > 1:
        raise UsageError(
            f"initialize got a configuration {len(found)} times: {', '.join(found)}; pass it once"
        )
    return next(iter(found.values()))


class _Argument(NamedTuple):
    """Tuning argument: its default, its meaning, and the value that leaves the key out."""

    default: Any
    meaning: str
    unsaid: Any = None


# DeepSpeed's names and defaults, which are not always those of the JSON keys of the same name.
_TUNING: dict[str, _Argument] = {
    "lr_range_test_min_lr": _Argument(0.001, "LRRangeTest: rate at the start"),
    "lr_range_test_step_rate": _Argument(1.0, "LRRangeTest: added at each interval"),
    "lr_range_test_step_size": _Argument(1000, "LRRangeTest: updates of one interval"),
    "lr_range_test_staircase": _Argument(False, "LRRangeTest: move at each interval only"),
    "cycle_first_step_size": _Argument(1000, "OneCycle: updates of the rise"),
    "cycle_first_stair_count": _Argument(-1, "OneCycle: stairs of the rise; -1: none", -1),
    "cycle_second_step_size": _Argument(-1, "OneCycle: updates of the fall; -1: as many", -1),
    "cycle_second_stair_count": _Argument(-1, "OneCycle: stairs of the fall; -1: as many", -1),
    "decay_step_size": _Argument(1000, "OneCycle: updates of one decay step after the cycle"),
    "cycle_min_lr": _Argument(0.01, "OneCycle: rate at both ends"),
    "cycle_max_lr": _Argument(0.1, "OneCycle: rate at the peak"),
    "decay_lr_rate": _Argument(0.0, "OneCycle: decay of the rate"),
    "cycle_momentum": _Argument(False, "OneCycle: move the momentum against the rate"),
    "cycle_min_mom": _Argument(0.8, "OneCycle: momentum at the peak"),
    "cycle_max_mom": _Argument(0.9, "OneCycle: momentum at both ends"),
    "decay_mom_rate": _Argument(0.0, "OneCycle: growth of the momentum after the cycle"),
    "warmup_min_lr": _Argument(0.0, "WarmupLR, WarmupDecayLR: rate at the start"),
    "warmup_max_lr": _Argument(0.001, "WarmupLR, WarmupDecayLR: rate after the warm-up"),
    "warmup_num_steps": _Argument(1000, "Warmup schedules: updates of the warm-up"),
    "warmup_type": _Argument("log", "Warmup schedules: log or linear"),
    "warmup_min_ratio": _Argument(0.01, "WarmupCosineLR: share of the rate at the start"),
    "cos_min_ratio": _Argument(0.01, "WarmupCosineLR: share of the rate at the end"),
    "total_num_steps": _Argument(None, "WarmupDecayLR, WarmupCosineLR: updates of the training"),
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and the arguments of each schedule to a parser, and return it.

    Pass the parsed arguments to `initialize(args=...)`: if `--lr_schedule` is given, it replaces
    the `scheduler` section. `schedule_from_args` returns that section itself.
    """
    group = parser.add_argument_group("learning-rate schedule", "used where --lr_schedule is given")
    group.add_argument("--lr_schedule", default=None, choices=tuple(PARAMS), help="the schedule")
    for name, (default, meaning, _) in _TUNING.items():
        kind: Any = int if default is None else type(default)
        if kind is bool:
            # `--switch`, `--switch true` and `--switch false` are all accepted.
            group.add_argument(
                f"--{name}", nargs="?", const=True, default=default, type=_truth, help=meaning
            )
        else:
            group.add_argument(
                f"--{name}", default=default, type=kind, help=f"{meaning} (default: %(default)s)"
            )
    return parser


def _truth(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return words[text.lower()]


def schedule_from_args(args: Any) -> dict[str, Any] | None:
    """Return the `scheduler` section of parsed arguments; None if `lr_schedule` is not given.

    Raises:
        UsageError: no such schedule.
    """
    kind = getattr(args, "lr_schedule", None)
    if kind is None:
        return None
    if kind not in PARAMS:
        raise UsageError(f"--lr_schedule {kind}: expected one of {', '.join(PARAMS)}")
    params = {}
    for name in PARAMS[kind].model_fields:
        unsaid = _TUNING[name].unsaid if name in _TUNING else None
        value = getattr(args, name, None)
        if value is not None and value != unsaid:
            params[name] = value
    return {"type": kind, "params": params}


def with_schedule(args: Any, source: Any, brings_schedule: bool) -> Any:
    """Return the configuration with the schedule of the command line, if one was named there.

    A namespace without the arguments of `add_tuning_arguments` is the script's own: its
    `lr_schedule` may be anything.

    Raises:
        UsageError: a schedule is named twice.
    """
    is_ours = all(hasattr(args, name) for name in _TUNING)
    section = schedule_from_args(args) if is_ours else None
    if section is None:
        return source
    _, raw = read(source)
    others = {"the configuration's scheduler": raw.get("scheduler") is not None}
    others["initialize(lr_scheduler=...)"] = brings_schedule
    for other, is_given in others.items():
        if is_given:
            raise UsageError(
                f"a schedule is named twice, by --lr_schedule {section['type']} and by {other};"
                " leave one of them out"
            )
    return {**raw, "scheduler": section}


def asks_for_stages(source: Any) -> bool:
    """Return whether the (still unchecked) configuration may request tensor parallelism."""
    _, raw = read(source)
    section = raw.get("pipeline")
    return isinstance(section, Mapping) and bool(section.get("auto"))
