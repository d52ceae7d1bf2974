"""The names of deepspeed.module_inject around tensor parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.toys import config_of
from ranks import RankPools
from torch import nn

from hadal.compat.engine import initialize
from hadal.compat.install import alias
from hadal.errors import NotBuiltYetError, UsageError
from hadal.plugins.tensor_parallel.layers import ColumnLinear, RowLinear, WeightCut

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/tensor_parallel.json").read_text()
)
LAYERS = alias("deepspeed.module_inject.layers")
RULES = alias("deepspeed.module_inject.autotp_config")
SHARDS = alias("deepspeed.module_inject.tp_shard")


def test_layers_that_were_cut_have_deepspeed_s_names() -> None:
    assert issubclass(RowLinear, LAYERS.LinearAllreduce)
    assert issubclass(ColumnLinear, LAYERS.LinearLayer)
    assert issubclass(ColumnLinear, LAYERS.TensorParallel_Layer)
    assert alias("deepspeed").tp_model_init.__name__ == "tp_model_init"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ColumnLinear, "SubParamLinearLayer"),
        (ColumnLinear, "fused_LinearLayer"),
        (ColumnLinear, "GateUpPack_LinearLayer"),
        (RowLinear, "SubParamLinearAllreduce"),
    ],
)
def test_fused_layers_have_a_class_of_their_own(kind: type[nn.Module], name: str) -> None:
    layer: Any = kind.__new__(kind)
    layer.__dict__["cut"] = WeightCut.of(0, [[2, 2], [1, 1]])
    plain: Any = kind.__new__(kind)
    plain.__dict__["cut"] = WeightCut.of(0, [[2, 2]])
    found = getattr(LAYERS, name)
    assert isinstance(layer, found) and not isinstance(plain, found)
    with pytest.raises(UsageError, match="layer_specs"):
        found(layer, None)
    plainly = LAYERS.LinearLayer if kind is ColumnLinear else LAYERS.LinearAllreduce
    assert isinstance(layer, plainly) and isinstance(plain, plainly)
    with pytest.raises(UsageError, match="cannot be created by programs"):
        plainly(nn.Linear(2, 2), mp_group=None, name="up")


def test_layers_are_cut_for_training() -> None:
    LAYERS.set_autotp_mode(training=True)
    assert LAYERS.is_autotp_training_mode()
    with pytest.raises(NotBuiltYetError, match="inference"):
        LAYERS.set_autotp_mode(training=False)


@pytest.mark.parametrize("name", GOLDEN["presets"])
def test_presets_have_deepspeed_s_patterns(name: str) -> None:
    rules = RULES.AutoTPPresets.get_preset(name)
    assert [list(one.patterns) for one in rules] == [
        one["pattern"] for one in GOLDEN["presets"][name]
    ]
    assert {one.partition_type for one in rules} <= set(RULES.PartitionType)
    with pytest.raises(UsageError, match="llama"):
        RULES.AutoTPPresets.get_preset("none")


def test_sizes_follow_heads_and_grains() -> None:
    SHARDS.set_num_kv_heads(3)
    try:
        assert SHARDS.get_shard_size_list(12, 4, "self_attn.q_proj") == [4, 4, 4, 0]
        assert SHARDS.get_shard_size(12, 4, "mlp.up_proj", 1) == 3
    finally:
        SHARDS.set_num_kv_heads(None)
    SHARDS.set_tp_grain_size(64)
    try:
        assert SHARDS.get_shard_size_list(130, 4, "lm_head") == [64, 64, 0, 2]
    finally:
        SHARDS.set_tp_grain_size(1)
    assert SHARDS.get_shard_size_list(12, 4, "self_attn.q_proj", num_kv_heads=3) == [4, 4, 4, 0]
    assert SHARDS.get_shard_size(12, 4, "self_attn.q_proj", 3, num_kv_heads=3) == 0
    assert SHARDS.get_shard_size(10, 1) == 10
    with pytest.raises(ValueError, match=r"of 2 tensor-parallel ranks; .* process group"):
        SHARDS.get_shard_size(10, 2)


def test_sizes_of_today_s_release_follow_the_model_s_own_numbers() -> None:
    config = SimpleNamespace(num_key_value_heads=3, num_attention_heads=6, hidden_size=12)
    meta = SHARDS.AutoTPMeta.from_model_config(SimpleNamespace(text_config=config))
    assert (meta.num_kv_heads, meta.num_attention_heads, meta.n_embd) == (3, 6, 12)
    assert SHARDS.get_shard_size_list(12, 4, meta, "self_attn.q_proj") == [4, 4, 4, 0]
    assert SHARDS.get_shard_size(12, 4, meta, "mlp.up_proj", 1) == 3
    assert SHARDS.AutoTPMeta.from_model_config(None) == SHARDS.AutoTPMeta()


def test_rows_of_fused_parts_and_the_plan_of_a_model() -> None:
    assert LAYERS._subparam_shard_widths([8, 6], 2) == [[4, 4], [3, 3]]
    plan = alias("deepspeed.runtime.tensor_parallel.config")._get_hf_tp_plan
    config = SimpleNamespace(base_model_tp_plan={"layers.*.up": "colwise"})
    model = SimpleNamespace(config=config, _tp_plan={"lm_head": "colwise_rep"})
    assert plan(model) == {"layers.*.up": "colwise", "lm_head": "colwise_rep"}


def test_rules_are_made_from_json_and_from_plans() -> None:
    spec = {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]}
    rules = RULES.AutoTPConfig.from_dict({"tp_size": 2, "layer_specs": [spec], "strict_mode": True})
    assert (rules.tp_size, rules.strict_mode, rules.use_default_specs) == (2, True, True)
    assert rules.find_matching_spec("h.0.qkv.weight").shape == (3, -1)
    assert rules.find_matching_spec("h.0.out.weight") is None
    with pytest.raises(ValueError, match="partition_type"):
        RULES.AutoTPConfig.from_dict({"layer_specs": [{**spec, "partition_type": "diagonal"}]})
    converter = alias("deepspeed.module_inject.tp_plan_converter").TPPlanConverter
    plan = {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}
    column, row = converter.convert(plan)
    assert column.matches("model.layers.3.q_proj.weight")
    assert (column.partition_type, row.partition_type) == (
        RULES.PartitionType.COLUMN,
        RULES.PartitionType.ROW,
    )
    assert converter.convert({}) is None
    with pytest.raises(ValueError, match="diagonal"):
        converter.convert({"q": "diagonal"})
    made = RULES.TPLayerSpec(patterns=[".*"], partition_type=RULES.PartitionType.ROW)
    assert made.matches("anything")


def gathered_weights(stage: int) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("up_proj", nn.Linear(4, 6, bias=False))
    model.add_module("down_proj", nn.Linear(6, 4, bias=False))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers = [
        {"patterns": [r"up_proj\.weight"], "partition_type": "column"},
        {"patterns": [r"down_proj\.weight"], "partition_type": "row"},
    ]
    section = {"use_default_specs": False, "layer_specs": layers}
    config = config_of(stage, tensor_parallel={"autotp_size": 2, "partition_config": section})
    engine, *_ = initialize(model=model, config=config)
    named = dict(engine.module.named_parameters())
    gather = LAYERS.GatherReplacedLayerParams
    sizes = []
    with gather(named.values(), engine.module):
        for name, parameter in named.items():
            assert torch.equal(parameter.data, before[name])
            parameter.data.mul_(2)
    with gather(named["up_proj.weight"], engine.module, enabled=True):
        assert torch.equal(named["up_proj.weight"].data, 2 * before["up_proj.weight"])
        sizes.append(tuple(named["down_proj.weight"].shape))
    with gather(named.values(), engine.module, enabled=False):
        sizes.append(tuple(named["up_proj.weight"].shape))
    engine.destroy()
    return sizes


@pytest.mark.parametrize("stage", [0, 1])
def test_slices_are_whole_weights_inside_the_context(ranks: RankPools, stage: int) -> None:
    assert ranks(2).run(gathered_weights, stage) == 2 * [[(4, 3), (3, 4)]]


class _Mpt(nn.Module):
    def build_mpt_alibi_tensor(
        self, heads: int, length: int, alibi_bias_max: int = 8, device: Any = None
    ) -> torch.Tensor:
        return torch.arange(heads).view(heads, 1, 1) * torch.ones(1, 1, length)


class _Baichuan(nn.Module):
    n_head = 3

    def get_alibi_mask(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        return torch.arange(self.n_head).view(-1, 1, 1) * torch.ones(1, length + 1, length + 1)


def own_biases() -> list[Any]:
    names = alias("deepspeed.module_inject.auto_tp_model_utils")
    meta = SHARDS.AutoTPMeta(num_attention_heads=6, num_kv_heads=3)
    mpt, other = _Mpt(), _Baichuan()
    for _ in range(2):  # the second time wraps nothing twice
        names.install_head_sharded_helper(
            mpt, "build_mpt_alibi_tensor", names.build_mpt_alibi_tensor, meta
        )
        names.install_head_sharded_helper(other, "get_alibi_mask", names.get_alibi_mask, meta)
    bloom = names.build_bloom_alibi_tensor(torch.ones(2, 3), 6, torch.float32)
    with pytest.raises(ValueError, match="do not divide 6 heads among 2 ranks"):
        names.build_bloom_alibi_tensor(torch.ones(1, 3), 6, torch.float32, head_shard_sizes=[6, 6])
    mask = other.get_alibi_mask(torch.ones(1), 2)
    assert mask.shape[1:] == (2, 2) and other.n_head == 3
    return [mpt.build_mpt_alibi_tensor(3, 2)[:, 0, 0].tolist(), mask[:, 0, 0].tolist(), bloom]


def test_biases_by_position_are_those_of_the_rank_s_own_heads(ranks: RankPools) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    first, second = ranks(2).run(own_biases)
    # Three key-value heads of two heads each: the first rank has two of them.
    assert (first[0], second[0]) == ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0])
    assert (first[1], second[1]) == ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0])
    whole = build_alibi_tensor(torch.ones(2, 3), 6, torch.float32).view(2, 6, 3)
    both = [each[2].view(2, 3, 3) for each in (first, second)]
    torch.testing.assert_close(torch.cat(both, dim=1), whole)
