"""Models whose quantized weights are stored as integers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compression.toys import TOKENS, Bert, config, inputs, weights
from hadal.compression import init_compression, pack_weights, redundancy_clean, unpack_weights
from hadal.compression.packed import PackedEmbedding, PackedLinear, load_state, packed_modules
from hadal.errors import ModelError

NOW = {"quantize_weight_in_forward": True}


def cleaned(*sections) -> nn.Module:
    wishes = config(*sections)
    return redundancy_clean(init_compression(Bert().eval(), wishes), wishes)


def nbytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in model.state_dict().values())


@pytest.mark.parametrize(("bits", "most"), [(8, 0.29), (4, 0.17), (2, 0.12), (1, 0.12)])
def test_packed_weights_compute_the_same_in_fewer_bytes(bits, most):
    model = cleaned(weights(bits, bits, modules=["bert"], quantize_groups=8, **NOW))
    before, size = model(TOKENS), nbytes(model)
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    assert pack_weights(model) == []
    query = model.bert.encoder.layer[0].attention.self["query"]
    assert type(query) is PackedLinear
    assert isinstance(query, nn.Linear)
    assert list(query.parameters()) == [query.bias]
    for name, module in packed_modules(model):
        assert torch.equal(module.weight, dense[f"{name}.weight"])
    assert torch.equal(model(TOKENS), before)
    assert nbytes(model) < (most + 0.05) * size  # this toy's biases and layouts count, too
    matrices = sum(module.codes.nbytes for _, module in packed_modules(model))
    assert matrices < most * sum(
        value.nbytes for name, value in dense.items() if "bias" not in name
    )
    assert torch.equal(copy.deepcopy(model)(TOKENS), before)
    unpack_weights(model)
    assert model.state_dict().keys() == dense.keys()
    assert torch.equal(model(TOKENS), before)
    assert isinstance(query.weight, nn.Parameter)
    assert type(query) is nn.Linear


def test_inputs_stay_quantized():
    model = cleaned(weights(8, 8, modules=["attention"], **NOW), inputs(8, ["attention"]))
    before = model(TOKENS)
    pack_weights(model)
    assert torch.equal(model(TOKENS), before)
    query = model.bert.encoder.layer[0].attention.self["query"]
    assert query.compression.activation_is_on


def test_a_packed_state_dict_goes_into_a_model_that_is_not_packed():
    model = cleaned(weights(4, 4, modules=["bert"], **NOW))
    pack_weights(model)
    fresh = Bert()
    load_state(fresh, model.state_dict())
    assert torch.equal(fresh(TOKENS), model(TOKENS))
    again = copy.deepcopy(fresh)
    again.load_state_dict(model.state_dict())  # one that is packed alike needs nothing else
    assert torch.equal(again(TOKENS), model(TOKENS))


def test_weights_that_are_tied_share_their_codes():
    model = Bert()
    model.head = nn.Linear(16, 12, bias=False)
    model.other = nn.Linear(16, 12, bias=False)
    model.other.weight = model.head.weight
    table = model.bert.embeddings["word_embeddings"]
    table.weight = model.head.weight
    wishes = config(weights(4, 4, modules=["head", "other", "word_embeddings"], **NOW))
    redundancy_clean(init_compression(model, wishes), wishes)
    assert model.head.weight is model.other.weight
    assert table.weight is not model.head.weight  # it has a scale for each row
    pack_weights(model)
    assert model.head.weight_codes is model.other.weight_codes
    fresh = Bert()
    fresh.head, fresh.other = (nn.Linear(16, 12, bias=False) for _ in range(2))
    load_state(fresh, model.state_dict())
    assert fresh.head.weight_codes is fresh.other.weight_codes
    assert torch.equal(fresh.other.weight, model.head.weight)
    unpack_weights(model)
    assert model.head.weight is model.other.weight


def test_rows_of_an_embedding_are_those_of_its_weight():
    for groups in (1, 3, 12):
        table = nn.Embedding(12, 16, padding_idx=2)
        model = nn.Sequential(table)
        from hadal.compression.packed import remember
        from hadal.compression.packing import grid_of
        from hadal.compression.quantizers import quantize

        remember(table, grid_of(table.weight, 5, groups, symmetric=False))
        table.weight.data = quantize(table.weight.data, 5, groups, symmetric=False)
        expected = model(TOKENS)
        assert pack_weights(model) == []
        assert type(table) is PackedEmbedding
        assert torch.equal(model(TOKENS), expected)
        assert torch.equal(model(torch.tensor(3)), expected[0, 3])


def test_a_weight_that_was_changed_afterwards_stays_as_it_is():
    model = cleaned(weights(8, 8, modules=["bert"], **NOW))
    changed = model.bert.encoder.layer[0].attention.self["query"]
    changed.weight.data += 0.001
    assert pack_weights(model) == ["bert.encoder.layer.0.attention.self.query"]
    assert type(changed) is nn.Linear


def test_a_state_dict_that_does_not_fit_is_refused():
    model = cleaned(weights(8, 8, modules=["attention.self"], **NOW))
    pack_weights(model)
    state = model.state_dict()
    with pytest.raises(ModelError, match="but Bert has no module of this name"):
        load_state(Bert(layers=1), state)
    fresh = Bert()
    fresh.bert.encoder.layer[0].attention.self["query"] = nn.Linear(16, 8)
    with pytest.raises(ModelError, match=r"query.weight has the shape \(16, 16\) where it is"):
        load_state(fresh, state)
    fresh.bert.encoder.layer[0].attention.self["query"] = nn.Identity()
    with pytest.raises(ModelError, match="the module is Identity; expected Linear, Conv2d"):
        load_state(fresh, state)
    other = cleaned(weights(4, 4, modules=["attention.self"], **NOW))
    pack_weights(other)
    with pytest.raises(
        ModelError, match=r"load packed weights with hadal\.compression\.load_packed"
    ):
        other.load_state_dict(state)
