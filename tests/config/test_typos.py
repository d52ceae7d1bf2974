"""A typo of any known key is a fault that names the key; nonsense is refused in words."""

import copy

import pytest
from hypothesis import assume, given, settings, strategies as st

from hadal.config import load_config
from hadal.config.optimizer import AdamParams
from hadal.config.section import Section
from hadal.config.top_level import Config
from hadal.errors import ConfigError

from .faults import BASE, faults_of


def paths(model, path=()):
    """Walk every key of every separate section."""
    for name in model.model_fields:
        yield (*path, name), model
        child = model.child(name, {})
        if child is not None and child.shape == "one" and name != "params":
            yield from paths(child.model, (*path, name))


KEYS: list[tuple[tuple[str, ...], type[Section]]] = list(paths(Config))
LETTERS = "abcdefghijklmnopqrstuvwxyz_0123456789"


def names_of(model):
    return {
        *model.model_fields,
        *model.renamed,
        *model.aliases,
        *model.moved,
        *model.leftovers,
    }


@st.composite
def typos(draw):
    path, model = draw(st.sampled_from(KEYS))
    name = path[-1]
    place = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from(LETTERS))
    kind = draw(st.sampled_from(["drop", "double", "replace", "swap", "case"]))
    wrong = {
        "drop": name[:place] + name[place + 1 :],
        "double": name[:place] + letter + name[place:],
        "replace": name[:place] + letter + name[place + 1 :],
        "swap": name[:place] + name[place : place + 2][::-1] + name[place + 2 :],
        "case": name.capitalize() if name[0].isalpha() else name.upper(),
    }[kind]
    assume(wrong and wrong not in names_of(model) and not wrong.startswith(("_", "//", "$")))
    return (*path[:-1], wrong), name, model


def source_with(path):
    source = {}
    inner = source
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = 1
    return {**BASE, **source}


@settings(max_examples=200)
@given(typos())
def test_a_typo_is_reported_with_the_intended_key(typo):
    path, name, model = typo
    if model.is_open():
        return
    message = faults_of(source_with(path))[".".join(path)]
    assert message.startswith("unknown key")
    if len(name) > 5:
        assert "did you mean" in message


@pytest.mark.parametrize("name", sorted(AdamParams.model_fields))
def test_a_typo_in_params(name):
    source = {**BASE, "optimizer": {"type": "adam", "params": {name + "x": 1}}}
    assert f'did you mean "{name}"?' in faults_of(source)[f"optimizer.params.{name}x"]


JUNK = st.sampled_from([None, True, 3, -1, 2.5, "x", "auto", [], [1], ["x"], {}, {"x": 1}])


@pytest.mark.slow
@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4))
def test_any_file_loads_or_is_refused_with_a_message(values):
    source = {**BASE}
    for (path, _), value in values.items():
        inner = source
        for name in path[:-1]:
            if not isinstance(inner.get(name), dict):
                inner[name] = {}
            inner = inner[name]
        inner[path[-1]] = copy.deepcopy(value)
    try:
        load_config(source)
    except ConfigError as error:
        assert error.faults
