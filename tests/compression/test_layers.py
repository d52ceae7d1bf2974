"""Modules with effective weights and inputs: DeepSpeed's outputs, and preserved attributes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from compression.toys import INPUT, Bert, config, inputs, linear, weights
from hadal.plugins.compression import init_compression
from hadal.plugins.compression.layers import CompressedLinear, RunningRange

NOW = {"quantize_weight_in_forward": True}


def built(*sections, model: nn.Module | None = None) -> nn.Module:
    model = nn.Sequential(linear()) if model is None else model
    return init_compression(model, config(*sections))


# DeepSpeed's outputs for the first input.
CASES = {
    "sym8": ([weights(16, 8, modules="*", **NOW)], [0.86425781, -2.1460938, 0.33671874]),
    "asym4_2_groups": (
        [weights(4, 4, modules="*", quantize_groups=2, quantization_type="asymmetric", **NOW)],
        [0.703125, -2.0875001, 0.51249999],
    ),
    "ternary": ([weights(2, 2, modules="*", **NOW)], [2.1875, -2.5250001, 0.63749999]),
    "binary_6_groups": (
        [weights(1, 1, modules="*", quantize_groups=6, **NOW)],
        [2.1875, -0.89999998, 1.41875],
    ),
    "at_once": ([weights(16, 4, modules="*", **NOW)], [0.703125, -2.0875001, 0.51249999]),
    "input8": ([inputs(8, modules="*")], [0.8671875, -2.1382813, 0.31328124]),
    "input4_asym": (
        [inputs(4, modules="*", quantization_type="asymmetric")],
        [0.9375, -2.0093751, 0.2],
    ),
}


@pytest.mark.claims(
    "compression_training",
    *(
        f"compression_training.weight_quantization{row}"
        for row in (
            *("", ".shared_parameters", ".shared_parameters.enabled"),
            ".shared_parameters.quantize_groups",
            ".shared_parameters.quantization_type",
            ".shared_parameters.quantize_weight_in_forward",
            ".different_groups.<group>.params.target_bits",
        )
    ),
    *(
        f"compression_training.activation_quantization{row}"
        for row in (
            *("", ".shared_parameters", ".shared_parameters.enabled"),
            ".shared_parameters.quantization_type",
            ".different_groups.<group>.params.bits",
        )
    ),
)
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_deepspeed(case):
    sections, first = CASES[case]
    found = built(*sections)(INPUT)
    assert found[0, :3].tolist() == pytest.approx(first, abs=1e-6)


@pytest.mark.claims("compression_training.weight_quantization.shared_parameters.rounding")
def test_stochastic_rounding_rounds_both_ways():
    model = built(weights(8, 3, modules="*", rounding="stochastic", **NOW))
    torch.manual_seed(0)
    seen = torch.stack([model(torch.eye(4)) for _ in range(500)])
    assert seen.unique(dim=0).shape[0] > 100
    nearest = built(weights(8, 3, modules="*", **NOW))(torch.eye(4))
    weight = model[0].weight.t()
    off = (seen.mean(0) - model[0].bias - weight)[weight.abs() < 0.8]  # larger ones are clamped
    assert off.abs().max() < 0.05
    assert not torch.equal(seen[0], nearest)


@pytest.mark.claims(
    "compression_training.activation_quantization.shared_parameters.range_calibration"
)
def test_a_static_range_is_a_running_one():
    x = torch.tensor([[0.9, -1.0, 0.26, -0.33], [1.5, -0.2, 0.0, 0.31]])
    quantizer = RunningRange()
    first = quantizer(x, 8)
    assert first[0].tolist() == pytest.approx([0.90234375, -0.99609375, 0.2578125, -0.328125])
    assert quantizer.x_min_max.tolist() == [-1.0, 1.5]
    quantizer(2 * x, 8)
    assert quantizer.x_min_max.tolist() == pytest.approx([-1.05, 1.575])
    quantizer.eval()
    quantizer(9 * x, 8)
    assert quantizer.x_min_max.tolist() == pytest.approx([-1.05, 1.575])
    model = built(inputs(8, modules="*", range_calibration="static"))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "0.activation_quantizer.x_min_max"]


@pytest.mark.parametrize("calibration", ["dynamic", "static"])
def test_an_empty_input_has_an_empty_output(calibration):
    """An expert without tokens, for one."""
    wishes = config(inputs(8, ["0"], range_calibration=calibration))
    model = init_compression(nn.Sequential(nn.Linear(4, 6)), wishes).train()
    assert model(torch.empty(0, 4)).shape == (0, 6)


def test_a_recomputed_forward_moves_a_range_once():
    model = built(inputs(8, modules="*", range_calibration="static"))
    model(INPUT)
    ranges = model[0].activation_quantizer.x_min_max
    x = (3 * INPUT).requires_grad_()
    loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()
    after = ranges.clone()
    loss.backward()
    assert torch.equal(ranges, after)
    assert after[1] > 2


def test_a_module_keeps_everything_but_its_class():
    model = Bert()
    head, table = model.classifier, model.bert.embeddings["word_embeddings"]
    head.weight = nn.Parameter(table.weight[:3].detach().clone(), requires_grad=False)
    model.tied = nn.Linear(16, 12)
    model.tied.weight = table.weight
    model.eval()
    seen: list[Tensor] = []
    head.register_forward_hook(lambda module, given, found: seen.append(found))
    before, names = dict(model.named_parameters()), list(model.state_dict())
    built(weights(8, 8, modules="*", **NOW), model=model)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert model.tied.weight is table.weight
    assert list(model.state_dict()) == names
    assert not model.classifier.weight.requires_grad
    assert not any(module.training for module in model.modules())
    model(torch.arange(6).view(1, 6))
    assert len(seen) == 1
    assert isinstance(head, nn.Linear)
    assert isinstance(head, CompressedLinear)


def test_adapters_of_peft_are_unchanged():
    """The base layer is quantized; the adapter is trained and merged as before."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    model = peft.get_peft_model(Bert(), adapters)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    built(weights(4, 4, modules=["query.base_layer"], **NOW), model=model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    layer = model.base_model.model.bert.encoder.layer[0].attention.self["query"]
    assert isinstance(layer.base_layer, CompressedLinear)
    assert not any(isinstance(one, CompressedLinear) for one in layer.lora_A.modules())
    tokens = torch.arange(6).view(1, 6)
    model(tokens).square().mean().backward()
    grads = {name for name, p in model.named_parameters() if p.grad is not None}
    assert grads == set(trained)
    x = torch.randn(2, 16)
    low = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    change = x @ low[0].t() @ low[1].t() * layer.scaling["default"]
    torch.testing.assert_close(layer(x), layer.base_layer(x) + change)
    assert not torch.equal(layer.base_layer(x), nn.functional.linear(x, layer.base_layer.weight))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_changed_modules_can_be_copied(make):
    model = built(weights(4, 4, modules="*"), inputs(8, modules="*", range_calibration="static"))
    model(INPUT)
    assert torch.equal(make(model).eval()(INPUT), model.eval()(INPUT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    model = built(weights(8, 4, modules="*"), inputs(8, modules="*")).to(dtype)
    found = model(INPUT.to(dtype))
    assert found.dtype == dtype
    assert torch.allclose(found.float(), built(weights(8, 4, modules="*"))(INPUT), atol=0.1)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_convolutions_keep_their_padding_and_have_a_group_for_each_sample(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode))
    x = torch.randn(2, 2, 5, 5)
    plain = model(x)
    built(weights(8, 8, modules="*"), inputs(8, modules="*"), model=model)
    assert 0 < (model(x) - plain).abs().max() < 0.05
    alone = torch.cat([model(one[None]) for one in x])
    assert torch.allclose(model(x), alone, atol=1e-6)


def test_an_embedding_has_a_group_for_each_row():
    model = nn.Sequential(nn.Embedding(3, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [10.0], [100.0]]) * torch.rand(3, 4))
    built(weights(8, 8, modules="*", quantize_groups=5), model=model)
    found, plain = model(torch.arange(3)), model[0].weight
    assert ((found - plain).abs().amax(1) <= plain.abs().amax(1) / 100).all()


def test_transformer_layers_of_torch_are_quantized_in_evaluation_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    built(weights(2, 2, modules=["linear1"], **NOW), model=layer)
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        inferred = layer(x)
    assert torch.allclose(inferred, layer.train()(x), atol=1e-6)
