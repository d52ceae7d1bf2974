"""Numbers may be texts that spell them, switches may not: one rule, for every key."""

import pytest

from hadal.config import load_config
from hadal.config.document import has_typed_params
from hadal.config.prepare import Report, validate_section
from hadal.config.section import default_of, expected, plain
from hadal.config.top_level import Config

from .faults import BASE, only_fault


def sections(model):
    """Every section, once."""
    found, waiting = [], [model]
    while waiting:
        model = waiting.pop()
        if model in found:
            continue
        found.append(model)
        for name in model.model_fields:
            child = model.child(name, {})
            if child is not None and not has_typed_params(model, name):
                waiting.append(child.model)
    return found


def keys_that_expect(*kinds):
    return [
        pytest.param(model, name, id=f"{model.__name__}.{name}")
        for model in sections(Config)
        for name, field in model.model_fields.items()
        if expected(field).split(" >")[0].split(" <")[0] in kinds
    ]


def checked(model, name, value):
    """Return the value that a key has of what is given, and the faults."""
    report = Report()
    return getattr(validate_section(model, {name: value}, report), name), report.faults


@pytest.mark.parametrize(("model", "name"), keys_that_expect("a number", "an integer"))
def test_every_number_may_be_a_text(model, name):
    default = plain(default_of(model.model_fields[name]))
    value = 1 if default is None else default
    number, faults = checked(model, name, value)
    assert not faults
    for spelled in (str(value), f" {value} "):
        assert checked(model, name, spelled) == (number, {})
    for other in (True, "many", "", "nan", "inf"):
        assert checked(model, name, other)[1]


@pytest.mark.parametrize(("model", "name"), keys_that_expect("true or false"))
def test_a_switch_may_be_a_text_but_no_number(model, name):
    for value in (True, False):
        assert checked(model, name, value) == (value, {})
        for spelled in (str(value), str(value).lower()):
            assert checked(model, name, spelled) == (value, {})
    for other in (1, 0, 1.0, "1", "yes", ""):
        assert checked(model, name, other)[1]


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_optimization": {"cpu_offload": 1}},
        {"zero_optimization": {"cpu_offload_param": "yes"}},
        {"fp32_allreduce": 1},
    ],
)
def test_nor_are_those_of_older_releases(keys):
    assert "expected true or false" in only_fault({**BASE, **keys})[1]


def test_arguments_of_torchs_own_classes_follow_the_rule():
    keys = {
        "optimizer": {"type": "SGD", "params": {"lr": "1e-1", "momentum": "0.9"}},
        "scheduler": {"type": "StepLR", "params": {"step_size": "10", "gamma": "0.5"}},
    }
    config = load_config({**BASE, **keys})
    assert config.optimizer.params == {"lr": 0.1, "momentum": 0.9}
    assert config.scheduler.params == {"step_size": 10, "gamma": 0.5}
    words = {"type": "CyclicLR", "params": {"mode": "triangular", "base_lr": "inf"}}
    assert load_config({**BASE, "scheduler": words}).scheduler.params == words["params"]


def test_lists_and_alternatives_follow_the_rule():
    keys = {
        "optimizer": {"type": "Adam", "params": {"betas": ["0.9", "0.95"], "lr": "1e-4"}},
        "amp": {"enabled": False, "loss_scale": "128"},
        "zero_optimization": {"stage": "2", "reduce_bucket_size": "5e8"},
        "train_batch_size": "8",
        "gradient_clipping": "1.0",
    }
    config = load_config({**BASE, **keys})
    assert config.optimizer.params == {"betas": (0.9, 0.95), "lr": 1e-4}
    assert config.amp.loss_scale == 128.0
    assert config.zero_optimization.stage == 2
    assert (config.train_batch_size, config.gradient_clipping) == (8, 1.0)


@pytest.mark.parametrize("text", ["1_000", "\uff18", "+8", "0x8", "08", "8.", "inf", "nan", ""])
def test_a_number_in_a_string_is_one_of_jsons(text):
    for name in ("train_batch_size", "gradient_clipping"):
        assert only_fault({**BASE, name: text})[0] == name
