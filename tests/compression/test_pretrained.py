"""Pruned models of transformers are saved and loaded as any model."""

from __future__ import annotations

import pytest
import torch

from compression.test_shrinking import LAYER, heads, rows
from compression.toys import TOKENS, config
from hadal.plugins.compression import init_compression, redundancy_clean, register_with_transformers

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
BERT_HEADS = heads(
    modules=["attention.output.dense"], related=[["self.query", "self.key", "self.value"]]
)
BERT_ROWS = rows(modules=["intermediate.dense"], related=[[LAYER + r"output\.dense"]])


def cleaned(kind: str, wishes: dict, **shape):
    """The model, and what it returned before."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**SHAPE, **shape)
    model = getattr(transformers, f"{kind}Model")(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    init_compression(model, wishes).eval()
    with torch.no_grad():
        before = model(TOKENS).last_hidden_state
    return redundancy_clean(model, wishes), before


@torch.no_grad()
def test_sizes_that_a_configuration_can_express_suffice(tmp_path):
    related = [["q_proj", "k_proj", "v_proj"]]
    wishes = config(heads(modules=["o_proj"], related=related))
    model, before = cleaned("Llama", wishes, head_dim=4, num_key_value_heads=4)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (2, 2)
    found = model(TOKENS).last_hidden_state
    assert torch.allclose(found, before, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(TOKENS).last_hidden_state, found)


@torch.no_grad()
def test_rows_alone_are_in_the_configuration_of_a_bert(tmp_path):
    model, _ = cleaned("Bert", config(BERT_ROWS))
    assert model.config.intermediate_size == 32
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(TOKENS).last_hidden_state, model(TOKENS).last_hidden_state)


@torch.no_grad()
def test_shapes_that_a_configuration_cannot_express_are_recorded_in_it(tmp_path):
    model, before = cleaned("Bert", config(BERT_ROWS, BERT_HEADS))
    found = model(TOKENS).last_hidden_state
    assert torch.allclose(found, before, atol=1e-5)
    assert model.config.intermediate_size == 32
    assert model.config.num_attention_heads == 4  # which gives the heads their size
    model.save_pretrained(tmp_path / "first")
    register_with_transformers()
    register_with_transformers()
    again = transformers.AutoModel.from_pretrained(tmp_path / "first").eval()
    assert torch.equal(again(TOKENS).last_hidden_state, found)
    assert again.encoder.layer[0].attention.self.num_attention_heads == 2
    assert not again.is_quantized
    again.save_pretrained(tmp_path / "second")
    third = transformers.AutoModel.from_pretrained(tmp_path / "second").eval()
    assert torch.equal(third(TOKENS).last_hidden_state, found)


@torch.no_grad()
def test_layers_that_differ_are_noted_too(tmp_path):
    wishes = config(rows(modules=["layer.1.intermediate"], related=[["layer.1.output.dense"]]))
    model, before = cleaned("Bert", wishes)
    assert torch.allclose(model(TOKENS).last_hidden_state, before, atol=1e-5)
    assert model.config.intermediate_size == 64
    assert len(model.config.quantization_config["modules"]) == 2
    model.save_pretrained(tmp_path)
    register_with_transformers()
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(TOKENS).last_hidden_state, model(TOKENS).last_hidden_state)
