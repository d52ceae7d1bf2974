"""The names of deepspeed.module_inject around tensor parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hadal.compat.install import alias
from hadal.errors import NotBuiltYetError, UsageError
from hadal.plugins.tensor_parallel.layers import ColumnLinear, RowLinear

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
    assert SHARDS.get_shard_size(10, 2) == 5
