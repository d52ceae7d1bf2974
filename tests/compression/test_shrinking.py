"""Rows, heads and channels: DeepSpeed's masks, and modules that get smaller."""

from __future__ import annotations

import pytest
import torch
from engine.toys import engine_of
from torch import nn

from compression.toys import (
    INPUT,
    TOKENS,
    WEIGHT,
    Bert,
    config,
    inputs,
    linear,
    section,
    weights,
)
from hadal.errors import ModelError
from hadal.plugins.compression import (
    compression_report,
    init_compression,
    load_packed,
    pack_weights,
    redundancy_clean,
    save_packed,
)
from hadal.plugins.compression.masks import masked_heads

HALF = {"dense_ratio": 0.5}
LAYER = r"layer\.\d+\."
# Outputs of DeepSpeed's own layer.
ROWS_L1 = [[0.875, 0.0, 0.325, 0.0, 1.15, 0.0], [0.55, 0.0, -2.05, 0.0, -1.625, 0.0]]
ROWS_TOPK = [[0.0, -2.15, 0.0, -1.325, 0.0, 2.25], [0.0, 0.9, 0.0, 1.325, 0.0, 1.2]]
HEADS = [[1.125, -0.9, -0.175, -0.825, -0.1, 2.0], [1.275, 0.3, -1.225, 0.825, -0.7, 0.8]]
CHANNELS = [
    [[0.0, 0.0], [0.0, 0.0]],
    [[-0.18518521, -0.11111098], [0.037037168, 0.11111096]],
    [[-0.14814819, -0.14814819], [-0.1481481, -0.14814815]],
]


def rows(method: str = "topk", modules=(LAYER + "intermediate",), related=None, ratio=0.5, **more):
    shared = {"method": method, "schedule_offset": 0, **more}
    group = {} if related is None else {"related_modules": related}
    return section("row_pruning", shared, {"dense_ratio": ratio}, modules, **group)


def heads(count: int = 4, modules=("attention.output",), related=None, **more):
    shared = {"num_heads": count, "schedule_offset": 0, **more}
    group = {} if related is None else {"related_modules": related}
    return section("head_pruning", shared, HALF, modules, **group)


def channels(method: str = "topk", modules=("0",), related=None, **more):
    group = {} if related is None else {"related_modules": related}
    shared = {"method": method, "schedule_offset": 0, **more}
    return section("channel_pruning", shared, HALF, modules, **group)


FFN = rows(related=[[LAYER + "output"]])
ATTENTION = heads(related=[["self.query", "self.key", "self.value"]])


def built(*sections, model: nn.Module) -> nn.Module:
    return init_compression(model, config(*sections)).eval()


def score(module: nn.Module, name: str, values: list[float]) -> None:
    with torch.no_grad():
        found = getattr(module, name)
        found.copy_(torch.tensor(values).view(found.shape))


@pytest.mark.claims(
    *(
        f"compression_training.row_pruning{row}"
        for row in (
            *("", ".shared_parameters", ".shared_parameters.enabled", ".shared_parameters.method"),
            *(".different_groups", ".different_groups.<group>"),
            ".different_groups.<group>.params",
            ".different_groups.<group>.params.dense_ratio",
            ".different_groups.<group>.modules",
        )
    )
)
def test_rows_are_pruned_by_their_size_or_by_scores():
    model = built(rows("l1", ["0"]), model=nn.Sequential(linear()))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "0.row_pruning_mask"]
    assert torch.allclose(model(INPUT), torch.tensor(ROWS_L1), atol=1e-6)
    assert model[0].row_pruning_mask.flatten().tolist() == [1, 0, 1, 0, 1, 0]
    learned = built(rows("topk", ["0"]), model=nn.Sequential(linear()))
    assert list(learned.state_dict()) == ["0.weight", "0.bias", "0.row_mask_scores"]
    score(learned[0], "row_mask_scores", [0.1, 0.9, 0.2, 0.8, 0.3, 0.7])
    assert torch.allclose(learned(INPUT), torch.tensor(ROWS_TOPK), atol=1e-6)
    learned(INPUT).sum().backward()
    plain = linear()(INPUT)
    assert torch.allclose(learned[0].row_mask_scores.grad.flatten(), plain.sum(0), atol=1e-5)


@pytest.mark.claims(
    *(
        f"compression_training.head_pruning{row}"
        for row in (
            *("", ".shared_parameters", ".shared_parameters.enabled", ".shared_parameters.method"),
            *(".shared_parameters.num_heads", ".different_groups", ".different_groups.<group>"),
            ".different_groups.<group>.params",
            ".different_groups.<group>.params.dense_ratio",
            ".different_groups.<group>.modules",
        )
    )
)
def test_heads_are_pruned_by_scores():
    model = built(heads(2, ["0"]), model=nn.Sequential(linear()))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "0.head_pruning_scores"]
    assert model[0].head_pruning_scores.shape == (1, 2)
    score(model[0], "head_pruning_scores", [0.1, 0.9])
    assert torch.allclose(model(INPUT), torch.tensor(HEADS), atol=1e-6)
    redundancy_clean(model, config(heads(2, ["0"])))
    assert torch.equal(model[0].weight, masked_heads(WEIGHT, torch.tensor([[0.0, 1.0]])))


def convolution() -> nn.Conv2d:
    """The convolution of DeepSpeed's golden values."""
    made = nn.Conv2d(2, 3, 2, bias=False)
    with torch.no_grad():
        made.weight.copy_(((torch.arange(24) * 5 % 7 - 3) / 3).view(3, 2, 2, 2))
    return made


@pytest.mark.claims(
    *(
        f"compression_training.channel_pruning{row}"
        for row in (
            *("", ".shared_parameters", ".shared_parameters.enabled", ".shared_parameters.method"),
            *(".different_groups", ".different_groups.<group>"),
            ".different_groups.<group>.params",
            ".different_groups.<group>.params.dense_ratio",
            ".different_groups.<group>.modules",
        )
    )
)
def test_channels_are_pruned_by_scores_or_by_their_size():
    image = (torch.arange(18) / 9).view(1, 2, 3, 3)
    model = built(channels(), model=nn.Sequential(convolution()))
    assert model[0].channel_mask_scores.shape == (3, 1, 1, 1)
    score(model[0], "channel_mask_scores", [0.2, 0.9, 0.5])
    assert torch.allclose(model(image)[0], torch.tensor(CHANNELS), atol=1e-6)
    fixed = built(channels("l1"), model=nn.Sequential(convolution()))
    sizes = fixed[0].weight.abs().sum((1, 2, 3))
    kept = fixed[0].channel_pruning_mask.flatten()
    assert sorted(sizes[kept].tolist()) == sorted(sizes.tolist())[1:]


@pytest.mark.claims("compression_training.row_pruning.different_groups.<group>.related_modules")
@pytest.mark.parametrize("method", ["l1", "topk"])
def test_clean_rows_and_the_inputs_that_read_them_are_removed(method):
    wishes = rows(method, related=[[LAYER + "output"]])
    model = built(wishes, model=Bert())
    with torch.no_grad():
        before = model(TOKENS)
        for layer in model.bert.encoder.layer:  # each layer has a mask of its own
            layer.intermediate["dense"].bias += 0.1
        before = model(TOKENS)
    redundancy_clean(model, config(wishes))
    assert torch.allclose(model(TOKENS), before, atol=1e-6)
    for layer in model.bert.encoder.layer:
        first, second = layer.intermediate["dense"], layer.output["dense"]
        assert type(first) is type(second) is nn.Linear
        assert (first.out_features, *first.weight.shape, *first.bias.shape) == (32, 32, 16, 32)
        assert (second.in_features, *second.weight.shape) == (32, 16, 32)
    assert list(model.state_dict()) == list(Bert().state_dict())


@pytest.mark.claims("compression_training.head_pruning.different_groups.<group>.related_modules")
def test_clean_heads_are_removed_from_queries_keys_and_values():
    model = built(ATTENTION, model=Bert())
    for layer in model.bert.encoder.layer:
        layer.attention.self.num_attention_heads = 4
        layer.attention.self.all_head_size = 16
        layer.attention.hidden_size = 16
    with torch.no_grad():
        before = model(TOKENS)
    redundancy_clean(model, config(ATTENTION))
    assert torch.allclose(model(TOKENS), before, atol=1e-6)
    for layer in model.bert.encoder.layer:
        attention = layer.attention
        for part in attention.self.values():
            assert (part.out_features, *part.weight.shape, *part.bias.shape) == (8, 8, 16, 8)
        assert attention.output["dense"].in_features == 8
        assert (attention.self.num_attention_heads, attention.self.all_head_size) == (2, 8)
        assert attention.hidden_size == 16


class Images(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(
            *(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
            *(nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 3)),
        )


@pytest.mark.claims("compression_training.channel_pruning.different_groups.<group>.related_modules")
def test_pruned_channels_are_removed_from_their_readers():
    wishes = channels(modules=["0", "3"], related=[["1", "3"], ["5"]])
    model = built(wishes, model=Images())
    image = torch.randn(2, 2, 6, 6)
    with torch.no_grad():
        model[1].running_mean.fill_(0.3)
        model[1].bias.fill_(0.2)
        before = model(image)
        redundancy_clean(model, config(wishes))
        assert torch.allclose(model(image), before, atol=1e-6)
    first, norm, _, second, _, last = model
    assert (first.out_channels, *first.weight.shape, *first.bias.shape) == (3, 3, 2, 3, 3, 3)
    assert (norm.num_features, *norm.running_var.shape, *norm.weight.shape) == (3, 3, 3)
    assert (second.in_channels, second.out_channels, *second.weight.shape) == (3, 2, 2, 3, 3, 3)
    assert (last.in_features, *last.weight.shape) == (32, 3, 32)
    assert not norm._forward_hooks


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("method", ["l1", "topk"])
def test_a_network_of_normalized_channels_is_the_same_in_training_and_after_cleaning(method, stage):
    wishes = channels(method, modules=["0", "3"], related=[["1", "3"], ["5"]], schedule_offset=1)
    engine = engine_of(stage, built(wishes, model=Images()), **config(wishes))
    image = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(4):
        loss = engine(image).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    engine.eval()
    before = engine(image)
    redundancy_clean(engine, config(wishes))
    assert torch.allclose(engine.module(image), before, atol=1e-6)
    engine.destroy()


def test_each_pattern_of_a_group_has_its_own_masks():
    wishes = rows(
        modules=["layer.0.intermediate", "layer.1.intermediate"],
        related=[["layer.0.output"], ["layer.1.output"]],
    )
    model = built(wishes, model=Bert())
    with torch.no_grad():
        before = model(TOKENS)
        redundancy_clean(model, config(wishes))
        assert torch.allclose(model(TOKENS), before, atol=1e-6)


def everything(**shared):
    return (
        FFN,
        ATTENTION,
        weights(8, 8, modules="*", quantize_weight_in_forward=True, **shared),
        inputs(8, ["intermediate", LAYER + "output"]),
    )


def test_all_techniques_together_give_the_same_outputs_when_clean(tmp_path):
    wishes = config(*everything(quantize_groups=8))
    model = init_compression(Bert(), wishes).eval()
    size = sum(each.nbytes for each in model.state_dict().values())
    with torch.no_grad():
        before = model(TOKENS)
        redundancy_clean(model, wishes)
        assert torch.allclose(model(TOKENS), before, atol=1e-6)
        after = model(TOKENS)
        assert pack_weights(model) == []
        assert torch.equal(model(TOKENS), after)
        save_packed(model, tmp_path)
        assert torch.equal(load_packed(Bert(), tmp_path).eval()(TOKENS), after)
    assert sum(each.nbytes for each in model.state_dict().values()) < size / 4
    row = next(one for one in compression_report(model).rows if "intermediate" in one.name)
    assert row.techniques[-1] == "row_pruning"
    assert row.nbytes_after < row.nbytes_before / 5


def test_pruned_heads_do_not_widen_the_range_of_quantized_inputs():
    wishes = config(ATTENTION, inputs(4, ["attention.output"]))
    model = init_compression(Bert(), wishes).eval()
    for layer in model.bert.encoder.layer:
        # The second head is the largest, and is pruned.
        score(layer.attention.output["dense"], "head_pruning_scores", [1.0, 0.0, 2.0, 0.5])
        with torch.no_grad():
            layer.attention.self["value"].weight[4:8] *= 50.0
    with torch.no_grad():
        before = model(TOKENS)
        redundancy_clean(model, wishes)
        assert torch.allclose(model(TOKENS), before, atol=1e-6)


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (rows(schedule_offset=9), "row_pruning begins at update 9"),
        (weights(8, 8, modules="*", schedule_offset=5), "weight_quantization begins at update 5"),
        (weights(8, 2, 7, modules="*"), "weights have 8 bits so far and get 2"),
    ],
)
def test_cleaning_before_a_schedule_has_ended_is_reported(wish, told, caplog):
    engine = engine_of(0, init_compression(Bert(), config(wish)), **config(wish))
    for _ in range(2):
        engine.backward(engine(TOKENS).square().mean())
        engine.step()
    caplog.clear()
    redundancy_clean(engine, config(wish))
    (line,) = [one for one in caplog.messages if "redundancy_clean" in one]
    assert told in line
    assert "bert.encoder.layer.0" in line
    engine.destroy()


def test_finished_schedules_are_cleaned_in_silence(caplog):
    wish = weights(8, 8, modules="*")
    redundancy_clean(init_compression(Bert(), config(wish)), config(wish))
    assert not caplog.messages


def test_a_smaller_model_is_loaded_into_one_that_was_pruned(tmp_path):
    model = redundancy_clean(built(FFN, model=Bert()), config(FFN))
    with torch.no_grad():
        expected = model(TOKENS)
        save_packed(model, tmp_path)
        assert torch.equal(load_packed(Bert(), tmp_path).eval()(TOKENS), expected)
    with pytest.raises(ModelError, match=r"layer\.1\.\S+ was made smaller.*no module of this name"):
        load_packed(Bert(layers=1), tmp_path)
    smaller = Bert()
    smaller.bert.encoder.layer[0].intermediate["dense"] = nn.Linear(16, 8)
    with pytest.raises(ModelError, match=r"has the shape \(8, 16\); expected at least \(32, 16\)"):
        load_packed(smaller, tmp_path)
