"""`quantize_training`, the first form of quantized training."""

from __future__ import annotations

import logging

import pytest
from engine.toys import engine_of

from compression.toys import TOKENS, Bert
from hadal.errors import ConfigError
from hadal.plugins.compression import init_compression, redundancy_clean
from hadal.plugins.compression.compress import section_of
from hadal.plugins.compression.layers import compressed_modules

OLD = {
    "enabled": True,
    "quantize_verbose": True,
    "quantizer_kernel": True,
    "quantize_groups": 4,
    "quantize_bits": {"start_bits": 6, "target_bits": 3},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_algo": {"q_type": "asymmetric", "rounding": "stochastic"},
}


@pytest.mark.claims(
    "quantize_training.fp16_mixed_quantize.enabled",
    "quantize_training.fp16_mixed_quantize.quantize_change_ratio",
)
def test_it_is_weight_quantization_of_all_modules():
    blend = {"enabled": True, "quantize_change_ratio": 0.5}
    old = {**OLD, "fp16_mixed_quantize": blend}
    found = section_of({"quantize_training": old}).weight_quantization
    shared, group = found.shared_parameters, found.different_groups["all"]
    assert (shared.schedule_offset, shared.quantize_groups, shared.quantize_verbose) == (1, 4, True)
    assert (shared.quantization_type, shared.rounding) == ("asymmetric", "stochastic")
    assert not shared.quantize_weight_in_forward
    assert shared.fp16_mixed_quantize.model_dump() == blend
    assert list(group.modules) == ["*"]
    params = group.params
    assert (params.start_bits, params.target_bits, params.quantization_period) == (6, 3, 1)


@pytest.mark.claims("quantize_training.quantize_type", "quantize_training.quantize_algo.q_type")
def test_the_type_has_two_names():
    by_type = {**OLD, "quantize_type": "symmetric", "quantize_algo": {}}
    assert kind_of(by_type) == "symmetric"
    by_type["quantize_type"] = "asymmetric"
    assert kind_of(by_type) == "asymmetric"
    assert kind_of({**by_type, "quantize_algo": {"q_type": "symmetric"}}) == "symmetric"


def kind_of(old) -> str:
    found = section_of({"quantize_training": old}).weight_quantization
    return found.shared_parameters.quantization_type


@pytest.mark.claims(
    "quantize_training.enabled",
    "quantize_training.quantize_verbose",
    "quantize_training.quantizer_kernel",
    "quantize_training.quantize_groups",
    "quantize_training.quantize_bits.start_bits",
    "quantize_training.quantize_bits.target_bits",
    "quantize_training.quantize_schedule.quantize_period",
    "quantize_training.quantize_schedule.schedule_offset",
    "quantize_training.quantize_algo.rounding",
)
@pytest.mark.parametrize("prepared", [True, False])
def test_bits_fall_and_the_weights_are_cleaned(caplog, prepared):
    caplog.set_level(logging.INFO, logger="hadal.plugins.compression")
    model, wishes = Bert(), {"quantize_training": OLD}
    if prepared:
        init_compression(model, wishes)
    engine = engine_of(0, model, **wishes)
    seen = []
    for _ in range(6):
        engine.backward(engine(TOKENS).square().mean())
        engine.step()
        module = next(compressed_modules(model))[1]
        seen.append(module.compression.bits and module.compression.bits.bits)
        assert module.compression.weight.stochastic
    assert seen == [None, 6, 5, 4, 4, 3]
    assert "read as compression_training.weight_quantization" in caplog.text
    assert "classifier: 5 bits after 2 updates" in caplog.messages
    redundancy_clean(engine, wishes)
    assert model.classifier.weight.unique().numel() <= 4 * 2**3
    engine.destroy()


@pytest.mark.parametrize(
    ("bits", "algo", "message"),
    [
        ((4, 8), {}, r"target_bits +8 is more than start_bits 4"),
        ((8, 2), {"q_type": "asymmetric"}, 'needs quantize_algo.q_type "symmetric"'),
        ((8, 1), {"rounding": "stochastic"}, 'needs quantize_algo.rounding "nearest"'),
    ],
)
def test_bits_that_contradict_each_other_are_refused(bits, algo, message):
    both = {"start_bits": bits[0], "target_bits": bits[1]}
    old = {"enabled": True, "quantize_bits": both, "quantize_algo": algo}
    with pytest.raises(ConfigError, match=message):
        section_of({"quantize_training": old})


def test_two_forms_at_once_are_refused():
    group = {"params": {"start_bits": 8, "target_bits": 8}}
    new = {"shared_parameters": {"enabled": True}, "different_groups": {"g": group}}
    wishes = {"quantize_training": OLD, "compression_training": {"weight_quantization": new}}
    with pytest.raises(ConfigError, match=r"true contradicts compression_training\.weight_quant"):
        section_of(wishes)
