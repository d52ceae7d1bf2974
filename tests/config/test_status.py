"""The status of a key is that of its own mark, or of the switch above it, everywhere the same."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from hadal.config.document import config_schema, pages, statuses
from hadal.config.top_level import Config

TABLE = Path(__file__).with_name("keys.csv").read_text(encoding="utf-8").splitlines()
ROWS = [row["path"] for row in csv.DictReader(TABLE)]
UNBUILT = re.compile(r"^(weight_quantization|nebula)\.")


def page_rows() -> dict[str, str]:
    """The status of each key on the pages, by its path."""
    found, section = {}, ""
    for line in "\n".join(pages().values()).splitlines():
        heading = re.match(r"#+ `([^`]+)`$", line)
        if heading:
            section = heading[1] + "."
        elif line.startswith("## "):
            section = ""
        row = re.match(r"\| `([^`]+)` \|.*\| \*\*([a-z ]+)\*\* \|$", line)
        if row:
            found[section + row[1]] = row[2]
    return found


def test_nothing_of_a_section_that_is_not_built_is_said_to_act() -> None:
    rows = page_rows()
    wrong = [path for path, status in rows.items() if UNBUILT.match(path) and status == "acts"]
    assert wrong == []
    assert rows["weight_quantization.enabled"] == "not built yet"
    assert rows["fp16.loss_scale"] == "acts"


def test_every_key_of_a_group_of_modules_is_on_the_page() -> None:
    rows = page_rows()
    leaves = [path for path in ROWS if ".params." in path and path.startswith("compression")]
    assert len(leaves) == 8
    for path in leaves:
        assert re.sub(r"<\w+>", "<name>", path) in rows


def test_an_editor_gets_the_same() -> None:
    schema = config_schema()["$defs"]
    for model, places in statuses(Config).items():
        if places != {"not built yet"}:
            continue
        for name in model.model_fields:
            status = schema[model.__name__]["properties"][name].get("x-hadal-status")
            assert status in ("not built yet", "no effect"), f"{model.__name__}.{name}"
    assert "x-hadal-status" not in schema["Fp16"]["properties"]["loss_scale"]
    assert schema["Nebula"]["properties"]["nebula_load_path"]["x-hadal-status"]
