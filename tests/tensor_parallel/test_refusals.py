"""Impossible or contradictory cuts are errors with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

import hadal
from hadal import comm
from hadal.comm import Ranks
from hadal.config import load_config
from hadal.config.parallelism import TensorParallel
from hadal.engine.parallel import tp_model_init
from hadal.errors import (
    ConfigError,
    MismatchError,
    ModelError,
    NotBuiltYetError,
    UnbuiltConfigError,
    UsageError,
)
from hadal.plugins.tensor_parallel.plan import plan_cuts, rules_for


class Block(nn.Module):
    def __init__(self, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x).square().mean()


COLUMN = {"patterns": [r".*\.up\.weight"], "partition_type": "column"}
ROW = {"patterns": [r".*\.down\.weight"], "partition_type": "row"}


def config_of(size: int = 2, *specs: dict[str, Any], **keys: Any) -> dict[str, Any]:
    custom = {"partition_config": {"layer_specs": list(specs or (COLUMN, ROW))}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}},
        "tensor_parallel": {"autotp_size": size, **custom, **keys},
    }


def planned(*specs: dict[str, Any], size: int = 2, **keys: Any) -> Any:
    section: TensorParallel = load_config(
        config_of(size, *specs, **keys), world_size=size
    ).tensor_parallel
    return plan_cuts(Tower(), section, size)


@pytest.mark.claims(
    "tensor_parallel.partition_config",
    "tensor_parallel.partition_config.layer_specs",
    "tensor_parallel.partition_config.layer_specs[].patterns",
    "tensor_parallel.partition_config.layer_specs[].partition_type",
)
def test_a_column_without_its_row_is_an_error() -> None:
    assert [one.name for one in planned(COLUMN, ROW).layers] == [
        *("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
    ]
    with pytest.raises(ModelError, match=r"cuts the outputs of blocks\.0\.up, but no row layer"):
        planned(COLUMN)
    with pytest.raises(ModelError, match=r"cuts the inputs of blocks\.0\.down, but no column"):
        planned(ROW)


@pytest.mark.claims("tensor_parallel.partition_config.strict_mode")
def test_strict_mode_names_a_layer_without_a_rule() -> None:
    custom = {"layer_specs": [COLUMN, ROW], "strict_mode": True}
    with pytest.raises(ModelError, match=r"strict_mode: no rule matches out\.weight"):
        planned(partition_config=custom)
    skip = {"patterns": ["out"], "partition_type": "SKIP"}
    planned(partition_config={**custom, "layer_specs": [COLUMN, ROW, skip]})


@pytest.mark.claims("tensor_parallel.partition_config.use_default_specs")
def test_a_preset_s_rules_come_after_the_program_s() -> None:
    def origins(**custom: Any) -> list[str]:
        keys = {"preset_model": "llama", "partition_config": {"layer_specs": [COLUMN], **custom}}
        section = load_config(config_of(2, **keys), world_size=2).tensor_parallel
        return [one.origin for one in rules_for(Tower(), section)]

    own = "tensor_parallel.partition_config.layer_specs[0]"
    assert origins() == [own, *4 * ["preset llama"]]
    assert origins(use_default_specs=False) == [own]


@pytest.mark.claims(
    "tensor_parallel.keep_module_on_host",
    "tensor_parallel.kernel_inject",
    "tensor_parallel.replace_with_kernel_inject",
    "tensor_parallel.partition_config.tp_size",
    "tensor_parallel.partition_config.embedding_partition_dim",
)
@pytest.mark.parametrize(
    "key",
    [
        "keep_module_on_host",
        "kernel_inject",
        "tp_size",
        "replace_with_kernel_inject",
        "embedding_partition_dim",
    ],
)
def test_keys_of_inference_are_reported_as_without_effect(key: str) -> None:
    custom = {"layer_specs": [COLUMN, ROW]}
    if key in ("tp_size", "embedding_partition_dim"):
        config = config_of(2, partition_config={**custom, key: 2})
    else:
        config = config_of(2, **{key: True})
    told = " ".join(load_config(config, world_size=2).notes)
    assert key.removeprefix("replace_with_") in told and "no effect" in told


@pytest.mark.claims("tensor_parallel.vocab_parallel_ce_backend")
def test_another_backend_of_the_loss_is_not_built() -> None:
    load_config(config_of(2, vocab_parallel_ce_backend="torch"), world_size=2)
    with pytest.raises(UnbuiltConfigError, match="vocab_parallel_ce_backend"):
        load_config(config_of(2, vocab_parallel_ce_backend="liger"), world_size=2)


@pytest.mark.claims("tensor_parallel.partition_config.layer_specs[].gather_output")
def test_a_column_that_gathers_its_outputs_needs_no_row() -> None:
    plan = planned({**COLUMN, "gather_output": True})
    assert [one.gather_output for one in plan.layers] == [True, True]


@pytest.mark.claims("tensor_parallel.partition_config.layer_specs[].model_types")
def test_a_rule_may_be_for_other_models() -> None:
    with pytest.raises(ModelError, match="no rule cuts a layer of Tower"):
        planned({**COLUMN, "model_types": ["llama"]})


@pytest.mark.claims("tensor_parallel.partition_config.layer_specs[].grad_allreduce")
def test_the_gradients_of_a_whole_parameter_may_be_summed() -> None:
    skip = {"patterns": [r"out\.weight"], "partition_type": "skip", "grad_allreduce": True}
    assert list(planned(COLUMN, ROW, skip).summed) == ["out.weight", "out.bias"]


@pytest.mark.claims(
    "tensor_parallel.partition_config.layer_specs[].shape",
    "tensor_parallel.partition_config.layer_specs[].partition_dim",
)
def test_a_fused_weight_is_cut_in_each_of_its_parts() -> None:
    fused = {**COLUMN, "shape": [[8, 4], -1], "partition_dim": 0}
    assert planned(fused, ROW).layers[0].cut.parts == ((4, 4), (2, 2))
    with pytest.raises(ModelError, match=r"layer_specs\[0\]: partition_dim 1 for blocks\.0\.up"):
        planned({**COLUMN, "partition_dim": 1, "shape": [-1, -1]}, ROW)


@pytest.mark.claims("tensor_parallel.tp", "tensor_parallel.tp.tp_grain_size")
def test_slices_are_multiples_of_a_grain() -> None:
    assert planned(tp={"tp_grain_size": 5}).layers[0].cut.sizes == [5, 7]


@pytest.mark.claims("tensor_parallel.tp.tp_size")
def test_two_degrees_must_agree() -> None:
    planned(tp={"tp_size": 2})
    with pytest.raises(ConfigError, match=r"tensor_parallel\.tp\.tp_size"):
        planned(tp={"tp_size": 4})


@pytest.mark.claims("tensor_parallel.injection_policy_tuple")
def test_rows_may_be_named_by_the_ends_of_their_names() -> None:
    plan = planned(partition_config=None, injection_policy_tuple=["down"])
    assert [one.is_row for one in plan.layers] == [False, True, False, True]


@pytest.mark.claims("tensor_parallel.partition_config.lm_head_patterns")
def test_the_output_layer_has_a_name() -> None:
    head = {"patterns": [r"out\.weight"]}
    custom = {"layer_specs": [head], "lm_head_patterns": ["out"]}
    plan = planned(partition_config=custom)
    assert (plan.head, plan.layers[0].gather_output) == ("out", True)


def test_a_rank_without_heads_or_rows_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"16 ranks get .* one would have none"):
        planned(size=16)


def test_a_world_that_is_not_divided_is_an_error() -> None:
    with pytest.raises(ConfigError, match="2 does not divide the 3 ranks"):
        load_config(config_of(2), world_size=3)


def test_a_batch_that_counts_copies_of_samples_is_logged() -> None:
    config = {**config_of(2), "train_batch_size": 2 * 2 * 4, "gradient_accumulation_steps": 2}
    found = load_config(config, world_size=4)
    assert (found.train_batch_size, found.gradient_accumulation_steps) == (8, 2)
    assert "an update reads 8" in " ".join(found.notes)
    with pytest.raises(ConfigError, match="train_batch_size"):
        load_config({**config, "train_batch_size": 12}, world_size=4)


def started(**keys: Any) -> Any:
    return hadal.initialize(model=Tower(), config=config_of(2, **keys))[0]


@pytest.mark.claims("tensor_parallel", "tensor_parallel.autotp_size")
@on_ranks(2)
def test_mismatches_are_refused() -> None:
    rank = comm.get_rank()
    engine = started()
    assert engine.module.blocks[0].up.weight.shape == (6, 8)
    with pytest.raises(MismatchError, match=r"ranks \(0, 1\) share one model.*argument 0 of"):
        engine(torch.full((2, 8), float(rank)))
    engine.destroy()
    with pytest.raises(UsageError, match=r"blocks\.0\.up\.weight is a part already"):
        hadal.initialize(model=engine.module, config=config_of(2))
    muon = {**config_of(2), "optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
    with pytest.raises(NotBuiltYetError, match="Muon"):
        hadal.initialize(model=Tower(), config=muon)
    model = tp_model_init(Tower(), 2, torch.float32)
    assert tp_model_init(model, 2, torch.float32) is model
    with pytest.raises(ModelError, match="call it once"):
        tp_model_init(model, 4, torch.float32)
    plain = {**config_of(2), "tensor_parallel": {"injection_policy_tuple": ["down"]}}
    engine = hadal.initialize(model=model, config=plain)[0]
    assert engine.topology.tensor_parallel.size == 2
    with pytest.raises(ConfigError, match="differs from the tp_size of tp_model_init, 2"):
        hadal.initialize(model=tp_model_init(Tower(), 2, torch.float32), config=config_of(1 + 3))


@pytest.mark.claims(
    "tensor_parallel.tp.mpu", "tensor_parallel.tp.tp_group", "tensor_parallel.dtype"
)
@on_ranks(2)
def test_the_programs_group_is_compared() -> None:
    pair = Ranks.world().group
    alone = [dist.new_group([rank]) for rank in range(2)][comm.get_rank()]
    started(tp={"tp_group": pair})
    with pytest.raises(ConfigError, match=r"tensor_parallel\.tp\.tp_group  has the ranks"):
        started(tp={"tp_group": alone})

    class Mpu:
        def get_tensor_model_parallel_group(self) -> Any:
            return alone

    with pytest.raises(ConfigError, match=r"tensor_parallel\.tp\.mpu  has the ranks"):
        started(tp={"mpu": Mpu()})
    with pytest.raises(ConfigError, match=r"tensor_parallel\.dtype"):
        hadal.initialize(
            model=Tower(), config={**config_of(2, dtype="fp16"), "bf16": {"enabled": True}}
        )


@on_ranks(2)
def test_state_that_was_made_before_is_cut_too() -> None:
    whole, engine = Tower(), started()
    optimizer = torch.optim.Adagrad(whole.parameters(), lr=0.1)
    x = torch.arange(16.0).view(2, 8) / 16
    for _ in range(2):
        optimizer.zero_grad()
        whole(x).backward()
        optimizer.step()
        engine.backward(engine(x))
        engine.step()
    found = engine._consolidated_16bit_state_dict()
    assert (found is None) == (comm.get_rank() == 1)
    for name, value in (found or {}).items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-5, atol=1e-6)
