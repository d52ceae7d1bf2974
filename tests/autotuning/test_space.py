"""The search that a configuration requests, and the configurations of trials."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hadal.compat.install import alias
from hadal.config import load_config
from hadal.errors import ConfigError, LaunchError
from hadal.plugins.autotuning.space import (
    SearchRequest,
    TuningTrial,
    combinations,
    config_of,
    read_request,
)
from hadal.plugins.autotuning.words import config_flag, found_at, mapped, value_of, with_value

ON = {"enabled": True}
LEVERS = 5
Reader = Callable[..., SearchRequest]


@pytest.fixture
def wish(tmp_path: Path) -> Reader:
    """Return a reader of a configuration named on a command line, with further words."""

    def read(config: dict[str, Any], *words: str, ranks: int = 2) -> SearchRequest:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"autotuning": ON, **config}))
        return read_request(("train.py", "--deepspeed", str(path), *words), ranks)

    return read


@pytest.mark.parametrize(
    ("zero", "stages", "are_chosen"),
    [
        (None, (0, 1, 2, 3), False),
        ({"stage": "all"}, (0, 1, 2, 3), False),
        ({"stage": "auto"}, (0, 1, 2, 3), False),
        ("all", (0, 1, 2, 3), False),
        ({"overlap_comm": True}, (0, 1, 2, 3), False),
        ({"stage": [2, 3]}, (2, 3), True),
        ({"stage": 1}, (1,), True),
        (True, (1,), True),
    ],
)
@pytest.mark.claims("autotuning")
def test_stages(wish: Reader, zero: object, stages: tuple[int, ...], are_chosen: bool) -> None:
    found = wish({} if zero is None else {"zero_optimization": zero})
    assert (found.stages, found.are_chosen) == (stages, are_chosen)


@pytest.mark.parametrize(
    ("told", "words", "listed", "start"),
    [
        (4, (), (), 4),
        ([1, 4, 16], (), (1, 4, 16), 2),
        ("auto", ("--micro", "6"), (), 6),
        ("auto", ("--micro=6",), (), 6),
        ("auto", (), (), 2),
        (3, ("--micro", "6"), (), 3),
    ],
)
@pytest.mark.claims(
    "autotuning.arg_mappings",
    "autotuning.arg_mappings.<ds key>",
    "autotuning.min_train_micro_batch_size_per_gpu",
)
def test_micro_batches(
    wish: Reader, told: object, words: tuple[str, ...], listed: tuple[int, ...], start: int
) -> None:
    section = {
        **ON,
        "min_train_micro_batch_size_per_gpu": 2,
        "arg_mappings": {"train_micro_batch_size_per_gpu ": "--micro"},
    }
    found = wish({"train_micro_batch_size_per_gpu": told, "autotuning": section}, *words)
    assert (found.micro_batches, found.start) == (listed, start)


@pytest.mark.claims(
    "autotuning.max_train_batch_size",
    "autotuning.min_train_batch_size",
    "autotuning.max_train_micro_batch_size_per_gpu",
    "autotuning.mp_size",
)
def test_bounds_of_the_batch(wish: Reader) -> None:
    base = {"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 4}

    def of(**section: int) -> tuple[int, int]:
        sizes = wish({**base, "autotuning": {**ON, **section}}, ranks=8).sizes
        return sizes[0], sizes[-1]

    assert of() == (1, 1024)
    assert of(max_train_micro_batch_size_per_gpu=9) == (1, 9)
    assert of(max_train_batch_size=100) == (1, 4)
    assert of(max_train_batch_size=100, mp_size=4) == (1, 16)
    assert of(min_train_batch_size=49) == (3, 1024)
    with pytest.raises(ConfigError, match=r"leave no micro-batch .* 24 samples per update"):
        of(min_train_batch_size=100, max_train_batch_size=100)


@pytest.mark.parametrize(
    ("config", "pairs"),
    [
        ({}, {1: 16, 3: 5, 16: 1, 17: 1}),  # the program takes all sizes from its configuration
        ({"gradient_accumulation_steps": 3}, {1: 3, 16: 3}),  # the user's own
        ({"gradient_accumulation_steps": "auto"}, {1: None}),  # the program fills it in
    ],
)
def test_the_accumulation_fills_the_batch_if_it_may(
    wish: Reader, config: dict[str, Any], pairs: dict[int, int | None]
) -> None:
    section = {**ON, "max_train_batch_size": 32}
    found = wish({**config, "autotuning": section})
    assert {size: found.accumulation_of(size) for size in pairs} == pairs
    # A mapped flag is set with the rest; a program with a flag for one size may have another.
    flag = {"arg_mappings": {"gradient_accumulation_steps": "--gas"}}
    auto = {"gradient_accumulation_steps": "auto"}
    found = wish({**auto, "autotuning": {**section, **flag}}, "--gas", "3")
    assert (found.accumulation_of(2), found.batch_of(2), found.sizes[-1]) == (8, 32, 16)
    flag = {"arg_mappings": {"train_micro_batch_size_per_gpu": "--micro"}}
    assert wish({"autotuning": {**section, **flag}}).accumulation_of(2) is None
    with pytest.raises(ConfigError, match="64 is more than max_train_batch_size 32; lower it"):
        wish({"autotuning": {**section, "min_train_batch_size": 64}})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"autotuning": {}}, "autotuning.enabled"),
        ({"autotuning": {**ON, "mp_size": 3}}, "does not divide the 2 ranks"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean"),
        ({"tensor_parallel": {"autotp_size": [2, 0]}}, "expected a list of integers > 0"),
        (
            {"tensor_parallel": {"autotp_size": [1, 2]}, "autotuning": {**ON, "mp_size": 2}},
            "and a list in tensor_parallel.autotp_size; leave mp_size out",
        ),
        ({"train_micro_batch_size_per_gpu": []}, "expected a list of integers > 0"),
        ({"train_micro_batch_size_per_gpu": "few"}, "expected an integer"),
    ],
)
def test_invalid_searches_are_refused(wish: Reader, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        wish(config)


@pytest.mark.claims("autotuning.fast", "autotuning.model_info.hidden_size")
def test_other_settings(wish: Reader) -> None:
    assert combinations(wish({}), 1) == [()]
    lists = {"reduce_bucket_size": [1e6, 2e6], "offload_optimizer": [None, {"device": "cpu"}]}
    four = combinations(wish({"zero_optimization": lists}), 1)
    assert [TuningTrial(1, 2, others).name(3) for others in four] == [
        "z1_tmbspg2_gas3_rbs1e6_oonull",
        "z1_tmbspg2_gas3_rbs1e6_oocpu",
        "z1_tmbspg2_gas3_rbs2e6_oonull",
        "z1_tmbspg2_gas3_rbs2e6_oocpu",
    ]
    slow = {**ON, "fast": False, "model_info": {"hidden_size": 100}}
    # Nine pairs of buckets; the one that is the default comes first, as the user's own.
    nine = combinations(wish({"autotuning": slow}), 2)
    assert (len(nine), nine[0]) == (9 + LEVERS, ())
    given = wish({"autotuning": slow, "zero_optimization": {"reduce_bucket_size": 7}})
    assert len(combinations(given, 1)) == 3 + LEVERS
    wide = combinations(wish({"autotuning": slow}), 3)
    assert wide[1][:1] == (("reduce_bucket_size", "10000"),)
    assert {"stage3_param_persistence_threshold": "1000"}.items() <= dict(wide[1]).items()


def test_the_default_spaces_have_deepspeeds_names(wish: Reader) -> None:
    constants: Any = alias("deepspeed.autotuning.constants")
    for stage in range(4):
        space = getattr(constants, f"DEFAULT_TUNING_SPACE_ZERO_{stage}")["zero_optimization"]
        assert space.pop("stage") == stage
        slow = wish({"autotuning": {**ON, "fast": False}})
        assert len(combinations(slow, stage)) == LEVERS + math.prod(map(len, space.values()))
        # A user overwrites a key by a value, or by a list.
        own = {"zero_optimization": {"reduce_bucket_size": [7, 8]}}
        given = wish({"autotuning": {**ON, "fast": False}, **own})
        pairs = 2 * math.prod(map(len, [*space.values()][1:]))
        assert len(combinations(given, stage)) == LEVERS + pairs
        space["stage"] = stage


def test_levers_are_settings_of_one_kind(wish: Reader) -> None:
    def names(config: dict[str, Any], count: int) -> list[str]:
        made = combinations(wish({"autotuning": {**ON, "fast": False}} | config), 2)[-count:]
        return [TuningTrial(2, 4, others).name(1) for others in made]

    assert names({}, LEVERS) == [
        "z2_tmbspg4_gas1_octrue",
        "z2_tmbspg4_gas1_ocfalse",
        "z2_tmbspg4_gas1_acmunits",
        "z2_tmbspg4_gas1_oocpu",
        "z2_tmbspg4_gas1_acmunits_oocpu",
    ]
    # What the user sets stays.
    own = {
        "zero_optimization": {"offload_optimizer": None, "reduce_bucket_size": [1, 2]},
        "activation_checkpointing": {"number_checkpoints": 2},
    }
    assert names(own, 4) == [
        "z2_tmbspg4_gas1_abs1e9_rbs2",
        "z2_tmbspg4_gas1_rbs1_octrue",
        "z2_tmbspg4_gas1_rbs1_ocfalse",
        "z2_tmbspg4_gas1_rbs1_acmunits",
    ]
    given = wish({"autotuning": {**ON, "fast": False}} | own)
    found = config_of(given, TuningTrial(2, 4, combinations(given, 2)[-1]))
    assert found["activation_checkpointing"] == {"number_checkpoints": 2, "modules": "units"}


@pytest.mark.parametrize(
    ("micro", "section", "sizes"),
    [
        (4, {"max_train_micro_batch_size_per_gpu": 20}, (1, 2, 3, 4, 6, 8, 12, 16, 20)),
        ([9, 2, 4], {"max_train_micro_batch_size_per_gpu": 8}, (2, 4)),
        (None, {"max_train_batch_size": 16}, (1, 2, 4, 8)),
        (None, {"max_train_batch_size": 24}, (1, 2, 3, 4, 6, 12)),
    ],
)
def test_sizes(wish: Reader, micro: object, section: dict[str, Any], sizes: list[int]) -> None:
    config = {} if micro is None else {"train_micro_batch_size_per_gpu": micro}
    assert wish({**config, "autotuning": {**ON, **section}}).sizes == sizes


@pytest.mark.claims("tensor_parallel.autotp_size")
def test_degrees_of_tensor_parallelism_are_tried_if_listed(wish: Reader) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    found = wish({**sizes, "tensor_parallel": {"autotp_size": [2, 1]}}, ranks=4)
    others = combinations(found, 1)
    assert [TuningTrial(1, 2, each).name(3) for each in others] == [
        "z1_tmbspg2_gas3_tpas2",
        "z1_tmbspg2_gas3_tpas1",
    ]
    made = [config_of(found, TuningTrial(1, 2, each)) for each in others]
    assert [config["tensor_parallel"] for config in made] == [{"autotp_size": n} for n in (2, 1)]
    # Ranks that share a model read the same samples.
    assert [config["train_batch_size"] for config in made] == [12, 24]
    assert load_config(made[0], world_size=4).train_batch_size == 12
    every = wish({"tensor_parallel": {"autotp_size": "all"}}, ranks=6)
    assert every.ranges == {"tensor_parallel.autotp_size": (1, 2, 3, 6)}
    # So do those of a degree that is not searched.
    fixed = wish({**sizes, "tensor_parallel": {"autotp_size": 2}}, ranks=4)
    assert config_of(fixed, TuningTrial(1, 2))["train_batch_size"] == 12
    full = {
        "autotuning": {**ON, "max_train_batch_size": 16},
        "tensor_parallel": {"autotp_size": [1, 4]},
    }
    found = wish(full, ranks=4)
    assert [found.at(each).sizes for each in combinations(found, 0)] == [
        (1, 2, 4),
        (1, 2, 4, 8, 16),
    ]


@pytest.mark.claims("pipeline.stages", "sequence_parallel_size", "expert_parallel.autoep_size")
def test_listed_degrees_are_combined_if_they_divide_the_ranks(wish: Reader) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    lists = {
        "sequence_parallel_size": [1, 2],
        "pipeline": {"auto": True, "stages": "all"},
        "expert_parallel": {"enabled": True, "autoep_size": [1, 4]},
    }
    found = wish({**sizes, **lists, "tensor_parallel": {"autotp_size": 2}}, ranks=4)
    made = [config_of(found, TuningTrial(1, 2, each)) for each in combinations(found, 1)]
    degrees = [
        (
            config["sequence_parallel_size"],
            config["pipeline"]["stages"],
            config["expert_parallel"]["autoep_size"],
            config["train_batch_size"],
        )
        for config in made
    ]
    # Two ranks share layers in any case. Ranks that share experts read samples of their own.
    parts = [(1, 1, 12), (1, 2, 6), (2, 1, 6)]
    assert degrees == [(s, p, e, batch) for s, p, batch in parts for e in (1, 4)]
    for lists, told in (
        ({"pipeline": {"stages": [1, 2]}}, "no effect without pipeline.auto"),
        ({"expert_parallel": {"autoep_size": [1, 2]}}, "no effect without expert_parallel.enabled"),
        ({"sequence_parallel_size": [3]}, "3 does not divide the 4 ranks; list divisors"),
        (
            {"pipeline": {"auto": True, "stages": [4]}, "sequence_parallel_size": [2, 1]},
            "2 of sequence_parallel_size x 4 of pipeline.stages do not divide the 4 ranks",
        ),
        (
            {"sequence_parallel_size": [1, 2], "autotuning": {**ON, "mp_size": 2}},
            "2, and a list in sequence_parallel_size",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            wish(lists, ranks=4)


def test_the_configuration_of_a_trial(wish: Reader) -> None:
    own = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": [0, 2], "overlap_comm": [True, False]},
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
    }
    found = config_of(wish(own), TuningTrial(2, 5, (("overlap_comm", "false"),)))
    assert found == {
        "train_batch_size": 30,
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
    }
    assert load_config(found, world_size=2).train_batch_size == 30
    # Where only the program knows its accumulation, it fills in what follows from it.
    auto = {key: "auto" for key in ("train_batch_size", "gradient_accumulation_steps")}
    assert "train_batch_size" not in config_of(wish(auto), TuningTrial(0, 5))


# ---- words -------------------------------------------------------------------------------------


def test_values_in_words() -> None:
    words = ("t.py", "--a", "1", "--b=2", "--deepspeed", "--c", "x y")
    assert [value_of(words, f"--{flag}") for flag in ("a", "b", "c", "d")] == [
        "1",
        "2",
        "x y",
        None,
    ]
    assert value_of(words, "--deepspeed") is None
    assert with_value(words, "--a", "7")[:3] == ("t.py", "--a", "7")
    assert with_value(words, "--b", "7")[3] == "--b=7"
    assert with_value(words, "--d", "7") == (*words, "--d", "7")
    with pytest.raises(LaunchError, match=r"t\.py is called without this flag"):
        config_flag(words)
    assert config_flag((*words, "--deepspeed_config=c")) == "--deepspeed_config"


def test_mappings_follow_the_configuration() -> None:
    config = {"gas": 2, "lr": "auto", "zero": {"stage": 3}, "optimizer": {"params": {"eps": 1e-8}}}
    flags = {"gas": "--g", "lr": "--lr", "zero.stage": "--z", "eps": "--eps", "none": "--none"}
    assert mapped(("t.py", "--g", "1", "--lr", "9"), flags, config) == (
        *("t.py", "--g", "2", "--lr", "9", "--z", "3", "--eps", "1e-08"),
    )
    assert found_at(config, "zero.none") is None
