"""Models whose quantized weights are stored as integers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compression.toys import TOKENS, Bert, config, inputs, weights
from hadal.errors import ModelError
from hadal.plugins.compression import (
    compute_in_integers,
    init_compression,
    pack_weights,
    redundancy_clean,
    unpack_weights,
)
from hadal.plugins.compression.layers import compressed_modules
from hadal.plugins.compression.packed import (
    PackedEmbedding,
    PackedLinear,
    load_state,
    packed_modules,
)

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


@pytest.mark.parametrize("calibration", ["dynamic", "static"])
@pytest.mark.parametrize(("bits", "groups"), [(8, 1), (8, 16), (4, 4), (2, 1), (1, 1)])
def test_integers_are_multiplied_to_the_same_outputs(bits, groups, calibration):
    """Against float64 sums of the same quantized numbers, in which integers are exact too."""
    made = weights(bits, bits, modules=["attention"], quantize_groups=groups, **NOW)
    model = cleaned(made, inputs(8, ["attention"], range_calibration=calibration))
    for _, module in compressed_modules(model):
        if module.activation_quantizer is not None:
            module.activation_quantizer.x_min_max.copy_(torch.tensor([-1.5, 1.25]))
    pack_weights(model)
    before = model(TOKENS)
    query = model.bert.encoder.layer[0].attention.self["query"]
    x = torch.randn(3, 5, 16)
    exact = query.effective_input(x).double() @ query.weight.double().t() + query.bias.double()
    plain = query(x)
    assert compute_in_integers(model) == []
    assert torch.equal(model(TOKENS), before)  # gradients are on
    with torch.no_grad():
        found = query(x)
        torch.testing.assert_close(found, exact.float(), rtol=3e-7, atol=3e-7)
        assert not torch.equal(found, plain) or bits < 8
        torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=0.02)
        assert query(x[:0]).shape == (0, 5, 16)
    unpack_weights(model)
    assert "in_integers" not in vars(query)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_integers_do_not_overflow_in_half_precision(dtype):
    wishes = config(weights(8, 8, modules=["0"], **NOW), inputs(8, ["0"]))
    layer = nn.Sequential(nn.Linear(64, 8)).to(dtype).eval()
    torch.nn.init.constant_(layer[0].weight, 0.5)
    model = redundancy_clean(init_compression(layer, wishes), wishes)
    pack_weights(model)
    assert compute_in_integers(model) == []
    x = torch.ones(2, 64, dtype=dtype)
    with torch.no_grad():
        found = model(x)
    assert found.dtype == dtype  # an integer is at most 127 of the 128 steps on each side
    expected = layer[0].bias.float() + 64 * 0.5 * (127 / 128) ** 2
    torch.testing.assert_close(found, expected.to(dtype).expand(2, 8))


def test_modules_without_integers_are_named():
    kinds = {"quantization_type": "asymmetric"}
    model = cleaned(
        weights(8, 8, modules=["bert", "classifier"], quantize_groups=8, **NOW),
        inputs(8, ["attention", "classifier"], **kinds),
    )
    pack_weights(model)
    left = compute_in_integers(model)
    assert left == [name for name, _ in packed_modules(model) if "embed" not in name]
    model = cleaned(
        weights(8, 8, modules=["bert"], quantize_groups=64, **NOW), inputs(8, ["attention"])
    )
    pack_weights(model)
    assert "bert.encoder.layer.0.attention.self.query" in compute_in_integers(model)


def test_a_packed_state_dict_loads_into_an_unpacked_model():
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
        from hadal.plugins.compression.packed import grid_of, remember
        from hadal.plugins.compression.quantizers import quantize

        remember(table, grid_of(table.weight, 5, groups, symmetric=False))
        table.weight.data = quantize(table.weight.data, 5, groups, symmetric=False)
        expected = model(TOKENS)
        assert pack_weights(model) == []
        assert type(table) is PackedEmbedding
        assert torch.equal(model(TOKENS), expected)
        assert torch.equal(model(torch.tensor(3)), expected[0, 3])


def test_a_weight_that_was_changed_afterwards_stays_unpacked():
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
    with pytest.raises(ModelError, match=r"query.weight has the shape \(16, 16\) in the packed"):
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
