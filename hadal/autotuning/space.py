"""What is searched: from the user's configuration to trials, and from a trial to one of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hadal.autotuning.words import config_flag, value_of
from hadal.config import load_config
from hadal.config.autotuning import Autotuning
from hadal.config.plain import shown
from hadal.config.reading import read
from hadal.config.report import written
from hadal.config.section import default_of, mark_of
from hadal.config.zero_optimization import ZeroOptimization
from hadal.errors import ConfigError, Fault

TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
ALL_STAGES = (0, 1, 2, 3)
_BUCKETS = (50_000_000, 500_000_000, 1_000_000_000)

Others = tuple[tuple[str, str], ...]
"""Settings under zero_optimization beside the stage: keys, and values as JSON."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user's configuration asks to be searched."""

    raw: dict[str, Any]
    """The configuration with one value at each key."""
    section: Autotuning
    stages: tuple[int, ...]
    are_chosen: bool
    """The stages are the user's choice: all of them are tried."""
    micro_batches: tuple[int, ...]
    """Exactly these; empty: they are searched for, upwards from `start`."""
    start: int
    accumulation: int | None
    """None: the program's own, which is counted as 1."""
    ranges: dict[str, tuple[Any, ...]]
    """Keys under zero_optimization that were given as lists."""
    ranks: int
    """Those that see different samples."""

    @property
    def samples_of_one(self) -> int:
        """Samples of an update, for each sample of a micro-batch."""
        return (self.accumulation or 1) * self.ranks

    @property
    def smallest(self) -> int:
        """The smallest micro-batch that may be tried."""
        least = -(-self.section.min_train_batch_size // self.samples_of_one)
        return max(self.section.min_train_micro_batch_size_per_gpu, least)

    @property
    def largest(self) -> int:
        """The largest one, if memory admits it."""
        most = self.section.max_train_micro_batch_size_per_gpu
        if self.section.max_train_batch_size is None:
            return most
        return min(most, self.section.max_train_batch_size // self.samples_of_one)


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of settings."""

    stage: int
    micro_batch: int
    others: Others = ()

    def name(self, accumulation: int) -> str:
        """Its name, and that of its files."""
        tail = "".join(f"_{_short(key)}{_letters(json.loads(text))}" for key, text in self.others)
        return f"z{self.stage}_tmbspg{self.micro_batch}_gas{accumulation}{tail}"

    def value_of(self, key: str) -> Any:
        """What the trial gives a key under zero_optimization; the default where it says nothing."""
        told = dict(self.others).get(key)
        return default_at(key) if told is None else json.loads(told)


def default_at(key: str) -> Any:
    """The default of a key under zero_optimization, by any of its names."""
    return default_of(ZeroOptimization.model_fields[ZeroOptimization.aliases.get(key, key)])


def read_wish(words: Sequence[str], world_size: int) -> Wish:
    """Read the configuration that a command names.

    Args:
        words: the program's name and arguments.
        world_size: the ranks that each experiment starts.

    Raises:
        LaunchError: the words name none.
        ConfigError: it has faults, or does not ask for a search.
    """
    name, raw = read(value_of(words, config_flag(words)) or "")
    stages, are_chosen = _stages(raw)
    ranges = _ranges(raw["zero_optimization"])
    for key, values in ranges.items():
        raw["zero_optimization"][key] = values[0]
    told = raw.get(MICRO)
    listed = tuple(told) if isinstance(told, list) else ()
    if told in (None, "auto"):
        raw[MICRO] = 1
    elif listed and all(type(size) is int and size > 0 for size in listed):
        raw[MICRO] = listed[0]
    elif isinstance(told, list):
        fault = Fault(MICRO, f"expected a list of integers > 0, got {shown(told)}")
        raise ConfigError(written(name, (fault,)), (fault,))
    raw["zero_optimization"]["stage"] = stages[0]
    raw.pop(TRAIN, None)
    checked = load_config(raw, world_size=world_size)
    section = checked.autotuning
    _check(name, raw, section, world_size)
    flags = section.arg_mappings or {}
    start = None if listed else checked.train_micro_batch_size_per_gpu
    if told in (None, "auto"):
        start = _said(flags.get(MICRO), words)
    accumulation: int | None = checked.gradient_accumulation_steps
    if raw.get(ACCUMULATION) in (None, "auto"):
        accumulation = _said(flags.get(ACCUMULATION), words)
    wish = Wish(
        raw,
        section,
        stages,
        are_chosen,
        listed,
        start or section.min_train_micro_batch_size_per_gpu,
        accumulation,
        ranges,
        world_size // (section.mp_size * checked.sequence_parallel_size),
    )
    _check_batch(name, wish)
    return wish


def _stages(raw: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """The stages to try, and whether the user has named them; `raw` gets a section."""
    zero = raw.get("zero_optimization")
    if isinstance(zero, bool):
        zero = {"stage": int(zero)}
    raw["zero_optimization"] = dict(zero) if isinstance(zero, Mapping) else {}
    told = raw["zero_optimization"].get("stage")
    if isinstance(told, list) and told:
        return tuple(told), True
    if told in (None, "all", "auto", []):
        return ALL_STAGES, False
    return (told,), True


def _ranges(zero: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    found = {}
    for key, value in zero.items():
        if key == "stage":
            continue
        field = ZeroOptimization.model_fields.get(ZeroOptimization.aliases.get(key, key))
        if field is not None and mark_of(field).tunable and isinstance(value, list) and value:
            found[key] = tuple(value)
    return found


def _check(name: str, raw: Mapping[str, Any], section: Autotuning, world_size: int) -> None:
    faults = []
    elastic = raw.get("elasticity")
    if not section.enabled:
        faults.append(Fault("autotuning.enabled", "is false; --autotuning needs it true"))
    if isinstance(elastic, Mapping) and elastic.get("enabled"):
        faults.append(
            Fault("elasticity.enabled", "chooses the batch, as autotuning does; switch one off")
        )
    if world_size % section.mp_size:
        told = f"{section.mp_size} does not divide the {world_size} ranks; take a divisor"
        faults.append(Fault("autotuning.mp_size", told))
    if faults:
        raise ConfigError(written(name, tuple(faults)), tuple(faults))


def _check_batch(name: str, wish: Wish) -> None:
    if wish.smallest > wish.largest:
        told = (
            f"micro-batches of at least {wish.smallest} and at most {wish.largest} are asked for,"
            f" with {wish.samples_of_one} samples of an update for each of theirs; lower the"
            " minimum or raise the maximum"
        )
        fault = Fault("autotuning", told)
        raise ConfigError(written(name, (fault,)), (fault,))


def _said(flag: str | None, words: Sequence[str]) -> int | None:
    """The number that a flag of the program says."""
    said = value_of(words, flag) if flag is not None else None
    return int(said) if said is not None and said.isdecimal() else None


# ---- trials ------------------------------------------------------------------------------------


def combinations(wish: Wish, stage: int) -> list[Others]:
    """The other settings to try at a stage; the first is the user's own."""
    zero = wish.raw["zero_optimization"]
    lists = {} if wish.section.fast else _usual(stage, wish.section)
    varied = {key: values for key, values in lists.items() if key not in zero} | wish.ranges
    own = tuple((key, json.dumps(values[0])) for key, values in wish.ranges.items())
    made = [own]
    for values in product(*varied.values()):
        others = tuple((key, json.dumps(value)) for key, value in zip(varied, values, strict=True))
        if not _is_own(others, dict(own)) and others not in made:
            made.append(others)
    return made


def _is_own(others: Others, own: Mapping[str, str]) -> bool:
    """Whether settings come to what the user's own do: they are given, or the defaults."""
    return all(
        text == own[key] if key in own else json.loads(text) == default_at(key)
        for key, text in others
    )


def _usual(stage: int, section: Autotuning) -> dict[str, tuple[Any, ...]]:
    """What is worth varying at a stage, where the user says nothing of it."""
    if stage == 0:
        return {"reduce_bucket_size": _BUCKETS}
    if stage < 3:
        return {"reduce_bucket_size": _BUCKETS, "allgather_bucket_size": _BUCKETS}
    hidden = section.model_info.hidden_size if section.model_info is not None else None
    square = (hidden * hidden,) if hidden else ()
    usual: dict[str, tuple[Any, ...]] = {
        "reduce_bucket_size": (*square, *_BUCKETS[:2]),
        "stage3_prefetch_bucket_size": (*square, *_BUCKETS[:2]),
    }
    if hidden:
        usual["stage3_param_persistence_threshold"] = (10 * hidden, 100_000)
    return usual


def config_of(wish: Wish, trial: Trial) -> dict[str, Any]:
    """The configuration of a trial, without an autotuning section."""
    config = {key: value for key, value in wish.raw.items() if key != "autotuning"}
    config["zero_optimization"] = {
        **wish.raw["zero_optimization"],
        "stage": trial.stage,
        **{key: json.loads(text) for key, text in trial.others},
    }
    config[MICRO] = trial.micro_batch
    # Where the program alone knows its accumulation it fills in both.
    if wish.accumulation is not None:
        config[ACCUMULATION] = wish.accumulation
        config[TRAIN] = trial.micro_batch * wish.samples_of_one
    return config


def _short(key: str) -> str:
    return "".join(word[0] for word in key.removeprefix("stage3_").split("_"))


def _letters(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        mantissa, _, exponent = f"{value:e}".partition("e")
        rounded = float(mantissa)
        if value >= 10_000 and rounded == round(rounded, 2):
            return f"{rounded:g}e{int(exponent)}"
        return str(value)
    if isinstance(value, Mapping) and isinstance(value.get("device"), str):
        value = value["device"]
    return re.sub(r"[^A-Za-z0-9.]+", "", value if isinstance(value, str) else json.dumps(value))
