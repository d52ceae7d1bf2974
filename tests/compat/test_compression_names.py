"""The helpers of deepspeed.compression: DeepSpeed's values, and a remedy for moved names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compression.test_shrinking import ATTENTION
from compression.toys import TOKENS, Bert, X, config, inputs, section, weights
from torch import nn

from hadal.compat.install import alias
from hadal.errors import ConfigError, UsageError
from hadal.plugins.compression import init_compression
from hadal.plugins.compression.layers import CompressedLinear, compressed_modules
from hadal.plugins.compression.shrinking import shapes_of

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/compression.json").read_text()
)
LAYER = "bert.encoder.layer"
COMPRESS = alias("deepspeed.compression.compress")
CONFIG = alias("deepspeed.compression.config")
HELPER = alias("deepspeed.compression.helper")
UTILS = alias("deepspeed.compression.utils")


def _called(case: str) -> tuple[str, tuple[Any, ...]]:
    kind, *rest = case.split("_")
    name = {"sym": "Sym", "asym": "Asym", "ternary": "Ternary", "binary": "Binary"}[kind]
    if rest[0] == "static":
        return f"{name}Quantizer", (8, torch.tensor(-0.5), torch.tensor(1.0))
    bits = {"ternary": 2, "binary": 1}.get(kind) or int(rest[0].removeprefix("bits"))
    return f"{name}Quantizer", (bits, None, None, int(rest[-1].removeprefix("groups")))


@pytest.mark.parametrize("case", [case for case in GOLDEN["quantizers"] if "grad" not in case])
def test_quantizers_have_deepspeed_s_values_and_pass_the_gradient(case: str) -> None:
    name, arguments = _called(case)
    x = X.clone().requires_grad_()
    found = getattr(UTILS, name).apply(x, *arguments)
    assert torch.allclose(found, torch.tensor(GOLDEN["quantizers"][case]), atol=1e-6)
    gradient = torch.arange(12.0).view(3, 4)
    found.backward(gradient)
    assert x.grad is not None and torch.equal(x.grad, gradient)


def test_two_even_bits_are_not_ternary() -> None:
    found = UTILS.SymQuantizer.apply(torch.tensor([-1.0, -0.5, 0.2, 1.0]), 2)
    assert found.tolist() == [-1.0, -0.5, 0.0, 0.5]


def test_masks_of_the_largest_scores_are_deepspeed_s() -> None:
    topk = UTILS.TopKBinarizer
    for ratio in ("0.5", "0.3", "0.0", "1.0", "0.01"):
        assert topk.apply(X, float(ratio), False).tolist() == GOLDEN["topk"][ratio]
    assert topk.apply(torch.ones(6), 0.5, False).tolist() == GOLDEN["topk"]["ties_0.5"]
    told = topk.apply(X, torch.tensor(0.0), True).tolist()
    assert told == GOLDEN["topk"]["sigmoid_threshold_0(=0.5)"]
    scores = X.clone().requires_grad_()
    (2 * topk.apply(scores, 0.5, False)).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == GOLDEN["topk"]["grad_of_2*mask"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("SymQuantizer", (8, None, None, 5), "num_groups is 5.*does not divide the 12 elements"),
        ("AsymQuantizer", (8, None, torch.tensor(1.0)), "pass both, or neither"),
        ("SymQuantizer", (8, -1.0, 1.0, 3), "num_groups is 3, but min_value"),
        ("TernaryQuantizer", (4,), "num_bits is 4, but this quantizer has 2"),
        ("BinaryQuantizer", (1, -1.0, 1.0), "no meaning with 1 or 2 bits"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    name: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        getattr(UTILS, name).apply(X, *arguments)


def test_configurations_are_filled_in_as_deepspeed_does(tmp_path: Path) -> None:
    assert CONFIG.get_compression_config({}) == GOLDEN["defaults"]
    blocks = {"shared_parameters": {"enabled": True, "method": "snip_momentum"}}
    told = CONFIG.get_compression_config(config({"sparse_pruning": blocks}))["sparse_pruning"]
    assert told == GOLDEN["snip_defaults"]
    wishes = config(weights(8, 4))
    assert COMPRESS.check_deepspeed_config(wishes) is wishes
    path = tmp_path / "config.json"
    path.write_text(json.dumps(wishes))
    assert COMPRESS.check_deepspeed_config(str(path)) == wishes
    with pytest.raises(ValueError, match=r"/nope.json\" is neither an existing file"):
        COMPRESS.check_deepspeed_config("/nope.json")
    assert CONFIG.get_quantize_enabled(wishes) and not CONFIG.get_quantize_enabled({})
    constants = alias("deepspeed.compression.constants")
    group = wishes[constants.COMPRESSION_TRAINING][constants.WEIGHT_QUANTIZATION][
        "different_groups"
    ]
    assert group["g"]["params"][constants.WEIGHT_QUANTIZE_TARGET_BITS] == 4


def test_names_are_found_and_not_twice() -> None:
    names, seen = COMPRESS.get_module_name("g", Bert(), "self.query", set())
    assert names == [f"{LAYER}.{i}.attention.self.query" for i in (0, 1)] and seen == set(names)
    with pytest.raises(ConfigError, match=r"^g: 'self' names .*query, which another pattern"):
        COMPRESS.get_module_name("g", Bert(), "self", seen)
    more, _ = COMPRESS.get_module_name("g", Bert(), "self", seen, verbose=False)
    assert len(more) == 4
    assert len(COMPRESS.get_module_name("g", Bert(), "*", set())[0]) == 14
    with pytest.raises(ConfigError, match="is not a regular expression"):
        COMPRESS.get_module_name("g", Bert(), "(", set())
    assert HELPER.is_module_compressible(nn.BatchNorm2d(2))
    assert not HELPER.is_module_compressible(nn.LayerNorm(2))


@pytest.mark.parametrize("mixed", [False, True])
def test_the_steps_of_init_compression_make_the_same_model(mixed: bool) -> None:
    blend = {"fp16_mixed_quantize": {"enabled": mixed, "quantize_change_ratio": 0.1}}
    rows = section(
        "row_pruning",
        {"method": "l1", "schedule_offset": 0},
        {"dense_ratio": 0.5},
        [rf"{LAYER}.\d+.intermediate"],
        related_modules=[[rf"{LAYER}.\d+.output"]],
    )
    wishes = config(weights(8, 3, 0, **blend), inputs(8, ["classifier"]), rows)
    expected = init_compression(Bert(), wishes)
    model = Bert()
    methods = COMPRESS.get_compress_methods(model, CONFIG.get_compression_config(wishes))
    assert [next(iter(of)) for _, _, of in methods] == list(wishes["compression_training"])
    assert methods[2][1] == [[[f"{LAYER}.{i}.output.dense" for i in (0, 1)]]]
    assert HELPER.compression_preparation(model, methods, None) is model
    pairs = zip(compressed_modules(model), compressed_modules(expected), strict=True)
    assert all((a, one.compression) == (b, other.compression) for (a, one), (b, other) in pairs)
    assert torch.equal(model(TOKENS), expected(TOKENS))


def test_one_module_is_replaced_in_place() -> None:
    model = Bert()
    classifier = model.classifier
    HELPER.module_replacement(model, "classifier")
    assert model.classifier is classifier and type(classifier) is CompressedLinear
    with pytest.raises(UsageError, match="model cannot be changed: its class Bert"):
        HELPER.module_replacement(nn.ModuleDict({"model": model}), "model")
    with pytest.raises(UsageError, match="technique of modules is 'nope'"):
        HELPER.module_replacement(model, "classifier", {"nope": {}})
    with pytest.raises(UsageError, match="all modules together; call init_compression"):
        pruned = {"sparse_pruning": {"enabled": True, "method": "snip_momentum"}}
        HELPER.module_replacement(model, "classifier", pruned)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fix_compression", "redundancy_clean"),
        ("generate_pruners", "snip_momentum"),
        ("register_on_step_begin", "snip_momentum"),
        ("rewrite_optimizer_step", "snip_momentum"),
        ("get_mpu", "gave to initialize"),
    ],
)
def test_moved_names_say_where(name: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=rf"helper\.{name} has no counterpart here: .*{remedy}"):
        getattr(HELPER, name)(Bert(), None)


def test_programs_for_deepspeed_count_their_heads_themselves() -> None:
    model = init_compression(Bert(), config(ATTENTION))
    attention = [layer.attention for layer in model.bert.encoder.layer]
    for one in attention:
        one.self.num_attention_heads, one.self.all_head_size = 4, 16
    COMPRESS.redundancy_clean(model, config(ATTENTION))
    for one in attention:
        assert (one.self.num_attention_heads, one.self.all_head_size) == (4, 16)
        assert one.output["dense"].in_features == 8
        one.self.num_attention_heads, one.self.all_head_size = 2, 8
    model(TOKENS)
    # Models that are loaded later get the new numbers.
    expected = {"num_attention_heads": 2, "all_head_size": 8}
    assert [*shapes_of(model)["attributes"].values()] == [expected] * len(attention)
