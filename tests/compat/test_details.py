"""Details that some programs use, beyond those of the most common ones."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.toys import config_of, model_of, train
from ranks import RankPools
from torch import nn

from hadal.compat import groups, optimizer as kinds
from hadal.compat.accelerator import get_accelerator
from hadal.compat.engine import initialize
from hadal.compat.install import alias
from hadal.compat.log import (
    LoggerFactory,
    get_current_level,
    log_dist_once,
    logger,
    should_log_le,
    warning_once,
)
from hadal.compat.optimizer import ParameterOffload
from hadal.compat.parameters import ZeroParamStatus, ZeroParamType, is_zero_param, z3_leaf_parameter
from hadal.compat.timers import NoopTimer, ThroughputTimer
from hadal.compat.tools import (
    bwc_pipeline_parallel_group,
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
    copy_to_device,
    empty_cache,
    ensure_directory_exists,
    get_global_norm,
    get_only_unique_item,
    noop_decorator,
)
from hadal.errors import UsageError
from hadal.zero.leaves import set_z3_leaf_modules, unset_z3_leaf_modules


def test_an_engine_tells_its_checked_configuration_and_its_ranks() -> None:
    config = config_of(2, gradient_clipping=0.5)
    engine, optimizer, _, _ = initialize(model=model_of(), config=config)
    told = engine._config
    assert (told.zero_config.stage, told.zero_enabled) == (2, True)
    assert (told.gradient_clipping, told.train_micro_batch_size_per_gpu) == (0.5, 3)
    assert told._param_dict is config
    assert (engine.dp_world_size, engine.seq_dp_world_size) == (1, 1)
    assert (engine.mp_world_size, engine.sequence_parallel_size) == (1, 1)
    assert engine.seq_parallel_group is engine.get_sequence_parallel_group() is None
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    assert engine.param_names == names
    assert engine.seq_data_parallel_group is optimizer.dp_process_group
    assert isinstance(optimizer, kinds.ZeROOptimizer)
    assert optimizer._global_grad_norm is None
    train(engine, range(1))
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0


def test_weights_written_by_a_program_need_no_refresh_of_masters() -> None:
    engine, optimizer, _, _ = initialize(model=model_of(), config=config_of(1))
    with torch.no_grad():
        engine.module[0].weight.fill_(2.0)
    optimizer.refresh_fp32_params()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    train(engine, range(1))
    assert torch.equal(engine.module[0].weight, torch.full((9, 6), 2.0))


def test_at_stage_3_programs_find_hooks_without_an_optimizer_too() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    model = model_of()
    model.requires_grad_(False)
    engine, optimizer, _, _ = initialize(model=model, config=config)
    assert isinstance(optimizer, ParameterOffload)
    assert optimizer is engine.optimizer
    assert (optimizer.module, optimizer.forward_hooks) == (model, [])
    assert not hasattr(optimizer, "overflow")
    found = alias("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    assert isinstance(optimizer, found)


def _gathered_by_hand() -> dict[str, Any]:
    model = model_of()
    expected = model[0].weight.detach().clone()
    engine = initialize(model=model, config=config_of(3))[0]
    weight: Any = engine.module[0].weight
    told = [weight.ds_status]
    weight.all_gather()
    weight.all_gather()  # a second one changes nothing
    told.append(weight.ds_status)
    same = torch.equal(weight, expected)
    weight.partition()
    weight.partition()
    return {
        "told": [*told, weight.ds_status],
        "same": same,
        "is zero": is_zero_param(weight) and not is_zero_param(torch.ones(1)),
        "kind": weight.ds_param_type,
        "ranks": (weight.ds_zero_partition_rank, weight.ds_zero_partition_world_size),
        "group": weight.ds_process_group.size(),
    }


def test_a_parameter_is_gathered_and_released_by_hand(ranks: RankPools) -> None:
    for rank, found in enumerate(ranks(2).run(_gathered_by_hand)):
        away, there = ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE
        assert found["told"] == [away, there, away]
        assert found["same"]
        assert found["is zero"]
        assert found["kind"] is ZeroParamType.PARTITIONED
        assert (found["ranks"], found["group"]) == ((rank, 2), 2)


def _names_of_state() -> dict[str, Any]:
    engine = initialize(model=model_of(), config=config_of(3))[0]
    alone = engine.module.state_dict() if engine.global_rank == 0 else {}
    return {
        "alone": {name: tuple(value.shape) for name, value in alone.items()},
        "whole": {name: tuple(value.shape) for name, value in engine.module_state_dict().items()},
    }


def test_one_rank_may_ask_for_the_names_of_spread_weights(ranks: RankPools) -> None:
    first, second = ranks(2).run(_names_of_state)
    expected = {name: tuple(value.shape) for name, value in model_of().state_dict().items()}
    assert first["whole"] == second["whole"] == expected
    # It contains no value that would be loaded silently.
    assert first["alone"] == dict.fromkeys(expected, (0,))


class _Slices:
    def get_slice_parallel_rank(self) -> int:
        return 3

    def get_pipe_parallel_world_size(self) -> int:
        return 2

    def get_pipe_parallel_group(self) -> str:
        return "stages"


def test_tools_of_a_programs_own_groups() -> None:
    assert bwc_tensor_model_parallel_rank(_Slices()) == 3
    assert bwc_tensor_model_parallel_rank() == 0
    assert bwc_pipeline_parallel_world_size(_Slices()) == 2
    assert bwc_pipeline_parallel_world_size() == 1
    assert bwc_pipeline_parallel_group(_Slices()) == "stages"
    assert bwc_pipeline_parallel_group() is None
    assert groups.get_data_parallel_group_ranks() == [0]
    assert groups.get_data_parallel_src_rank() == 0
    assert groups.get_sequence_data_parallel_world_size() == 1
    assert groups.get_sequence_data_parallel_rank() == 0


def test_small_tools(tmp_path: Any) -> None:
    assert get_global_norm([3.0, 4.0]) == 5.0
    assert get_only_unique_item([2, 2]) == 2
    with pytest.raises(RuntimeError, match="expected equal items"):
        get_only_unique_item([2, 3])
    assert noop_decorator(len) is len
    ensure_directory_exists(str(tmp_path / "a" / "b.txt"))
    assert (tmp_path / "a").is_dir()
    empty_cache()
    given = {"x": torch.ones(2), "y": torch.ones(1)}
    copied = copy_to_device(given, "cpu", lambda tensor: tensor.numel() == 2)
    assert copied["x"] is not given["x"]
    assert copied["y"] is given["y"]
    assert get_accelerator()._name == "cpu"
    assert get_accelerator().random().initial_seed() == torch.initial_seed()
    clocks = NoopTimer()
    clocks("f").start()
    clocks("f").stop(record=True)
    clocks.log(["f"])
    assert (clocks("f").elapsed(reset=True), clocks.get_mean(["f"]), clocks.get_timers()) == (
        0.0,
        {},
        {},
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    set_z3_leaf_modules(model, [nn.Sequential])
    assert z3_leaf_parameter(model[1][0].weight)
    unset_z3_leaf_modules(model, [nn.Sequential])
    assert not z3_leaf_parameter(model[1][0].weight)


def test_loggers_speak_once_and_from_a_level_on(caplog: pytest.LogCaptureFixture) -> None:
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger.name):
            for _ in range(2):
                warning_once("only once")
                log_dist_once("and this")
            assert (get_current_level(), should_log_le("info")) == (logging.INFO, True)
            assert not should_log_le("debug")
            with pytest.raises(ValueError, match="loud"):
                should_log_le("loud")
        assert [record.getMessage() for record in caplog.records] == [
            "only once",
            "[Rank 0] and this",
        ]
    finally:
        logger.removeHandler(caplog.handler)
    made = LoggerFactory.create_logger("a logger of a test", logging.ERROR)
    assert (made.level, made.propagate) == (logging.ERROR, False)
    with pytest.raises(ValueError, match="name"):
        LoggerFactory.create_logger()


def partitioned(numel: int) -> tuple[list[int], list[float]]:
    group = alias("deepspeed.utils.groups").get_data_parallel_group()
    kind = alias("deepspeed.runtime.utils").PartitionedTensor
    whole = torch.arange(float(numel)).view(1, numel)
    part = kind(whole, group)
    assert part.full_size() == [1, numel] and part.local_size() == part.data().shape
    again = kind.from_meta(part.to_meta(), part.data(), group)
    assert torch.equal(again.full(), whole) and torch.equal(part.full(), whole)
    meta = part.to_meta()
    meta[4] = 1 - meta[4]  # the rank
    with pytest.raises(RuntimeError, match="this one is"):
        kind.from_meta(meta, part.data(), group)
    return part.to_meta().tolist(), part.data().tolist()


def test_a_tensor_in_slices(ranks: RankPools) -> None:
    assert ranks(2).run(partitioned, 5) == [
        ([2, 1, 5, 2, 0, 0, 3, 5], [0.0, 1.0, 2.0]),
        ([2, 1, 5, 2, 1, 0, 3, 5], [3.0, 4.0]),
    ]


def test_random_states_and_their_name() -> None:
    names = alias("deepspeed.checkpointing")
    assert names._MODEL_PARALLEL_RNG_TRACKER_NAME == "model-parallel-rng"
    before = torch.get_rng_state()
    drawn = torch.rand(3)
    names._set_cuda_rng_state(before)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(
    ("changes", "is_one"),
    [
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, True),
        ({"bf16": {"enabled": True}}, False),
        ({}, False),
    ],
)
def test_which_engine_has_the_bf16_optimizer(changes: dict[str, Any], is_one: bool) -> None:
    model = model_of()
    _, optimizer, _, _ = initialize(model=model, config=config_of(1, **changes))
    kind = alias("deepspeed.runtime.bf16_optimizer").BF16_Optimizer
    assert isinstance(optimizer, kind) is is_one


def test_counts_of_a_module_while_a_profiler_has_them() -> None:
    profiler = alias("deepspeed.profiling.flops_profiler.profiler")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    counter = profiler.FlopsProfiler(model)
    counter.start_profile()
    model(torch.ones(3, 4))
    counter.stop_profile()
    assert profiler.get_module_macs(model[0]) == 3 * 4 * 8
    flops = [profiler.get_module_flops(each) for each in (model, *model)]
    assert flops[0] == sum(flops[1:]) == counter.get_total_flops()
    assert profiler.get_module_duration(model) > 0
    counter.end_profile()
    with pytest.raises(RuntimeError, match="start_profile"):
        profiler.get_module_flops(model)


def test_a_program_s_own_throughput_timer_counts_what_it_times() -> None:
    said: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=True)
    timer = ThroughputTimer(config, 8, start_step=1, steps_per_output=2, logging_fn=said.append)
    for step in range(6):
        timer.start()
        timer.stop(global_step=bool(step % 2))
    assert (timer.micro_step_count, timer.global_step_count) == (6, 3)
    assert timer.avg_samples_per_sec() * timer.total_elapsed_time == pytest.approx(2 * 8)
    assert len(said) == 1 and "epoch=0/step=2" in said[0]
    timer.update_epoch_count()
    timer.stop()  # was not started
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)
    off = ThroughputTimer(SimpleNamespace(enabled=False, synchronized=True), 8)
    off.start()
    off.stop(global_step=True)
    assert off.global_step_count == 0


def test_dtypes_of_a_module_are_told_checked_and_cast() -> None:
    def fake(**named: Any) -> Any:
        config = SimpleNamespace(param_dtype=None, buffer_dtype=None, **named)
        model = nn.BatchNorm1d(2)
        half, brain = named.get("half", False), named.get("brain", False)
        return SimpleNamespace(
            _config=config,
            module=model,
            fp16_enabled=lambda: half,
            bfloat16_enabled=lambda: brain,
        )

    kind = alias("deepspeed").DeepSpeedEngine
    dtypes = kind._mixed_precision_dtypes
    made = fake(brain=True)
    assert dtypes(made) == (torch.bfloat16, None)
    made._config.buffer_dtype = "fp32"
    assert dtypes(made) == (torch.bfloat16, torch.float32)
    kind._assert_valid_mixed_precision_config(made)
    made._config.param_dtype = "fp16"
    with pytest.raises(AssertionError, match="param_dtype"):
        kind._assert_valid_mixed_precision_config(made)
    kind._cast_module_mixed_precision(
        made, torch.bfloat16, torch.float16, False, re.compile("running_var")
    )
    found = {n: t.dtype for n, t in made.module.state_dict().items()}
    assert list(found.values()) == [
        *(torch.bfloat16, torch.bfloat16),
        *(torch.float16, torch.float32, torch.int64),
    ]
    kind._cast_module_mixed_precision(made, torch.float32, None, True)
    assert made.module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("stage", [1, 3])
def test_names_of_an_engine_s_inside(stage: int, tmp_path: Path) -> None:
    model = model_of()
    groups = [
        {"params": list(model[0].parameters())},
        {"params": [*model[2].parameters(), *model[3].parameters()]},
    ]
    engine, *_ = initialize(model=model, model_parameters=groups, config=config_of(stage))
    shapes = engine._get_zero_param_shapes()
    assert [list(group) for group in shapes] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias", "3.weight", "3.bias"],
    ]
    assert shapes[0]["0.weight"] == (9, 6)
    assert not engine._has_autoep_layers()
    script = tmp_path / "script.py"
    script.touch(0o600)
    engine._change_recovery_script_permissions(script)
    engine._change_recovery_script_permissions(tmp_path / "none")
    assert script.stat().st_mode & 0o700 == 0o700


def test_autocast_is_set_up_by_initialize_alone() -> None:
    names = alias("deepspeed.runtime.torch_autocast")
    section = {"enabled": True, "dtype": "bfloat16"}
    engine, *_ = initialize(model=model_of(), config=config_of(1, torch_autocast=section))
    names.init_autocast_params(engine, torch.bfloat16, None)
    assert names.is_autocast_initialized()
    for wrong in ((torch.float16, None), (torch.bfloat16, ["torch.nn.Linear"])):
        with pytest.raises(UsageError, match="set torch_autocast"):
            names.init_autocast_params(engine, *wrong)


def test_an_optimizer_without_an_engine_has_state_in_its_weights_dtype() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = alias("deepspeed.ops.adam").DeepSpeedCPUAdam([weight])
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype == torch.bfloat16
