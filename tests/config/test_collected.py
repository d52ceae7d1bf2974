"""Configurations of every age and habit: they load, or are refused with the place and a remedy.

`tests/data/config_outcomes.json` says which are refused, and for which key each other one waits.
"""

import json
from pathlib import Path

import pytest

from hadal.config import load_config
from hadal.config.reading import read
from hadal.config.section import leaves
from hadal.errors import ConfigError, NotBuiltYetError, UnbuiltConfigError

DATA = Path(__file__).parents[1] / "data"
FOUND = {path.stem: path for path in sorted((DATA / "configs").glob("*.json"))}
OUTCOMES = json.loads((DATA / "config_outcomes.json").read_text())
WAITS, REFUSED = OUTCOMES["waits_for"], OUTCOMES["refused"]
LOADS = [name for name in FOUND if name not in WAITS and name not in REFUSED]


def test_the_collection_is_whole() -> None:
    assert len(FOUND) >= 145
    assert len(LOADS) >= 81
    assert FOUND.keys() >= WAITS.keys() | REFUSED.keys()
    assert not WAITS.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", LOADS)
def test_it_loads_and_no_key_of_it_is_lost(name: str) -> None:
    config = load_config(FOUND[name], world_size=2)
    _expect_every_key(name, config.origins, config.notes)
    replicas = 2 // config.sequence_parallel_size
    sizes = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * replicas
    assert config.train_batch_size == sizes
    zero = config.as_dict()["zero_optimization"]
    assert zero.pop("divergent_ranks") == "auto"  # a word of its own there
    assert '"auto"' not in json.dumps(zero)


def _expect_every_key(name: str, origins: object, notes: object) -> None:
    """Every key of the file is in the effective configuration, or is logged."""
    assert isinstance(origins, dict)
    assert isinstance(notes, tuple)
    told = " ".join(notes)
    for path, value in leaves(read(FOUND[name])[1]):
        if value is None or (path, value) == ("datastates_ckpt", False):
            continue  # the default, where they say nothing else
        head, _, last = path.rpartition(".")
        names = (path, f"{head}.stage3_{last}")  # either is a name of such a key
        is_taken = any(origins.get(each) in ("you", "auto", "inferred") for each in names)
        # A moved key is reported by its old name, an open section by its own.
        above = [path.rsplit(".", cut)[0] for cut in range(path.count(".") + 1)]
        assert is_taken or any(part in told for part in above), path


@pytest.mark.parametrize("name", WAITS)
def test_it_waits_only_for_the_declared_events(name: str) -> None:
    try:
        config = load_config(FOUND[name], world_size=2)
    except UnbuiltConfigError as error:
        paths = {fault.path for fault in error.faults}
        assert paths <= set(WAITS[name])
        assert all("not built yet" in fault.message for fault in error.faults)
        assert all(path in str(error) for path in paths)
        assert isinstance(error, ConfigError)
        assert isinstance(error, NotBuiltYetError)
        config = load_config(FOUND[name], world_size=2, allow_unbuilt=True)
        assert "not built yet" in " ".join(config.notes)
        assert json.loads(json.dumps(config.as_dict())) == config.as_dict()
    _expect_every_key(name, config.origins, config.notes)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_place_and_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(FOUND[name], world_size=2, allow_unbuilt=True)
    found = {fault.path: fault.message for fault in caught.value.faults} or {"": str(caught.value)}
    assert found.keys() == REFUSED[name].keys()
    for path, remedy in REFUSED[name].items():
        assert remedy in found[path]
        assert path in str(caught.value)
