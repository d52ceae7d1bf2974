"""The search space: from the user's configuration to trials, and from a trial to its own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hadal.config import load_config
from hadal.config.autotuning import Autotuning
from hadal.config.reading import read
from hadal.config.section import default_of, mark_of, shown
from hadal.config.zero_optimization import ZeroOptimization
from hadal.errors import Fault, raise_faults
from hadal.plugins.autotuning.runs import Outcome
from hadal.plugins.autotuning.words import config_flag, found_at, value_of

TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
TENSOR, SEQUENCE, STAGES, EXPERTS = DEGREES = (
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "pipeline.stages",
    "expert_parallel.autoep_size",
)
NO_GAIN, NO_OUTCOME = -math.inf, Outcome("", None)
ALL_STAGES = (0, 1, 2, 3)
_BUCKETS = [50_000_000, 500_000_000, 1_000_000_000]


def _space(stage: int, **ranges: list[int]) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": _BUCKETS, **ranges}}


# The keys worth varying at each stage, if the user does not set them, by DeepSpeed's names.
DEFAULT_TUNING_SPACE_ZERO_0 = _space(0)
DEFAULT_TUNING_SPACE_ZERO_1 = _space(1, allgather_bucket_size=[*_BUCKETS])
DEFAULT_TUNING_SPACE_ZERO_2 = _space(2, allgather_bucket_size=[*_BUCKETS])
DEFAULT_TUNING_SPACE_ZERO_3 = _space(
    3, reduce_bucket_size=_BUCKETS[:2], stage3_prefetch_bucket_size=_BUCKETS[:2]
)
_SPACES = (
    DEFAULT_TUNING_SPACE_ZERO_0,
    DEFAULT_TUNING_SPACE_ZERO_1,
    DEFAULT_TUNING_SPACE_ZERO_2,
    DEFAULT_TUNING_SPACE_ZERO_3,
)

_RECOMPUTED = "activation_checkpointing.modules"
ON_HOST = {"device": "cpu", "pin_memory": True}
_LEVERS: tuple[dict[str, Any], ...] = (
    {"overlap_comm": True},
    {"overlap_comm": False},
    {_RECOMPUTED: "units"},
    {"offload_optimizer": ON_HOST},
    {_RECOMPUTED: "units", "offload_optimizer": ON_HOST},
)

Others = tuple[tuple[str, str], ...]
"""Settings other than stage and micro-batch: keys under zero_optimization, or paths with dots, and
values as JSON."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The search that the user's configuration requests."""

    raw: dict[str, Any]
    """The configuration with a single value for each key."""
    section: Autotuning
    stages: tuple[int, ...]
    are_chosen: bool
    """True if the user chose the stages: then all of them are tried."""
    micro_batches: tuple[int, ...]
    """The user's list; if empty, the search goes upwards from `start`."""
    start: int
    accumulation: int | None
    """None: the program sets it itself, and the search counts it as 1."""
    fills: bool
    """True if each micro-batch gets the accumulation that fills `max_train_batch_size`."""
    ranges: dict[str, tuple[Any, ...]]
    """Keys with a list of values: under zero_optimization, or paths with dots."""
    world_size: int
    degrees: dict[str, int]
    """The ranks that share a layer, a sequence and a model in stages, where no list varies them."""

    def at(self, others: Others) -> SearchRequest:
        """Return the request for ranks that share the model as these settings have it."""
        varied = {key: json.loads(text) for key, text in others if key in self.degrees}
        return replace(self, degrees=self.degrees | varied) if varied else self

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks."""
        model = max(self.section.mp_size, self.degrees[TENSOR] * self.degrees[STAGES])
        return self.world_size // (model * self.degrees[SEQUENCE]) or 1

    def is_possible(self, others: Others) -> bool:
        """Return whether the ranks can be divided as these settings have it."""
        return self.world_size % math.prod(self.at(others).degrees.values()) == 0

    def accumulation_of(self, micro_batch: int) -> int | None:
        """Return the micro-steps of an update; None if the program sets them itself."""
        most = self.section.max_train_batch_size
        if self.fills and most is not None:
            return max(1, most // (micro_batch * self.ranks))
        return self.accumulation

    def batch_of(self, micro_batch: int) -> int:
        """Return the samples of an update."""
        return micro_batch * (self.accumulation_of(micro_batch) or 1) * self.ranks

    @property
    def own(self) -> Others:
        """The user's own settings: the first value of each list."""
        return tuple((key, json.dumps(values[0])) for key, values in self.ranges.items())

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batches to try, upwards; those that fill the batch exactly if they may."""
        section = self.section
        least = section.min_train_micro_batch_size_per_gpu
        most = section.max_train_micro_batch_size_per_gpu
        whole = section.max_train_batch_size
        found = {*self.micro_batches}
        if self.fills and whole is not None:
            most = min(most, whole // self.ranks)
            exact = {size for size in range(1, most + 1) if whole // self.ranks % size == 0}
            found = found or exact
        else:
            samples = self.batch_of(1)
            least = max(least, -(-section.min_train_batch_size // samples))
            most = most if whole is None else min(most, whole // samples)
        if not found and least <= most:
            # Twice as many, and the half between; the other way likewise. Each degree has its own.
            parts = (1,) if self.ranges.keys() & {*DEGREES} else (1, 1.5)
            rough = (self.start * 2.0**step * part for step in range(-20, 21) for part in parts)
            found = {max(least, min(self.start, most)), most, *map(int, rough)}
        return tuple(sorted(size for size in found if least <= size <= most))


@dataclass(eq=False, slots=True)
class TuningTrial:
    """One set of settings, its plan, and its results once it has run."""

    stage: int
    micro_batch: int
    others: Others = ()
    planned: float = NO_GAIN
    """The gain by plan: the metric's value, negated if less is better."""
    nbytes: float = 0.0
    """A rank's bytes by plan; 0 without one."""
    number: int = 0
    """The number of its first experiment; 0 until it has started."""
    runs: int = 0
    outcome: Outcome = NO_OUTCOME
    gain: float = NO_GAIN
    """The measured gain, the mean of all runs; NO_GAIN if it failed, or has not ended."""

    @property
    def row(self) -> tuple[int, Others]:
        """All but the size."""
        return self.stage, self.others

    @property
    def peak(self) -> int:
        """The measured bytes of a rank at the peak; 0 if unknown."""
        return int((self.outcome.found or {}).get("peak_memory_per_gpu", 0))

    @property
    def speed(self) -> float:
        """Samples of all ranks per second; 0 if unknown."""
        return float((self.outcome.found or {}).get("throughput", 0.0))

    def name(self, accumulation: int) -> str:
        """Return the name of the trial and its files."""
        tail = "".join(f"_{_short(key)}{_letters(json.loads(text))}" for key, text in self.others)
        return f"z{self.stage}_tmbspg{self.micro_batch}_gas{accumulation}{tail}"


def read_request(words: Sequence[str], world_size: int) -> SearchRequest:
    """Read the search request from the configuration that a command names.

    Args:
        words: the program's name and arguments.
        world_size: the ranks that each experiment starts.

    Raises:
        LaunchError: the words name no configuration.
        ConfigError: it has faults, or does not enable a search.
    """
    name, raw = read(value_of(words, config_flag(words)) or "")
    stages, are_chosen = _stages(raw)
    ranges = _ranges(raw["zero_optimization"])
    raw["zero_optimization"] |= {key: values[0] for key, values in ranges.items()}
    for key in DEGREES:
        if degrees := _degrees(key, raw, world_size, name):
            ranges[key] = degrees
            _put(raw, key, degrees[0])
    micro_batch = raw.get(MICRO)
    listed = _integers(MICRO, micro_batch, name)
    if micro_batch in (None, "auto") or listed:
        raw[MICRO] = listed[0] if listed else 1
    raw["zero_optimization"]["stage"] = stages[0]
    raw.pop(TRAIN, None)
    checked = load_config(raw, world_size=world_size)
    section = checked.autotuning
    flags = section.arg_mappings or {}
    start = None if listed else checked.train_micro_batch_size_per_gpu
    if micro_batch in (None, "auto"):
        start = _number_at(flags.get(MICRO), words)
    accumulation: int | None = checked.gradient_accumulation_steps
    if raw.get(ACCUMULATION) in (None, "auto"):
        accumulation = _number_at(flags.get(ACCUMULATION), words)
    tensor, pipeline = checked.tensor_parallel, checked.pipeline
    stages_of_model = pipeline.stages if pipeline.auto and pipeline.stages != "auto" else 1
    wish = SearchRequest(
        raw,
        section,
        stages,
        are_chosen,
        listed,
        start or section.min_train_micro_batch_size_per_gpu,
        accumulation,
        section.max_train_batch_size is not None and _may_fill(raw, flags),
        ranges,
        world_size,
        {
            TENSOR: tensor.autotp_size if tensor.is_on else 1,
            SEQUENCE: checked.sequence_parallel_size,
            STAGES: stages_of_model,
        },
    )
    raise_faults([*_faults(wish, world_size)], name)
    return wish


def _may_fill(raw: Mapping[str, Any], flags: Mapping[str, str]) -> bool:
    """Return whether the search may choose the accumulation.

    It may if the configuration leaves it open and the program follows: by a flag, or because it
    takes all batch sizes from its configuration.
    """
    given = raw.get(ACCUMULATION)
    follows = ACCUMULATION in flags or (given is None and MICRO not in flags)
    return given in (None, "auto") and follows


def _stages(raw: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Return the stages to try and whether the user chose them; add the section to `raw`."""
    zero = raw.get("zero_optimization")
    if isinstance(zero, bool):
        zero = {"stage": int(zero)}
    raw["zero_optimization"] = dict(zero) if isinstance(zero, Mapping) else {}
    stage = raw["zero_optimization"].get("stage")
    if isinstance(stage, list) and stage:
        return tuple(stage), True
    if stage in (None, "all", "auto", []):
        return ALL_STAGES, False
    return (stage,), True


def _integers(path: str, value: Any, name: str) -> tuple[int, ...]:
    """Return a list of a key that takes one; none if it is no list."""
    if not isinstance(value, list):
        return ()
    if not value or not all(type(one) is int and one > 0 for one in value):
        fault = Fault(path, f"expected a list of integers > 0, got {shown(value)}")
        raise_faults([fault], name)
    return tuple(value)


def _degrees(key: str, raw: Mapping[str, Any], world_size: int, name: str) -> tuple[int, ...]:
    """Return the listed degrees of one kind; "all" are the divisors of the ranks."""
    value = found_at(raw, key)
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    listed = _integers(key, divisors if value == "all" else value, name)
    if other := next((size for size in listed if size not in divisors), None):
        why = f"{other} does not divide the {world_size} ranks; list divisors"
        raise_faults([Fault(key, why)], name)
    return listed


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a setting in a configuration, or in a patch of one."""
    section, _, inner = key.rpartition(".")
    if section or key not in DEGREES:
        section = section or "zero_optimization"
        config[section] = {**config.get(section, {}), inner: value}
    else:
        config[key] = value


def _ranges(zero: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    found = {}
    for key, value in zero.items():
        if key == "stage":
            continue
        field = ZeroOptimization.model_fields.get(ZeroOptimization.aliases.get(key, key))
        if field is not None and mark_of(field).tunable and isinstance(value, list) and value:
            found[key] = tuple(value)
    return found


def _faults(wish: SearchRequest, world_size: int) -> Iterator[Fault]:
    section, elastic = wish.section, wish.raw.get("elasticity")
    least, most = section.min_train_batch_size, section.max_train_batch_size
    if not section.enabled:
        yield Fault("autotuning.enabled", "is false; --autotuning requires true")
    if isinstance(elastic, Mapping) and elastic.get("enabled"):
        yield Fault("elasticity.enabled", "sets the batch size, as autotuning does; disable one")
    if world_size % section.mp_size:
        message = f"{section.mp_size} does not divide the {world_size} ranks; use a divisor"
        yield Fault("autotuning.mp_size", message)
    listed = [key for key in DEGREES if key in wish.ranges]
    if section.mp_size > 1 and listed:
        message = f"{section.mp_size}, and a list in {listed[0]}; leave mp_size out"
        yield Fault("autotuning.mp_size", message)
    for key, switch in ((STAGES, "pipeline.auto"), (EXPERTS, "expert_parallel.enabled")):
        if key in listed and not found_at(wish.raw, switch):
            yield Fault(key, f"a list has no effect without {switch}; set that to true")
    if listed and not wish.is_possible(wish.own):
        first = " x ".join(f"{wish.ranges[key][0]} of {key}" for key in listed)
        message = f"{first} do not divide the {world_size} ranks; list first what fits together"
        yield Fault(listed[0], message)
    if most is not None and least > most:
        message = f"{least} is more than max_train_batch_size {most}; lower it"
        yield Fault("autotuning.min_train_batch_size", message)
    elif not any(wish.at(others).sizes for others in combinations(wish, 0)):
        message = (
            "the limits leave no micro-batch to try (each sample of one means"
            f" {wish.batch_of(1)} samples per update); lower the minimum or raise the maximum"
        )
        yield Fault("autotuning", message)


def _number_at(flag: str | None, words: Sequence[str]) -> int | None:
    """Return the number given to a flag of the program, or None."""
    number = value_of(words, flag) if flag is not None else None
    return int(number) if number is not None and number.isdecimal() else None


# ---- trials ------------------------------------------------------------------------------------


def combinations(wish: SearchRequest, stage: int) -> list[Others]:
    """Return the other settings to try at a stage; the first are the user's own.

    What the user lists is combined. If a search is not fast, so are the usual bucket sizes and
    limits, and there are changes of one kind each: overlap, offload, recomputation. Keys that the
    configuration sets are left alone.
    """
    zero, own = wish.raw["zero_optimization"], dict(wish.own)
    others, levers = ({}, ()) if wish.section.fast else (_usual(stage, wish.section), _LEVERS)
    varied = {key: values for key, values in others.items() if key not in zero} | wish.ranges
    made = [wish.own]
    for values in product(*varied.values()):
        texts = {key: json.dumps(value) for key, value in zip(varied, values, strict=True)}
        is_own = all(
            text == (own.get(key) or json.dumps(_default(key))) for key, text in texts.items()
        )
        if not is_own and wish.is_possible(tuple(texts.items())):
            made.append(tuple(texts.items()))
    given = {*zero, *(f"{name}.{key}" for name, inner in wish.raw.items() for key in _keys(inner))}
    for changes in levers:
        if not given & {*changes}:
            texts = {key: json.dumps(value) for key, value in changes.items()}
            made.append((*wish.own, *texts.items()))
    return list(dict.fromkeys(made))


def _keys(section: Any) -> Iterable[str]:
    return section if isinstance(section, Mapping) else ()


def _default(key: str) -> Any:
    """Return the default of a key under zero_optimization, by any of its names."""
    return default_of(ZeroOptimization.model_fields[ZeroOptimization.aliases.get(key, key)])


def _usual(stage: int, section: Autotuning) -> dict[str, tuple[Any, ...]]:
    """Return the default space of a stage, with values that follow from the hidden size."""
    space = _SPACES[stage]["zero_optimization"]
    usual = {key: tuple(values) for key, values in space.items() if key != "stage"}
    hidden = section.model_info.hidden_size if section.model_info is not None else None
    if stage == 3 and hidden:
        usual = {key: (hidden * hidden, *values) for key, values in usual.items()}
        usual["stage3_param_persistence_threshold"] = (10 * hidden, 100_000)
    return usual


def patch_of(wish: SearchRequest, trial: TuningTrial) -> dict[str, Any]:
    """Return the keys of a trial's configuration that its settings decide."""
    patch: dict[str, Any] = {"zero_optimization": {"stage": trial.stage}, MICRO: trial.micro_batch}
    for key, text in trial.others:
        _put(patch, key, json.loads(text))
    wish = wish.at(trial.others)
    # If only the program knows its accumulation steps, it fills in both.
    accumulation = wish.accumulation_of(trial.micro_batch)
    if accumulation is not None:
        patch[ACCUMULATION] = accumulation
        patch[TRAIN] = wish.batch_of(trial.micro_batch)
    return patch


def config_of(wish: SearchRequest, trial: TuningTrial) -> dict[str, Any]:
    """Return the configuration of a trial, without an autotuning section."""
    config = {key: value for key, value in wish.raw.items() if key != "autotuning"}
    for key, value in patch_of(wish, trial).items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def _short(key: str) -> str:
    return "".join(word[0] for word in re.split(r"[._]", key.removeprefix("stage3_")))


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
