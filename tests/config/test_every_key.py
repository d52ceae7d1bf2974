"""Every key of the table is declared, with the table's default."""

import csv
import json
import re
from pathlib import Path

import pytest

from hadal.config.optimizer import Optimizer
from hadal.config.scheduler import Scheduler
from hadal.config.section import Section, default_of, plain
from hadal.config.top_level import Config

TABLE = Path(__file__).with_name("keys.csv")
LINES = TABLE.read_text(encoding="utf-8").splitlines()
ROWS = [(row["path"], row["default"]) for row in csv.DictReader(LINES)]
TYPED = re.compile(r"^(optimizer|scheduler)\.params\{type=(?P<types>.+)\}\.(?P<name>.+)$")

# Keys whose declared default says more than the table's.
NAMED_OTHERWISE = {
    # Given where the type is Adam, but one type of the two has another default.
    ("WarmupLR", "warmup_max_lr"): None,
    # Null means the default here; the table's word for an invalid regular expression is "*".
    "checkpoint.writer.type": "fast",
    # The numbers are the same, and users left it out because it was slower there.
    "zero_optimization.offload_optimizer.pipeline_read": True,
    "zero_optimization.offload_optimizer.pipeline_write": True,
}

# What `apex.amp.initialize` took besides the models, the optimizers and `enabled`.
APEX_KEYWORDS = (
    *("opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32"),
    *("master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity"),
    *("min_loss_scale", "max_loss_scale"),
)


def declared(model, names):
    """Find the model and the key that a path leads to, through maps and lists."""
    names = list(names)
    while len(names) > 1:
        name = names.pop(0)
        if names == ["<ds key>"]:
            return model, name
        child = model.child(name.removesuffix("[]"), {})
        assert child is not None, f"{name} holds no keys"
        model = child.model
        if child.shape == "map":
            names.pop(0)
        if not names:
            return model, None
    return model, names[0]


def is_old(model, name):
    return name in {*model.renamed, *model.aliases, *model.moved, *model.leftovers}


def models_of(path):
    """Yield the models and the key of a row, one for each type that the row names."""
    match = TYPED.match(path)
    if match is None:
        yield "", *declared(Config, path.split("."))
        return
    section = Optimizer if path.startswith("optimizer") else Scheduler
    types = match["types"]
    if types == "*":
        types = "LRRangeTest|OneCycle|WarmupLR|WarmupDecayLR|WarmupCosineLR"
    for kind in types.split("|"):
        yield kind, section.child("params", {"type": kind}).model, match["name"]


def defaults_agree(actual, written):
    wanted = json.loads(written)
    if isinstance(actual, Section):
        return wanted == {} or wanted == {"enabled": False}
    if isinstance(actual, list) and not isinstance(wanted, list):
        actual = actual[0]
    if wanted is None and actual == {}:
        return True
    return actual == wanted


@pytest.mark.parametrize(("path", "default"), ROWS, ids=[path for path, _ in ROWS])
def test_a_key_is_declared_with_its_default(path, default):
    for kind, model, name in models_of(path):
        if name is None or is_old(model, name):
            continue
        if path == "amp.<apex keyword>":
            assert set(APEX_KEYWORDS) <= set(model.model_fields)
            continue
        if name.startswith("<"):
            assert model.is_open() or path.endswith("<torch keyword>")
            continue
        if name == "max_grad_norm":
            continue  # refused in JSON, wherever it stands
        assert name in model.model_fields, f"{path} is not declared in {model.__name__}"
        field = model.model_fields[name]
        assert field.description
        actual = plain(default_of(field))
        if (kind, name) in NAMED_OTHERWISE:
            assert actual == NAMED_OTHERWISE[kind, name]
        elif path in NAMED_OTHERWISE:
            assert actual == NAMED_OTHERWISE[path]
        else:
            assert defaults_agree(
                default_of(field) if isinstance(default_of(field), Section) else actual, default
            ), (actual, default)


def test_the_table_is_whole():
    assert len(ROWS) == len(set(ROWS)) == 700


def sections(model, seen=None):
    seen = set() if seen is None else seen
    if model in seen:
        return seen
    seen.add(model)
    for name in model.model_fields:
        child = model.child(name, {})
        if child is not None:
            sections(child.model, seen)
    return seen


def test_every_default_is_valid_by_its_own_declaration():
    # A section that the JSON leaves out is built without a check, so the check is here.
    for model in sections(Config) - {Config, Optimizer, Scheduler}:
        given = {
            name: plain(default_of(field))
            for name, field in model.model_fields.items()
            if default_of(field) is not None
        }
        model.model_validate(given)
