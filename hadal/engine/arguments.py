"""The arguments of scripts and of `initialize`: configuration, optimizer, schedule and loader."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from hadal.comm import Ranks
from hadal.comm.collectives import broadcast_
from hadal.comm.faults import raised_on_all
from hadal.config import Config
from hadal.config.reading import read
from hadal.config.scheduler import PARAMS
from hadal.data.loader import ChosenOrder, Loading, Reading, ShardedLoader
from hadal.data.reading import Sharding
from hadal.device import current_device
from hadal.errors import OptimizerError, UsageError, expect_one_of
from hadal.listener import Listener
from hadal.optim.build import build_optimizer
from hadal.optim.schedules import build_schedule

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
    expect_one_of(PARAMS, "--lr_schedule", kind)
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


_log = logging.getLogger(__name__)

Groups = list[dict[str, Any]]
OptimizerMaker = Callable[[Any], Optimizer]
ScheduleMaker = Callable[[Optimizer], Any]

# Defaults if neither the config nor the caller names an optimizer or a schedule.
_DEFAULT_OPTIMIZER = "AdamW"
_DEFAULT_SCHEDULE = "WarmupDecayLR"
_DEFAULT_SCHEDULE_STEPS = 100_000


class InitializeArguments(NamedTuple):
    """The remaining arguments of `initialize`, from which training is made."""

    optimizer: Optimizer | OptimizerMaker | None
    model_parameters: Any
    schedule: LRScheduler | ScheduleMaker | None
    training_data: Dataset[Any] | None
    collate_fn: Callable[[list[Any]], Any] | None

    def name_an_optimizer(self, config: Config) -> bool:
        """Return whether the caller or the configuration names one; else it is the default."""
        return self.optimizer is not None or config.optimizer is not None

    def described(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """Describe everything outside the configuration that must match on all ranks."""
        groups = optimizer.param_groups if optimizer else []
        options = [{k: repr(v) for k, v in group.items() if k != "params"} for group in groups]
        return {
            "the optimizer": type(optimizer).__name__,
            **{f"param group {number}": group for number, group in enumerate(options)},
            "the schedule given": type(self.schedule).__name__,
            "training_data": type(self.training_data).__name__,
            "the samples of training_data": count_samples(self.training_data),
        }

    def make_optimizer(self, config: Config, model: nn.Module) -> Optimizer | None:
        """Make the caller's optimizer, the section's, or the default; None if none is needed."""
        given = self.optimizer
        if isinstance(given, Optimizer):
            return given
        if given is not None and not callable(given):
            raise OptimizerError(
                "initialize(optimizer=...) takes a torch.optim.Optimizer or a callable that makes"
                f" one, got {type(given).__name__}"
            )
        chosen = self._chosen_parameters(model)
        if not chosen:
            return None
        if given is not None:
            return given(chosen)
        section = config.optimizer
        if section is None:
            return build_optimizer(_DEFAULT_OPTIMIZER, {}, chosen)
        names = {p: name for name, p in model.named_parameters()}
        return build_optimizer(section.type, section.params, chosen, names)

    def _chosen_parameters(self, model: nn.Module) -> list[Any]:
        given = self.model_parameters
        if given is None:
            return [p for p in model.parameters() if p.requires_grad]
        try:
            return list(given)
        except TypeError:
            raise OptimizerError(
                "initialize(model_parameters=...) takes parameters or param groups, got"
                f" {type(given).__name__}; pass model.parameters(), or leave it out"
            ) from None

    def make_schedule(
        self, config: Config, optimizer: Optimizer, loader: ShardedLoader | None
    ) -> Any:
        """Make the caller's schedule, the section's, or the default optimizer's; None for none."""
        given = self.schedule
        if given is not None:
            return self._given_schedule(given, optimizer)
        if config.scheduler is not None:
            note = config.scheduler.replaced(self._given_rates(config, optimizer))
            if note is not None:
                _log.warning("%s", note)
            return build_schedule(config.scheduler.type, config.scheduler.params, optimizer)
        if self.name_an_optimizer(config):
            return None
        steps = _DEFAULT_SCHEDULE_STEPS
        with suppress(TypeError):  # a stream without a length
            steps = len(loader) if loader is not None else steps
        _log.warning(
            "no optimizer is named: training uses %s with its defaults and %s, which warms up and"
            " then lowers the learning rate to 0 at update %d. Name `optimizer` and `scheduler` in"
            " the configuration to choose",
            _DEFAULT_OPTIMIZER,
            _DEFAULT_SCHEDULE,
            steps,
        )
        return build_schedule(_DEFAULT_SCHEDULE, {"total_num_steps": steps}, optimizer)

    def _given_rates(self, config: Config, optimizer: Optimizer) -> list[float]:
        """Return the param groups' learning rates, unless all have a default that nobody gave."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        section = None if self.optimizer is not None else config.optimizer
        is_given = self.optimizer is not None or (section is not None and bool(section.rates))
        return rates if is_given or len({*rates}) > 1 else []

    def _given_schedule(self, given: Any, optimizer: Optimizer) -> Any:
        if not isinstance(given, LRScheduler) and callable(given):
            given = given(optimizer)
        elif not isinstance(self.optimizer, Optimizer):
            raise OptimizerError(
                "initialize(lr_scheduler=...) got a schedule object without the optimizer object"
                " that it belongs to; pass both, or a callable that builds the schedule from the"
                " optimizer"
            )
        if not callable(getattr(given, "step", None)):
            raise OptimizerError(
                f"initialize(lr_scheduler=...) got a {type(given).__name__}, which has no step();"
                " pass a schedule, or a callable that returns one for the optimizer"
            )
        return given

    def make_loading(
        self, config: Config, readers: Ranks, seed: int, listeners: Iterable[Listener]
    ) -> Loading:
        """Make the loaders' shared options; each of `readers` reads its own samples."""
        micro, drops = config.train_micro_batch_size_per_gpu, config.dataloader_drop_last
        sharding = Sharding(micro, readers.size, readers.rank, drops)
        return Loading(
            sharding,
            self.collate_fn,
            can_pin=current_device().type != "cpu",
            seed=seed,
            shards_stream=config.dataloader_shard_iterable,
            chosen=_chosen_order(config, sharding, listeners),
        )

    def make_loader(self, loading: Loading, world: Ranks, *, shuffle: bool) -> ShardedLoader | None:
        """Make the loader over the caller's data set, if there is one. All ranks must call it."""
        if self.training_data is None:
            return None
        with raised_on_all(world, "initialize"):
            reading = Reading(pin_memory=True, shuffle=shuffle)
            return loading.training_loader(self.training_data, reading)


def count_samples(dataset: Any) -> int | None:
    """Return the samples of a data set; None if it has no length, or ranks may differ."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    return len(dataset)


def seed_of_program(world: Ranks) -> int:
    """Return the seed that rank 0 gave to `torch.manual_seed`; 0 if it did not call it.

    Ranks may be seeded differently, but must follow one order.
    """
    seed = torch.initial_seed()
    shared = torch.tensor(0 if seed == torch.Generator().initial_seed() else seed % (1 << 63))
    broadcast_(shared, 0, world, "the broadcast of rank 0's seed")
    return int(shared)


def scaled_by_batch(schedule: Any, optimizer: Optimizer, listeners: Iterable[Listener]) -> Any:
    """Return the schedule as scaled by the size of each batch, if there is a listener for that."""
    for one in listeners:
        if one.name == "dynamic_batching":
            batching: Any = one
            return batching.scaled(schedule, optimizer)
    return schedule


def _chosen_order(
    config: Config, sharding: Sharding, listeners: Iterable[Listener]
) -> ChosenOrder | None:
    sampling = config.data_efficiency.data_sampling
    if not (sampling.curriculum_learning.enabled or sampling.dynamic_batching.enabled):
        return None
    from hadal.plugins.data_efficiency.ordered import chosen_order  # for this alone

    return chosen_order(config, sharding, tuple(listeners))
