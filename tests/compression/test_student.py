"""Layer reduction: a student takes over layers of its teacher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.toys import engine_of
from torch import nn

from compression.toys import TOKENS, Bert, config, weights
from hadal.config import load_config
from hadal.errors import ConfigError, ModelError, UsageError
from hadal.plugins.compression import init_compression, student_initialization
from hadal.plugins.compression.layers import compressed_modules

SECTION = {
    "enabled": True,
    "keep_number_layer": 2,
    "module_name_prefix": "bert.encoder.layer",
    "teacher_layer": [1, 3],
    "other_module_name": ["bert.embeddings", "classifier"],
}


def teacher() -> Bert:
    made = Bert(4)
    for index, layer in enumerate(made.bert.encoder.layer):
        layer.register_buffer("place", torch.tensor(float(index)))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def student(layers: int = 2) -> Bert:
    made = Bert(layers)
    for layer in made.bert.encoder.layer:
        layer.register_buffer("place", torch.tensor(9.0))
    return made


def wishes(**changes: Any) -> dict[str, Any]:
    section = {**SECTION, **changes}
    kept = {name: value for name, value in section.items() if value is not None}
    return {"compression_training": {"layer_reduction": kept}}


@pytest.mark.claims(
    "compression_training.layer_reduction",
    *(f"compression_training.layer_reduction.{name}" for name in SECTION),
)
def test_a_student_computes_as_its_teacher_without_the_other_layers():
    source, small = teacher(), student()
    parameters = list(small.parameters())
    assert init_compression(small, wishes(), source) is small
    assert all(a is b for a, b in zip(parameters, small.parameters(), strict=True))
    assert [layer.place.item() for layer in small.bert.encoder.layer] == [1.0, 3.0]
    del source.bert.encoder.layer[2], source.bert.encoder.layer[0]
    assert torch.equal(small(TOKENS), source(TOKENS))


def test_other_modules_keep_their_values_if_they_are_not_named():
    source, small = teacher(), student()
    before = small.classifier.weight.detach().clone()
    student_initialization(small, source, wishes(other_module_name=None, keep_number_layer=None))
    assert torch.equal(small.classifier.weight, before)
    key = small.bert.encoder.layer[1].attention.self["key"].weight
    assert torch.equal(key, source.bert.encoder.layer[3].attention.self["key"].weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_layer": [1, 9]}, r"teacher_layer\[1\]: the teacher's bert.encoder.layer has no"),
        ({"teacher_layer": [1], "keep_number_layer": 1}, "names 1 layers, but the student's"),
        ({"module_name_prefix": "bert.decoder"}, "the teacher has no module 'bert.decoder'"),
        ({"module_name_prefix": "classifier"}, "classifier is Linear; expected a ModuleList"),
        (
            {"other_module_name": ["head"]},
            r"other_module_name\[0\]: the student has no mod",
        ),
    ],
)
def test_mismatches_are_refused_before_anything_is_copied(changes, message):
    small = student()
    before = [parameter.detach().clone() for parameter in small.parameters()]
    with pytest.raises(ModelError, match=message):
        init_compression(small, wishes(**changes), teacher())
    assert all(map(torch.equal, before, small.parameters()))


def test_layers_of_other_shapes_are_refused():
    small = student()
    small.classifier = nn.Linear(16, 5)
    with pytest.raises(ModelError, match=r"classifier.weight is \(5, 16\) in the student and \(3,"):
        init_compression(small, wishes(), teacher())
    small.classifier = nn.Linear(16, 3, bias=False)
    with pytest.raises(ModelError, match="differ in classifier: only one of them has bias"):
        init_compression(small, wishes(), teacher())


def test_a_teacher_is_required():
    with pytest.raises(UsageError, match="layer_reduction is on, but there is no teacher_model"):
        init_compression(student(), wishes())


@pytest.mark.parametrize("name", ["module_name_prefix", "teacher_layer"])
def test_both_names_are_required(name):
    with pytest.raises(ConfigError, match=rf"layer_reduction.{name} +required while"):
        load_config({"train_batch_size": 1, **wishes(**{name: None})})
    with pytest.raises(ConfigError, match=r"keep_number_layer +3, but teacher_layer names 2"):
        load_config({"train_batch_size": 1, **wishes(keep_number_layer=3)})


def test_a_model_that_took_over_no_layers_is_reported(caplog):
    engine_of(0, student(), **wishes()).destroy()
    assert "init_compression(model, config, teacher_model)" in caplog.text
    caplog.clear()
    engine_of(0, init_compression(student(), wishes(), teacher()), **wishes()).destroy()
    assert "teacher_model" not in caplog.text


def test_a_teacher_is_unchanged_in_an_engine(caplog):
    quantized = config(weights(2, 2, modules=["attention"]), wishes()["compression_training"])
    source = teacher()
    expected = source(TOKENS)
    small = init_compression(student(), quantized, source)
    engine = engine_of(0, source.eval(), **quantized, optimizer=None)
    assert torch.equal(engine(TOKENS), expected)
    assert not list(compressed_modules(engine.module))
    assert "teacher_model" not in caplog.text
    engine.destroy()
    engine = engine_of(0, small, **quantized)
    assert list(compressed_modules(engine.module))
    engine.destroy()
