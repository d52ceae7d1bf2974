"""Pruned modules: DeepSpeed's outputs, their masks and scores, and mismatches."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from compression.toys import INPUT, TOKENS, WEIGHT, Bert, config, linear, section, weights
from hadal.errors import ConfigError, UsageError
from hadal.plugins.compression import init_compression, redundancy_clean
from hadal.plugins.compression.layers import Compressed

SPARSE = "compression_training.sparse_pruning"
KEPT = {"dense_ratio": 0.5}
FIRST_L1 = [-0.625, -2.4000001, 0.075000003, -0.94999999, 1.9, 2.5]
MASK_L1 = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]


def sparse(method: str = "l1", ratio: float = 0.5, modules="*", **shared):
    shared = {"method": method, "schedule_offset": 0, **shared}
    return section("sparse_pruning", shared, {"dense_ratio": ratio}, modules)


def blocks(pattern: str = "4x1", **shared):
    shared = {"block_pattern": pattern, "dense_ratio": 0.5, "schedule_offset": 0, **shared}
    return {
        "sparse_pruning": {
            "shared_parameters": {"enabled": True, "method": "snip_momentum", **shared}
        }
    }


def built(*sections, model: nn.Module | None = None) -> nn.Module:
    return init_compression(model or nn.Sequential(linear()), config(*sections))


@pytest.mark.claims(
    *(
        f"compression_training.sparse_pruning{row}"
        for row in (
            *("", ".shared_parameters", ".shared_parameters.enabled", ".shared_parameters.method"),
            *(".different_groups", ".different_groups.<group>"),
            ".different_groups.<group>.params",
            ".different_groups.<group>.params.dense_ratio",
            ".different_groups.<group>.modules",
            ".different_groups.<group>.related_modules",
        )
    )
)
def test_l1_keeps_the_largest_of_the_first_weights():
    model = built(sparse(), model=nn.Sequential(without_ties()))
    assert model(INPUT)[0].tolist() == pytest.approx(FIRST_L1, abs=1e-6)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "0.sparse_pruning_mask"]
    assert model[0].sparse_pruning_mask.tolist() == MASK_L1
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    model(INPUT).sum().backward()
    assert torch.equal(model[0].weight.grad != 0, model[0].sparse_pruning_mask.bool())
    assert model[0].sparse_pruning_mask.grad is None


def without_ties() -> nn.Linear:
    """The linear layer of the golden values; DeepSpeed drops one of four equal weights."""
    made = linear()
    with torch.no_grad():
        made.weight[4, 0] = -0.7
    return made


def test_topk_learns_scores():
    model = built(sparse("topk"))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "0.sparse_mask_scores"]
    scores = model[0].sparse_mask_scores
    assert scores.shape == model[0].weight.shape
    with torch.no_grad():
        scores.copy_(without_ties().weight.abs())
    assert model(INPUT)[0].tolist() == pytest.approx(FIRST_L1, abs=1e-6)
    model(INPUT).sum().backward()
    assert torch.allclose(scores.grad, WEIGHT * INPUT.sum(0))


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_clean_weights_have_zeros_for_pruned_entries(method):
    wishes = config(
        sparse(method, 0.25, ["attention.self"]), weights(8, 8, quantize_weight_in_forward=True)
    )
    model = init_compression(Bert(), wishes).eval()
    with torch.no_grad():
        before, names = model(TOKENS), list(Bert().state_dict())
    redundancy_clean(model, wishes)
    query = model.bert.encoder.layer[0].attention.self["query"]
    assert type(query) is nn.Linear
    assert 56 <= (query.weight != 0).sum() <= 64  # a few are quantized to zero
    assert torch.equal(model(TOKENS), before)
    assert list(model.state_dict()) == names


def test_tied_weights_with_one_mask_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    redundancy_clean(built(sparse(), model=model), config(sparse()))
    assert model[1].weight is model[0].weight
    assert (model[0].weight == 0).sum() == 8


def test_convolutions_keep_their_largest_weights():
    torch.manual_seed(0)
    model = built(sparse(), model=nn.Sequential(nn.Conv2d(2, 3, 3)))
    plain = nn.functional.conv2d(
        torch.ones(1, 2, 4, 4), model[0].weight * model[0].sparse_pruning_mask, model[0].bias
    )
    assert torch.equal(model(torch.ones(1, 2, 4, 4)), plain)


@pytest.mark.claims(
    f"{SPARSE}.shared_parameters.block_pattern", f"{SPARSE}.shared_parameters.excluded_modules"
)
@pytest.mark.parametrize(
    ("pattern", "shape"), [("4x1", (4, 16)), ("1x1", (16, 16)), ("2:4", (16, 16)), ("8x2", (2, 8))]
)
def test_blocks_are_those_of_all_modules_that_are_not_excluded(caplog, pattern, shape):
    model = built(blocks(pattern, excluded_modules=["classifier", "1.output"]), model=Bert())
    pruned = [m for m in model.modules() if isinstance(m, Compressed)]
    assert len(pruned) == 11
    assert pruned[0].sparse_pruning_mask.shape == shape
    assert not caplog.messages


def test_modules_whose_shape_does_not_fit_are_left_out(caplog):
    caplog.set_level(logging.INFO, logger="hadal.plugins.compression")
    built(blocks(), model=Bert())
    assert "1 modules are not pruned in blocks of 4x1: classifier (3x16)" in caplog.text


def faults(*sections, model=None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        built(*sections, model=model or Bert())
    return {fault.path: fault.message for fault in caught.value.faults}


def test_mismatches_are_reported_at_once():
    found = faults(sparse(modules=["nope", "word_embeddings", "query", "self.q"]))
    group = f"{SPARSE}.different_groups.g.modules"
    assert "matches no module" in found[f"{group}[0]"]
    assert "it is Embedding; this technique supports Linear, Conv2d" in found[f"{group}[1]"]
    assert "which 'g'.modules[2] matches too" in found[f"{group}[3]"]
    found = faults(blocks(excluded_modules=["nope", "("]))
    path = f"{SPARSE}.shared_parameters.excluded_modules"
    assert "matches no module" in found[f"{path}[0]"]
    assert "is not a regular expression" in found[f"{path}[1]"]
    assert "5x7 fits no module" in faults(blocks("5x7")).popitem()[1]


@pytest.mark.parametrize(
    ("wish", "key", "message"),
    [
        (blocks("4-1"), "block_pattern", 'expected rows x columns, such as "4x1"'),
        (blocks("4:2"), "block_pattern", "N of M with N < M"),
        (blocks("2:4", dense_ratio=0.4), "dense_ratio", "2 of 4 pruned leave 0.5; raise it"),
        (blocks(dense_ratio=1.5), "dense_ratio", "< 1"),
        (blocks(schedule_offset=5, schedule_offset_end=4), "schedule_offset_end", "is before"),
    ],
)
def test_settings_that_cannot_be_are_refused(wish, key, message):
    assert message in faults(wish)[f"{SPARSE}.shared_parameters.{key}"]


@pytest.mark.parametrize("ratio", [0.0, 1.5])
def test_a_ratio_out_of_range_is_refused(ratio):
    (path,) = faults(sparse(ratio=ratio))
    assert path == f"{SPARSE}.different_groups.g.params.dense_ratio"


def test_keys_of_another_method_are_reported(caplog):
    built(sparse(schedule_offset_end=7))
    assert 'schedule_offset_end have no effect with method "l1"' in caplog.text


def test_weights_without_values_cannot_be_chosen():
    with pytest.raises(UsageError, match=r"chooses by 0\.weight, which is on the meta device"):
        built(sparse("l1", 0.5, ["0"]), model=nn.Sequential(nn.Linear(4, 4, device="meta")))
