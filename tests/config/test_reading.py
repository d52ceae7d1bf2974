"""The accepted forms of a configuration, and of files."""

from __future__ import annotations

import base64
import copy
import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hadal.config import Config, load_config
from hadal.config.reading import parse, strict
from hadal.errors import ConfigError

from .faults import BASE, faults_of, only_fault

TEXT = json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}})


def test_a_dict_a_path_text_and_base64_are_the_same(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(TEXT)
    encoded = base64.urlsafe_b64encode(TEXT.encode()).decode()
    sources = (json.loads(TEXT), TEXT, path, str(path), encoded, encoded.rstrip("="))
    loaded = [load_config(source).as_dict() for source in sources]
    assert all(one == loaded[0] for one in loaded)


def test_the_callers_dict_is_unchanged():
    source = {
        "train_batch_size": "auto",
        "optimizer": {"type": "adam", "params": {"lr": "1e-3", "betas": [0.9, 0.9]}},
        "zero_optimization": {"stage": 2, "cpu_offload": False, "prefetch_bucket_size": 4},
        "data_efficiency": {"curriculum_learning": {"enabled": False}},
        "autotuning": {"arg_mappings": {" a ": "--a"}},
    }
    before = copy.deepcopy(source)
    load_config(source)
    assert source == before


def test_comments_and_trailing_commas(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(
        """{
        # a hash, with a "quote
        "train_batch_size": 8, // slashes
        /* a block,
           of two lines } */
        "wandb": {"project": "a # b // c /* d */ , }", "enabled": false,},
        "zero_optimization": {"leaf_module": {"names": ["a, ]", "b\\\\", "c\\"" , ], /* end */ }},
        }"""
    )
    config = load_config(path)
    assert config.wandb.project == "a # b // c /* d */ , }"
    assert config.zero_optimization.leaf_module.names == ["a, ]", "b\\", 'c"']


def test_a_syntax_error_names_line_and_column(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{\n  "train_batch_size": /* long */ nonsense\n}')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).splitlines() == [
        "ds_config.json, line 2, column 34: Expecting value; JSON with comments and trailing commas"
        " is expected",
        '    "train_batch_size": /* long */ nonsense',
        f"  {'^':>34}",
    ]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("# a comment\ntrain_batch_size: 8\n", "this looks like YAML"),
        ("---\nzero_optimization:\n  stage: 2\n", "this looks like YAML"),
        ("{'train_batch_size': 8}", "JSON has double quotes"),
        ('{"bf16": {"enabled": True}}', "JSON has true, false and null"),
        ('{"bf16": None}', "JSON has true, false and null"),
        ("{train_batch_size: 8}", "JSON has keys in double quotes"),
        ('{"train_batch_size": 8 "bf16": {}}', "JSON with comments and trailing commas"),
        ('{"train_batch_size": 8', "JSON with comments and trailing commas"),
    ],
)
def test_the_meaning_of_a_syntax_error_is_guessed(tmp_path, text, advice):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=advice) as caught:
        load_config(path)
    *_, line, caret = str(caught.value).splitlines()
    assert line.removeprefix("  ") in text and caret.strip() == "^"
    path.write_text('{"a": "' + "x" * 300 + "', 'b': 1}")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert max(map(len, str(caught.value).splitlines()[1:])) <= 62


@pytest.mark.parametrize("text", ["{,}", '{"a": 1,,}', "[1 2]", '{"a" 1}', "{", "", "[]", "3"])
def test_json_that_is_not_an_object_is_refused(tmp_path, text):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"ds_config\.json"):
        load_config(path)


DUPLICATES = """{"train_batch_size": 8, "train_batch_size": 8,
    "zero_optimization": {"offload_param": {"device": "none", "device": "cpu"}},
    "tensor_parallel": {"partition_config": {"layer_specs": [{"shape": [1], "shape": [2]}]}}}"""


def test_no_key_twice_in_files_and_in_base64(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(DUPLICATES)
    for source in (path, base64.urlsafe_b64encode(DUPLICATES.encode()).decode()):
        assert faults_of(source) == dict.fromkeys(
            (
                "train_batch_size",
                "zero_optimization.offload_param.device",
                "tensor_parallel.partition_config.layer_specs[0].shape",
            ),
            "given twice in one object; keep one",
        )


@pytest.mark.parametrize("source", ["no/such/file.json", "%%%", "", "a" * 5000, "e30"])
def test_neither_path_nor_base64(source):
    if source == "e30":  # base64 of {}
        assert only_fault(source)[0] == "train_batch_size"
        return
    with pytest.raises(ConfigError, match="neither an existing file nor base64") as caught:
        load_config(source)
    assert "check the path" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("source", [None, 3, ["a"], b"bytes"])
def test_other_things_are_refused(source):
    with pytest.raises(ConfigError, match="pass a dict, a path, JSON text or its base64"):
        load_config(source)


def test_an_unreadable_file_is_a_config_error(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        load_config(path)
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        load_config(path)
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(str(tmp_path)[:80] if tmp_path.is_dir() and len(str(tmp_path)) <= 80 else "/")


@pytest.mark.parametrize("text", ['{"a":' * 5000 + "1" + "}" * 5000, '{"a": ' + "9" * 5000 + "}"])
def test_a_file_beyond_reading_is_a_config_error(tmp_path, text):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="nested too deeply or contains too long a number"):
        load_config(path)


def test_a_dict_that_contains_itself_is_a_config_error():
    endless: dict = {}
    endless["zero_optimization"] = endless
    with pytest.raises(ConfigError, match="contains itself"):
        load_config(endless)


@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_clipping": 10**400},
        {"fp16": {"enabled": True, "loss_scale": 10**400}},
        {"fp16": {"enabled": True, "initial_scale_power": 5000}},
        {"train_batch_size": 10**30},
    ],
)
def test_numbers_beyond_computing_are_config_errors(keys):
    with pytest.raises(ConfigError):
        load_config({"train_micro_batch_size_per_gpu": 1, **keys})


def test_faults_are_reported_in_columns_under_the_files_name(tmp_path):
    path = tmp_path / "ds_config.json"
    text = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4,'
    text += '"gradient_accumulation_steps": 2,'
    text += '"zero_optimization": {"stage": 7, "offload_parm": {}}}'
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, world_size=4)
    assert str(caught.value) == "\n".join(
        [
            "3 faults in ds_config.json",
            '  zero_optimization.offload_parm  unknown key; did you mean "offload_param"?',
            "  zero_optimization.stage         expected 0, 1, 2 or 3, got 7",
            "  train_batch_size                64, but 4 (micro-batch) x 2 (accumulation) x 4 ranks"
            " = 32; remove one of the three",
        ]
    )
    assert pickle.loads(pickle.dumps(caught.value)).faults == caught.value.faults


def test_the_configuration_is_frozen_and_can_be_copied():
    config = load_config(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.train_batch_size = 3
    with pytest.raises(ValueError, match="frozen"):
        config.zero_optimization.stage = 3
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert isinstance(other, Config)
        assert other.as_dict() == config.as_dict()
        assert other.origins == config.origins


def test_infinity_means_never_for_steps_per_print_only():
    config = load_config({**BASE, "steps_per_print": math.inf})
    assert config.steps_per_print is None
    assert config.origins["steps_per_print"] == "you"
    path, message = only_fault({**BASE, "gradient_clipping": math.inf})
    assert path == "gradient_clipping"
    assert message.startswith("expected a number >= 0, got Infinity")
    assert only_fault({**BASE, "fp16": {"loss_scale": math.nan}})[0] == "fp16.loss_scale"


def test_a_byte_order_mark_is_accepted(tmp_path):
    path = Path(tmp_path / "ds_config.json")
    path.write_text(TEXT, encoding="utf-8-sig")
    assert load_config(path).zero_optimization.stage == 2


# ---- comments and commas -------------------------------------------------------------------------


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FILLERS = st.sampled_from(
    ["", " ", "\n", '/* } ] , " */', "// ,}\n", '# "quoted\n', "/**/", "\t/* a\nb */ "]
)


def rendered(value, draw):
    """Write a value with a filler between any two tokens, and commas before closing brackets."""

    def between(*tokens):
        return "".join(draw(FILLERS) + token for token in tokens)

    if isinstance(value, dict):
        inner = [
            between(json.dumps(name), ":") + rendered(below, draw) + between(",")
            for name, below in value.items()
        ]
        return between("{") + "".join(inner) + between("}")
    if isinstance(value, list):
        inner = [rendered(below, draw) + between(",") for below in value]
        return between("[") + "".join(inner) + between("]")
    return between(json.dumps(value))


@given(st.data(), VALUES)
def test_relaxed_json_equals_strict_json(data, value):
    assert parse(rendered(value, data.draw) + data.draw(FILLERS)) == value


@given(VALUES, st.integers(0, 2) | st.none())
def test_strict_json_is_unchanged(value, indent):
    text = json.dumps(value, indent=indent)
    assert strict(text) == text
    assert parse(text) == value


@given(st.text(alphabet='{}[],:"\\ab1#/*\n '))
def test_places_do_not_move(text):
    blanked = strict(text)
    assert len(blanked) == len(text)
    assert [i for i, c in enumerate(blanked) if c == "\n"] == [
        i for i, c in enumerate(text) if c == "\n"
    ]
