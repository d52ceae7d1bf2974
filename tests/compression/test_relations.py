"""Related modules: all mismatches are refused at once, before training."""

from __future__ import annotations

import pytest
from torch import nn

from compression.test_shrinking import LAYER, Images, channels, heads, rows
from compression.toys import Bert, config
from hadal.errors import ConfigError
from hadal.plugins.compression import init_compression, redundancy_clean

GROUPS = "compression_training.{}.different_groups.g"


def faults(*sections, model: nn.Module | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        init_compression(model or Bert(), config(*sections))
    return {fault.path: fault.message for fault in caught.value.faults}


def test_all_mismatches_are_reported_at_once():
    found = faults(
        rows(related=[["nope", "attention.output", "(", "classifier"], ["x"]]),
        heads(3, related=[["intermediate", "self.query"]]),
    )
    row, head = GROUPS.format("row_pruning"), GROUPS.format("head_pruning")
    first = f"{row}.related_modules[0]"
    assert (
        "'nope' matches no module of Linear, but modules[0] matches 2; expected one for each"
        in (found[f"{first}[0]"])
    )
    assert (
        "attention.output.dense: it has 16 inputs, but bert.encoder.layer.0.intermediate"
        in (found[f"{first}[1]"])
    )
    assert "is not a regular expression" in found[f"{first}[2]"]
    assert "matches 1 modules (classifier) of Linear" in found[f"{first}[3]"]
    assert "2 lists for 1 entries of modules" in found[f"{row}.related_modules"]
    assert "it has 64 outputs" in found[f"{head}.related_modules[0][0]"]
    path = "compression_training.head_pruning.shared_parameters.num_heads"
    assert "3 does not divide the inputs of" in found[path]


def test_a_dimension_gets_smaller_for_one_reason_only():
    found = faults(
        rows(modules=["self.query"], related=[["attention.output"]]),
        heads(related=[["self.query", "self.key", "self.value"]]),
    )
    (message,) = found.values()
    assert "expected one of them" in message


def test_tied_weights_and_grouped_convolutions_do_not_get_smaller():
    model = Bert()
    first, second = model.bert.encoder.layer
    second.intermediate["dense"].weight = first.intermediate["dense"].weight
    (message,) = faults(rows(related=[[LAYER + "output"]]), model=model).values()
    assert "so it cannot shrink; leave related_modules out" in message
    images = Images()
    images[3] = nn.Conv2d(6, 4, 3, groups=2)
    (message,) = faults(channels(related=[["3"]]), model=images).values()
    assert "convolutions with groups cannot lose channels" in message


@pytest.mark.parametrize("ratio", [0.0, 1.01, -1])
def test_a_ratio_out_of_range_is_refused(ratio):
    (path,) = faults(rows(ratio=ratio))
    assert path == f"{GROUPS.format('row_pruning')}.params.dense_ratio"


def test_techniques_know_their_kinds_of_modules():
    found = faults(rows(modules=["word_embeddings"]), channels(modules=["query"]))
    assert "this technique supports Linear" in found[f"{GROUPS.format('row_pruning')}.modules[0]"]
    assert "supports Conv2d" in found[f"{GROUPS.format('channel_pruning')}.modules[0]"]


class Fused(nn.Module):
    """Attention with queries, keys and values in one module, or with shared keys and values."""

    def __init__(self, shared: int = 1) -> None:
        super().__init__()
        self.num_key_value_groups = shared
        self.qkv, self.query = nn.Linear(16, 48), nn.Linear(16, 16)
        self.key, self.value = nn.Linear(16, 16 // shared), nn.Linear(16, 16 // shared)
        self.dense = nn.Linear(16, 16)


def test_fused_and_shared_heads_are_refused_by_their_names():
    model = nn.ModuleDict({"attention": Fused()})
    path = f"{GROUPS.format('head_pruning')}.related_modules"
    (found,) = faults(heads(modules=["dense"], related=[["qkv"]]), model=model).items()
    assert found[0] == f"{path}[0][0]"
    assert "attention.qkv: it has 48 outputs, but attention.dense has 16 to prune" in found[1]
    assert "a fused module of queries, keys and values has to be split into three" in found[1]
    model = nn.ModuleDict({"attention": Fused(2)})
    found = faults(heads(modules=["dense"], related=[["query", "key"]]), model=model)
    assert "2 heads of attention share one head of keys and values" in found[path]
    assert "attention.key: it has 8 outputs" in found[f"{path}[0][1]"]
    assert "keys and values that several heads share stay" in found[f"{path}[0][1]"]
    # Queries alone fit, but their heads would then read other keys.
    (path_,) = faults(heads(modules=["dense"], related=[["query"]]), model=model)
    assert path_ == path
    init_compression(model, config(heads(modules=["dense"])))


class Plain(nn.Sequential):
    """The images' network without its batch normalization."""

    def __init__(self) -> None:
        super().__init__(*(part for part in Images() if not isinstance(part, nn.BatchNorm2d)))


def test_a_pattern_of_absent_normalizations_is_ignored_with_a_warning(caplog):
    wishes = channels(modules=["0"], related=[["bn1", "2"]])
    model = init_compression(Plain(), config(wishes))
    (line,) = caplog.messages
    assert "related_modules[0][0]: 'bn1' matches no module, and the model has no batch" in line
    redundancy_clean(model, config(wishes))
    assert (model[0].out_channels, model[2].in_channels) == (3, 3)
    for related in (["bn1"], ["bn1", "nope"], ["2", "3", "("]):
        assert faults(channels(modules=["0"], related=[related]), model=Plain())
    (message,) = faults(channels(modules=["0"], related=[["bn1", "3"]]), model=Images()).values()
    assert "'bn1' matches no module" in message
