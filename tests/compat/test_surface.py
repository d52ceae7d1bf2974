"""Every name that programs import from deepspeed exists: it works, or raises as not built."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine.toys import config_of, model_of
from torch import nn
from write_surface import OUTPUT, attributes, text

from hadal.compat import surface
from hadal.compat.accessors import _UNBUILT
from hadal.compat.engine import initialize
from hadal.compat.install import alias
from hadal.compat.surface import NameKind, homes, placeholder
from hadal.engine.engine import ATTRIBUTES
from hadal.errors import NotBuiltYetError
from hadal.pipeline import PipelineModule

ROOT = Path(__file__).parents[2]
NAMES = [
    tuple(line.split())
    for line in (ROOT / "tests/data/deepspeed_names.txt").read_text().splitlines()
    if not line.startswith("#")
]

# Folders that hold the package `deepspeed`, newest release first.
COPIES = [
    Path(folder) for folder in os.environ.get("HADAL_DEEPSPEED_COPIES", "").split(":") if folder
]

# Imports each name as programs do, and tells which of them it does not find.
_WALK = """
import importlib, json, sys
import hadal
hadal.install_as_deepspeed()
lost = []
for name, kind in json.load(sys.stdin):
    module, _, leaf = name.rpartition(".")
    try:
        if kind == "m":
            assert importlib.import_module(name).__name__
            assert kind == "m" and importlib.util.find_spec(name) is not None
        else:
            scope = {}
            exec(f"from {module} import {leaf}", scope)
    except BaseException as error:
        lost.append(f"{name}: {type(error).__name__}: {error}")
print(json.dumps(lost))
"""


@pytest.mark.slow
def test_every_name_can_be_imported() -> None:
    asked = [(name, kind) for name, kind, _ in NAMES if kind != "x"]
    assert len(asked) > 800
    done = subprocess.run(
        [sys.executable, "-c", _WALK],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.skipif(not COPIES, reason="HADAL_DEEPSPEED_COPIES names no copies of DeepSpeed")
def test_the_table_is_what_the_copies_have() -> None:
    assert OUTPUT.read_text("utf-8") == text(COPIES)


@pytest.mark.skipif(not COPIES, reason="HADAL_DEEPSPEED_COPIES names no copies of DeepSpeed")
def test_attributes_that_warn_when_they_are_set_are_deepspeed_s() -> None:
    listed, found = surface.data("accessors.json")["ignored"], attributes(COPIES[0])
    in_stages = PipelineModule([nn.Linear(3, 2)], num_stages=1)
    engines = [
        initialize(model=model, config=config_of(stage))[0]
        for model, stage in ((in_stages, 0), (model_of(), 1), (model_of(), 3))
    ]
    objects = {"engine": engines, "optimizer": [one.optimizer for one in engines]}
    own = {"fwd_outputs", "pipe_buffers", *ATTRIBUTES}  # each batch resets it; refused; features
    for thing, names in found.items():
        known = {name for one in objects[thing] for name in names - own if hasattr(one, name)}
        assert set(listed[thing].split()) == names - own - known


def test_every_home_is_there_and_is_of_the_surface() -> None:
    modules = surface.modules()
    for name, home in homes().items():
        module, _, leaf = name.rpartition(".")
        assert module in modules, name
        room, _, thing = home.partition(":")
        if room.startswith("deepspeed"):
            assert room in modules, home
            continue
        value: Any = importlib.import_module(room)
        assert not thing or getattr(value, thing) is not None, home
        assert getattr(alias(module), leaf) is (getattr(value, thing) if thing else value)


def test_names_without_a_home_raise_when_used() -> None:
    unbuilt = 0
    for module in surface.modules().values():
        for leaf, kind in module.kinds.items():
            name = f"{module.name}.{leaf}"
            if name in homes():
                continue
            unbuilt += 1
            stands = getattr(alias(module.name), leaf)
            with pytest.raises(NotImplementedError, match=rf"{leaf}\b.* is not built yet"):
                str(stands) if kind is NameKind.VALUE else stands()
    assert unbuilt > 100


def test_classes_without_a_home_mention_the_replacement() -> None:
    stands = alias("deepspeed.sequence.fpdt_layer")._FPDTGPUOffloadingAttentionImpl_
    with pytest.raises(NotBuiltYetError, match=r"Impl_ is not built yet.*Use FPDT_Attention"):
        stands()
    with pytest.raises(NotBuiltYetError, match="apply is not built yet"):
        stands.apply()


def test_names_that_are_the_same_lead_to_one_object() -> None:
    modules = surface.modules()
    for module in modules.values():
        assert module.same.keys().isdisjoint(module.kinds)
        for leaf, elsewhere in module.same.items():
            room, _, thing = elsewhere.rpartition(".")
            assert room in modules, elsewhere
            assert getattr(alias(module.name), leaf) is getattr(alias(room), thing)
    adam = alias("deepspeed.ops.adam")
    assert alias("deepspeed.ops.adam.cpu_adam").DeepSpeedCPUAdam is adam.DeepSpeedCPUAdam
    assert alias("deepspeed.zero").partition_parameters.Init is alias("deepspeed.zero").Init


def test_a_star_takes_all_public_names() -> None:
    constants = alias("deepspeed.runtime.constants")
    assert {"TRAIN_BATCH_SIZE", "PIPE_REPLICATED"} <= set(constants.__all__)
    assert constants.TRAIN_BATCH_SIZE == "train_batch_size"
    for module in surface.modules():
        for name in alias(module).__all__:
            getattr(alias(module), name)


def _waiting() -> dict[str, str]:
    """Name -> the feature that it waits for, as the list has it."""
    told: dict[str, str] = {}
    feature = ""
    for line in (ROOT / "tests/data/deepspeed_waiting.txt").read_text().splitlines():
        if line.endswith(":"):
            feature = line[:-1]
        elif not line.startswith("#"):
            told[line.strip()] = feature
    return told


def _named(name: str) -> Any:
    """Resolve a dotted name: the longest module in it, and attributes from there."""
    modules = surface.modules()
    parts = name.split(".")
    cut = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules)
    found: Any = alias(".".join(parts[:cut]))
    for part in parts[cut:]:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", _waiting())
def test_an_unbuilt_name_raises_with_its_own_name(name: str) -> None:
    leaf = name.rpartition(".")[2]
    for arguments in ({}, {"model": 1, "config": {}}):
        with pytest.raises(NotImplementedError, match=rf"\b{leaf} is not built yet"):
            _named(name)(**arguments)


def test_every_name_that_is_not_built_says_what_to_use() -> None:
    starts = tuple(surface.data("instead.json"))
    lost = {_defined(name) for name, kind, _ in NAMES if kind in "fca"}
    unbuilt = {n for n in lost if n not in homes() and n not in surface.modules()}
    found = {
        n for n in unbuilt if n.rpartition(".")[2] in _kinds_of(n) and not n.startswith(starts)
    }
    assert found == set()


def _kinds_of(name: str) -> dict[str, NameKind]:
    return surface.modules()[name.rpartition(".")[0]].kinds


def _defined(name: str) -> str:
    """Return the full name in the module of the surface that defines it."""
    owner, _, leaf = name.rpartition(".")
    known = surface.modules().get(owner)
    if known is None:
        return f"{_defined(owner)}.{leaf}" if owner else name
    name = f"{known.name}.{leaf}"
    is_elsewhere = leaf in known.same and name not in homes()
    return _defined(known.same[leaf]) if is_elsewhere else name


def _leads_somewhere(name: str, kind: str) -> bool:
    if name.startswith("deepspeed.DeepSpeedEngine."):
        return name.rpartition(".")[2] not in _UNBUILT
    name = _defined(name)
    owner, _, leaf = name.rpartition(".")
    if (
        name in homes()
        or name in surface.modules()
        or (kind != "x" and leaf in surface.modules()[owner].constants)
    ):
        return True
    return kind == "x" and owner in homes()  # a member is where its class is


def test_names_of_much_use_lead_somewhere_or_wait_for_a_feature_that_is_named() -> None:
    much = {name: kind for name, kind, use in NAMES if use in "12" and kind != "m"}
    assert len(much) > 200
    homeless = {name for name, kind in much.items() if not _leads_somewhere(name, kind)}
    waiting = _waiting()
    assert homeless - waiting.keys() == set(), "a name leads nowhere: build it"
    assert waiting.keys() - homeless == set(), "these are built: take them off the list"
    assert len(waiting) <= 22, "the list only shrinks"
    assert all(waiting.values())
    page = " ".join((ROOT / "docs/from_deepspeed.md").read_text().split())
    assert {feature for feature in waiting.values() if feature not in page} == set()


def test_a_name_outside_the_surface_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="initialise"):
        alias("deepspeed").initialise  # noqa: B018
    assert not hasattr(alias("deepspeed.utils"), "nothing_of_that_name")


def test_a_class_that_is_not_built_may_be_subclassed_and_asked_for() -> None:
    layer: Any = placeholder("deepspeed.moe.layer.MoE", NameKind.CLASS)

    class Mine(layer):  # type: ignore[misc]
        pass

    assert not isinstance(3, layer)
    with pytest.raises(NotBuiltYetError, match=r"deepspeed\.moe\.layer\.MoE is not built yet"):
        Mine(1, k=2)
    with pytest.raises(NotBuiltYetError, match=r"MoE\.from_config"):
        layer.from_config({})


def test_a_method_that_replaces_one_of_a_class_that_is_not_built_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader: Any = placeholder("deepspeed.runtime.state_dict_factory.Loader", NameKind.CLASS)
    loader.sanity_check = lambda self, name: None
    assert "Loader.sanity_check was replaced, but has no effect" in caplog.text


@pytest.mark.parametrize(
    "use", [bool, iter, len, hash, lambda v: v == 1, lambda v: v.x, lambda v: v["x"], lambda v: v()]
)
def test_a_value_that_is_not_known_refuses_every_use(use: Any) -> None:
    with pytest.raises(NotBuiltYetError, match=r"deepspeed\.ops\.x is not built yet"):
        use(placeholder("deepspeed.ops.x", NameKind.VALUE))


def test_all_names_of_most_use_are_known_to_the_surface() -> None:
    modules = surface.modules()
    for name, kind, _ in NAMES:
        module, _, leaf = name.rpartition(".")
        if kind == "m":
            assert name in modules
        elif kind != "x":
            known = modules[module]
            names = {*known.kinds, *known.constants, *known.same, *known.children}
            assert leaf in names or f"{known.name}.{leaf}" in homes(), name
