"""The modules that patterns match, and the faults of patterns."""

from __future__ import annotations

import pytest
from torch import nn

from compression.toys import Bert, config, inputs, section, weights
from hadal.errors import ConfigError
from hadal.plugins.compression import init_compression
from hadal.plugins.compression.layers import compressed_modules

LAYER = "bert.encoder.layer"
BITS = {"start_bits": 8, "target_bits": 8}


def named(*patterns: str) -> list[str]:
    model = init_compression(Bert(), config(weights(8, 8, modules=patterns)))
    return [name for name, _ in compressed_modules(model)]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (
            ["self.query", "self.key"],
            [f"{LAYER}.{i}.attention.self.{name}" for i in (0, 1) for name in ("query", "key")],
        ),
        (
            ["output.dense"],
            [f"{LAYER}.{i}.{name}output.dense" for i in (0, 1) for name in ("attention.", "")],
        ),
        ([r"layer.\w+.output.dense"], [f"{LAYER}.{i}.output.dense" for i in (0, 1)]),
        (["word_embeddings"], ["bert.embeddings.word_embeddings"]),
        (["classifier"], ["classifier"]),
    ],
)
def test_patterns_are_searched_in_full_names(patterns, names):
    assert named(*patterns) == names


@pytest.mark.claims(
    *(
        f"compression_training.{technique}.different_groups{row}"
        for technique in ("weight_quantization", "activation_quantization")
        for row in (
            "",
            ".<group>",
            ".<group>.params",
            ".<group>.modules",
            ".<group>.related_modules",
        )
    )
)
def test_everything_is_the_default_and_a_star():
    assert len(named(".*")) == len(named("*")) == 14
    without = config(
        weights(8, 8, modules=None),
        inputs(
            8,
            modules="*",
        ),
    )
    model = init_compression(Bert(), without)
    assert len(list(compressed_modules(model))) == 14
    assert sum(m.compression.activation is not None for _, m in compressed_modules(model)) == 13
    both = config(section("weight_quantization", {}, BITS, related_modules=[["x"]]))
    assert len(list(compressed_modules(init_compression(Bert(), both)))) == 6


def faults(*sections, model: nn.Module | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        init_compression(model or Bert(), config(*sections))
    for fault in caught.value.faults:
        assert f"{fault.path}" in str(caught.value)
    return {fault.path: fault.message for fault in caught.value.faults}


def test_all_faults_are_reported_at_once_by_path():
    found = faults(
        weights(8, 8, modules=["attenion.self", "(", "dense", "intermediate"], quantize_groups=7),
        inputs(8, modules=["word_embeddings"]),
    )
    group = "compression_training.weight_quantization.different_groups.g.modules"
    assert "matches no module; it could match " in found[f"{group}[0]"]
    assert "is not a regular expression" in found[f"{group}[1]"]
    assert "intermediate.dense, which 'g'.modules[2] matches too" in found[f"{group}[3]"]
    shared = "compression_training.weight_quantization.shared_parameters.quantize_groups"
    assert found[shared].startswith("7 does not divide the elements of the weight of bert.encoder")
    technique = "compression_training.activation_quantization.different_groups.g.modules[0]"
    assert "it is Embedding; this technique supports Linear, Conv2d" in found[technique]
    assert len(found) == 5


class Own(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Own(4, 4), "its class Own may compute something other"),
        (nn.MultiheadAttention(4, 2), "nn.MultiheadAttention reads its weight without calling it"),
        (nn.Embedding(4, 4, max_norm=1.0), "it has max_norm, which changes the weight itself"),
    ],
)
def test_classes_that_cannot_be_changed_are_refused(part, reason):
    model = nn.Sequential(part, nn.Linear(4, 4))
    (message,) = faults(weights(8, 8, modules=["0"]), model=model).values()
    assert reason in message
    # A star leaves them out.
    init_compression(model, config(weights(8, 8, modules="*")))
    assert [name for name, _ in compressed_modules(model)] == ["1"]


def test_a_star_that_names_nothing_is_refused():
    norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    for model, reason in ((nn.Sequential(norm), "; 0: its class Parametrized"), (nn.GELU(), "")):
        with pytest.raises(ConfigError, match=rf"'\*' matches no module of .*Embedding{reason}"):
            init_compression(model, config(weights(8, 8, modules=["*"])))


def test_unsupported_modules_are_reported_with_their_class():
    model = nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    (message,) = faults(weights(8, 8, modules=["norm"]), model=model).values()
    knows = "this technique supports Linear, Conv2d, Embedding"
    assert message == f"'norm' matches norm: it is LayerNorm; {knows}"


def test_a_group_without_patterns_is_refused():
    (path, message), *none = faults(weights(8, 8, modules=[])).items()
    assert not none
    assert path == "compression_training.weight_quantization.different_groups.g.modules"
    assert message.startswith('[] matches no module; use ["*"] for all')
