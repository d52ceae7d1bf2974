"""Preparing a model, and making compressed weights its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from compression.toys import TOKENS, Bert, config, inputs, weights
from hadal.errors import ConfigError, UsageError
from hadal.plugins.compression import CompressionScheduler, init_compression, redundancy_clean
from hadal.plugins.compression.layers import Compressed, compressed_modules

NOW = {"quantize_weight_in_forward": True}


@pytest.mark.parametrize("shared", [NOW, {}])
def test_clean_weights_have_the_values_of_the_last_forward(shared):
    wishes = config(weights(8, 4, 0, **shared), inputs(8, ["intermediate"]))
    model = init_compression(Bert(), wishes)
    scheduler = CompressionScheduler(model, wishes)
    for _ in range(4):
        scheduler.step()
    model.eval()
    before = model(TOKENS)
    query = model.bert.encoder.layer[0].attention.self["query"]
    assert query.weight.unique().numel() > 200
    assert redundancy_clean(model, wishes) is model
    assert torch.equal(model(TOKENS), before)
    assert query.weight.unique().numel() <= 16
    assert type(query) is nn.Linear
    left = [module for _, module in compressed_modules(model)]
    assert len(left) == 2  # inputs stay quantized
    assert all(module.compression.weight is None for module in left)


def test_weights_that_were_tied_stay_tied():
    model = Bert()
    model.head = nn.Linear(16, 12, bias=False)
    model.head.weight = model.bert.embeddings["word_embeddings"].weight
    model.other = nn.Linear(16, 12, bias=False)
    model.other.weight = model.head.weight
    wishes = config(weights(4, 4, modules=["head", "other"]))
    redundancy_clean(init_compression(model, wishes), wishes)
    assert model.head.weight is model.other.weight
    assert model.head.weight.unique().numel() <= 16


def test_a_configuration_without_techniques_changes_nothing(tmp_path: Path):
    model = Bert()
    kinds = [type(module) for module in model.modules()]
    off = weights(8, 8)
    off["weight_quantization"]["shared_parameters"]["enabled"] = False
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(off)))
    for wishes in ({}, config(), str(path)):
        assert redundancy_clean(init_compression(model, wishes), wishes) is model
    assert [type(module) for module in model.modules()] == kinds


def test_impossible_requests_raise_an_error():
    with pytest.raises(UsageError, match="Bert has no compressed modules; call init_compression"):
        redundancy_clean(Bert(), config(weights(8, 8)))
    with pytest.raises(ConfigError, match="is of type int; pass a dict, a path, JSON text"):
        init_compression(Bert(), 3)
    with pytest.raises(ConfigError, match=r'"/nope.json" is neither an existing file'):
        init_compression(Bert(), "/nope.json")


def test_files_are_read_as_configurations_are(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(f"// with comments\n{json.dumps(config(weights(8, 8)))}")
    assert any(compressed_modules(init_compression(Bert(), file)))
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"config.json, line 1, column 2: "):
        init_compression(Bert(), file)


def test_a_schedule_without_momentum_is_reported(caplog):
    shared = {"method": "snip_momentum", "dense_ratio": 0.5, "schedule_offset_end": 4}
    sparse = {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}}
    wishes = {"compression_training": {"sparse_pruning": sparse}}
    CompressionScheduler(init_compression(Bert(), wishes), wishes)
    assert "snip_momentum prunes by the optimizer's momentum" in caplog.text
    assert "no block will be pruned" in caplog.text


@pytest.mark.claims(
    "compression_training.weight_quantization.different_groups.<group>.params.start_bits"
)
@pytest.mark.parametrize(
    ("shared", "bits", "message"),
    [
        ({}, (4, 8), "8 is more than start_bits 4"),
        ({"quantization_type": "asymmetric"}, (8, 2), 'needs quantization_type "symmetric"'),
        ({"rounding": "stochastic"}, (8, 1), 'needs rounding "nearest"'),
        (
            {**NOW, "fp16_mixed_quantize": {"enabled": True}},
            (8, 4),
            "only works with quantization in the",
        ),
    ],
)
def test_bits_that_contradict_each_other_are_refused(shared, bits, message):
    with pytest.raises(ConfigError, match=message):
        init_compression(Bert(), config(weights(*bits, **shared)))


def test_a_wrapped_model_is_changed_inside():
    outer = nn.Module()
    outer.module = Bert()
    assert init_compression(outer, config(weights(8, 8))) is outer
    assert isinstance(outer.module.bert.encoder.layer[0].attention.self["key"], Compressed)


@pytest.mark.parametrize(("given", "told"), [(Bert, "the class Bert"), ("bert", "str")])
def test_objects_that_are_not_modules_are_refused(given, told):
    for call in (init_compression, redundancy_clean):
        with pytest.raises(UsageError, match=f"expected a torch.nn.Module to compress, got {told}"):
            call(given, config(weights(8, 8)))
