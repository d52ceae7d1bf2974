"""The pages and the schema generated from the declarations, and the time of imports."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hadal.config import load_config
from hadal.config.document import anchor, config_schema, examples, pages
from hadal.config.top_level import Config

from .faults import BASE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written():
    return pages()


def test_the_pages_are_fresh(written):
    for name, text in written.items():
        on_disk = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert on_disk == text, f"{name} is stale; run: python -m hadal.config.document"


def test_each_section_is_on_one_page(written):
    main, unbuilt = written.values()
    for name in Config.model_fields:
        if Config.child(name, {}) is None:
            assert f"| `{name}` |" in main
        else:
            assert f"## `{name}`" in (main if name in examples() else unbuilt)


def test_a_section_that_acts_has_an_example(written):
    _, unbuilt = written.values()
    assert "| **acts** |" not in unbuilt, "give the section one in docs/sources/configuration.json"


def test_links_inside_a_page_lead_to_its_headings(written):
    for text in written.values():
        headings = {anchor(line.lstrip("# ")) for line in text.splitlines() if line[:2] == "##"}
        targets = set(re.findall(r"\]\(#([^)]+)\)", text))
        assert targets
        assert targets <= headings


@pytest.mark.parametrize("path", examples())
def test_an_example_is_accepted_and_sets_keys_of_its_section(path):
    example = examples()[path]
    sizes = {"train_micro_batch_size_per_gpu", "elasticity"}
    ranks = 2 if path == "tensor_parallel" else 1
    source = dict(example) if sizes & example.keys() else {**BASE, **example}
    config = load_config(source, world_size=ranks)
    assert not config.notes
    section: Any = example
    for name in path.split(".") if path else ():
        section = section[name]


@pytest.fixture(scope="module")
def schema():
    return config_schema()


def test_the_schema_is_one_that_an_editor_takes(schema):
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(schema)) == schema
    text = json.dumps(schema)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}:
        assert reference in schema["$defs"]


def test_every_key_of_the_schema_has_a_description(schema):
    objects = [schema, *schema["$defs"].values()]
    for one in objects:
        for name, key in one.get("properties", {}).items():
            assert key.get("description"), name


def test_sections_are_closed(schema):
    opened = {
        name for name, one in schema["$defs"].items() if one["additionalProperties"] is not False
    }
    assert opened == {"MuParams"}
    assert schema["additionalProperties"] is False


def test_ranges_choices_and_auto(schema):
    zero = schema["$defs"]["ZeroOptimization"]["properties"]
    assert zero["stage"]["anyOf"] == [
        {"enum": [0, 1, 2, 3], "type": "integer"},
        {"const": "auto"},
    ]
    assert zero["reduce_bucket_size"]["anyOf"][0] == {"exclusiveMinimum": 0, "type": "integer"}
    assert zero["reduce_bucket_size"]["default"] == 500_000_000
    assert zero["cpu_offload_use_pin_memory"]["deprecated"]
    assert "default" not in schema["properties"]["train_batch_size"]
    assert {"const": "auto"} not in zero["leaf_module"].get("anyOf", [])
    assert zero["save_muon_momentum_buffer_in_memory"]["x-hadal-status"] == "not built yet"


def seconds(statement):
    """Time a statement in a fresh interpreter: the best of some runs, in seconds of the CPU."""
    code = f"import time; t = time.process_time(); {statement}; print(time.process_time() - t)"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        )
        for _ in range(3)
    ]
    return min(float(run.stdout) for run in runs)


def test_the_configuration_is_imported_fast():
    # About 0.1 s where byte code is cached; the margin is for slow and busy machines.
    assert seconds("import hadal.config") < 0.5


def test_neither_torch_nor_rich_is_imported():
    code = (
        "import sys, hadal.config, hadal.cli.main, hadal.cli.explain;"
        "hadal.config.load_config({'train_batch_size': 1});"
        "sys.exit(bool({'torch', 'rich', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
