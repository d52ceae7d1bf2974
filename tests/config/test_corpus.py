"""Real configurations: they load, or lack only unbuilt features."""

import json
from pathlib import Path

import pytest

from hadal.config import load_config
from hadal.errors import ConfigError, NotBuiltYetError, UnbuiltConfigError

CORPUS = Path(__file__).with_name("corpus")
LOADS = sorted((CORPUS / "loads").glob("*.json"))
UNBUILT = {
    "many_sections": {
        "nebula.enabled",
        "compile.deepcompile",
        "weight_quantization.enabled",
    },
}
TUNED = {
    "tuned_micro_batches": {"train_micro_batch_size_per_gpu"},
    "tuned_stages": {"zero_optimization.stage", "zero_optimization.reduce_bucket_size"},
}


@pytest.mark.parametrize("path", LOADS, ids=lambda path: path.stem)
def test_it_loads(path):
    config = load_config(path, world_size=2)
    sizes = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * 2
    assert config.train_batch_size == sizes
    zero = config.as_dict()["zero_optimization"]
    assert zero.pop("divergent_ranks") == "auto"  # a word of its own there
    assert '"auto"' not in json.dumps(zero)


def test_the_corpus_is_whole():
    assert len(LOADS) == 23
    assert {path.stem for path in (CORPUS / "tuned").glob("*.json")} == TUNED.keys()
    assert {path.stem for path in (CORPUS / "unbuilt").glob("*.json")} == UNBUILT.keys()


@pytest.mark.parametrize("name", UNBUILT)
def test_it_lacks_only_unbuilt_names(name):
    path = CORPUS / "unbuilt" / f"{name}.json"
    with pytest.raises(UnbuiltConfigError) as caught:
        load_config(path, world_size=2)
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, NotBuiltYetError)
    assert {fault.path for fault in caught.value.faults} == UNBUILT[name]
    assert all("not built yet" in fault.message for fault in caught.value.faults)


@pytest.mark.parametrize("name", UNBUILT)
def test_unbuilt_keys_are_a_note_where_allowed(name):
    path = CORPUS / "unbuilt" / f"{name}.json"
    config = load_config(path, world_size=2, allow_unbuilt=True)
    assert "not built yet" in " ".join(config.notes)
    assert json.loads(json.dumps(config.as_dict())) == config.as_dict()


@pytest.mark.parametrize("name", TUNED)
def test_ranges_are_for_the_autotuner(name):
    with pytest.raises(ConfigError) as caught:
        load_config(CORPUS / "tuned" / f"{name}.json", world_size=2)
    assert {fault.path for fault in caught.value.faults} == TUNED[name]
    assert all("hadal run --autotuning tune" in fault.message for fault in caught.value.faults)
