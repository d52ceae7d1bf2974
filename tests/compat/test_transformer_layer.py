"""DeepSpeed's layer of a BERT computes what torch's own layer does, and trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal.compat.transformer_layer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from hadal.errors import ModelError, NotBuiltYetError

HIDDEN, HEADS = 12, 3


def config_of(**changes: Any) -> DeepSpeedTransformerConfig:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "heads": HEADS, "num_hidden_layers": 2}
    ratios = {"attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0, "initializer_range": 0.2}
    return DeepSpeedTransformerConfig.from_dict(
        vars(DeepSpeedTransformerConfig(**{**sizes, **ratios, **changes}))
    )


def twin_of(layer: DeepSpeedTransformerLayer) -> nn.TransformerEncoderLayer:
    """Return torch's layer with the same weights."""
    first = layer.config.pre_layer_norm
    twin = nn.TransformerEncoderLayer(
        HIDDEN,
        HEADS,
        4 * HIDDEN,
        dropout=0.0,
        activation=nn.GELU(approximate="tanh"),
        layer_norm_eps=layer.config.layer_norm_eps,
        batch_first=True,
        norm_first=first,
    )
    attention = twin.self_attn
    norms = (twin.norm1, twin.norm2) if first else (twin.norm2, twin.norm1)
    pairs: list[tuple[Any, nn.Parameter]] = [
        (attention.in_proj_weight, layer.attn_qkvw),
        (attention.in_proj_bias, layer.attn_qkvb),
        (attention.out_proj.weight, layer.attn_ow),
        (attention.out_proj.bias, layer.attn_ob),
        (twin.linear1.weight, layer.inter_w),
        (twin.linear1.bias, layer.inter_b),
        (twin.linear2.weight, layer.output_w),
        (twin.linear2.bias, layer.output_b),
        (norms[0].weight, layer.norm_w),
        (norms[0].bias, layer.norm_b),
        (norms[1].weight, layer.attn_nw),
        (norms[1].bias, layer.attn_nb),
    ]
    with torch.no_grad():
        for theirs, ours in pairs:
            ours.normal_(std=0.3)
            theirs.copy_(ours)
    return twin


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("recomputes", [True, False])
def test_it_computes_what_torchs_layer_does(first: bool, masked: bool, recomputes: bool) -> None:
    torch.manual_seed(0)
    layer = DeepSpeedTransformerLayer(config_of(pre_layer_norm=first, gelu_checkpoint=recomputes))
    twin = twin_of(layer)
    values = torch.randn(2, 5, HIDDEN, requires_grad=True)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[0, 3:] = masked
    mask = hidden[:, None, None].float() * -10000.0 if masked else None
    found = layer(values, mask)
    wanted = twin(values, src_key_padding_mask=hidden if masked else None)
    torch.testing.assert_close(found, wanted)
    if masked:  # as transformers' encoders call their layers, whose masks may be true for the seen
        torch.testing.assert_close(layer(values, mask == 0, None, None, None, None, False), found)
    for output in (found, wanted):
        output.square().sum().backward()
    torch.testing.assert_close(layer.inter_w.grad, twin.linear1.weight.grad)
    torch.testing.assert_close(layer.attn_qkvw.grad, twin.self_attn.in_proj_weight.grad)


def test_weights_are_drawn_or_taken() -> None:
    torch.manual_seed(0)
    number = DeepSpeedTransformerLayer.layer_id
    layer = DeepSpeedTransformerLayer(config_of(hidden_size=96))
    assert (layer.config.layer_id, DeepSpeedTransformerLayer.layer_id) == (number, number + 1)
    assert layer.attn_qkvw.std().item() == pytest.approx(0.2, rel=0.05)
    assert layer.output_w.std().item() == pytest.approx(0.1, rel=0.05)  # 2 layers, so half
    assert layer.norm_w.eq(1).all() and layer.norm_b.eq(0).all() and layer.inter_b.eq(0).all()
    shapes = [(96, 96)] * 4 + [(96,), (384, 96), (96, 384), (96,)]
    given = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    biases = [nn.Parameter(torch.randn(shape[0])) for shape in shapes]
    before = torch.get_rng_state()
    settings = config_of(hidden_size=96, initializer_range=-1)
    again = DeepSpeedTransformerLayer(settings, given, biases)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(again.attn_qkvw, torch.cat(given[:3])) and again.attn_ow is given[3]
    assert again.norm_b is biases[7] and again.attn_qkvb.eq(0).all()


def test_settings_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 24, "heads": 2}), "utf-16")
    config = DeepSpeedTransformerConfig.from_json_file(str(tmp_path / "config.json"))
    assert (config.hidden_size, config.heads, config.layer_norm_eps) == (24, 2, 1e-12)
    assert config.intermediate_size == 96


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_size 10 is not a multiple of heads 3"):
        DeepSpeedTransformerLayer(config_of(hidden_size=10))
    with pytest.raises(ModelError, match=r"initializer_range -1.*such as 0\.02"):
        DeepSpeedTransformerLayer(config_of(initializer_range=-1))
    layer = DeepSpeedTransformerLayer(config_of(return_tuple=True))
    values = torch.randn(1, 4, HIDDEN)
    (output,) = layer(values, None, head_mask=None, output_attentions=False)
    assert output.shape == values.shape
    with pytest.raises(NotBuiltYetError, match="past_key_value"):
        layer(values, past_key_value=values)
    with pytest.raises(NotBuiltYetError, match="argument 3"):
        layer(values, None, values)
    for mask in (torch.ones(1, 1, 1, 4, dtype=torch.long), torch.zeros(4, 4)):
        with pytest.raises(ModelError, match="attention_mask has the dtype"):
            layer(values, mask)


def _trained(stage: int) -> list[float]:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    with hadal.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = nn.Sequential(*(DeepSpeedTransformerLayer(config_of()) for _ in range(2)))
    engine, *_ = hadal.initialize(model=model, config=config)
    values, losses = torch.randn(1, 4, HIDDEN), []
    for _ in range(3):
        loss: Tensor = engine(values).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_it_trains_alike_at_every_stage(ranks: RankPools) -> None:
    wanted, *others = (ranks(2).run(_trained, stage) for stage in (0, 3))
    assert others == [wanted] and wanted[0][-1] < wanted[0][0]
