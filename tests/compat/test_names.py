"""Small names of DeepSpeed: groups, devices, loss scalers, configurations, files, tools."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import sys
from datetime import timedelta
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
from engine.parts import megatron
from engine.toys import config_of, model_of
from ranks import RankPools
from torch import nn

import hadal
from hadal.comm import init_distributed
from hadal.comm.start import env_timeout
from hadal.compat import groups, optimizer as kinds
from hadal.compat.accelerator import get_accelerator, set_accelerator
from hadal.compat.builders import COMPATIBLE_OPS
from hadal.compat.comm import TorchBackend
from hadal.compat.configuration import DeepSpeedConfig, get_gradient_clipping, get_log_level
from hadal.compat.engine import initialize
from hadal.compat.files import get_model_state_file, get_model_state_files, get_optim_files
from hadal.compat.install import alias
from hadal.compat.log import set_log_level_from_string
from hadal.compat.optimizers import DynamicLossScaler, LossScaler
from hadal.compat.parameters import (
    get_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    z3_leaf_module,
)
from hadal.compat.timers import SynchronizedWallClockTimer, trim_mean
from hadal.compat.tools import (
    call_to_str,
    clip_grad_norm_,
    convert_conv1d_to_linear,
    instrument_w_nvtx,
    parse_range_list,
    recursive_getattr,
    recursive_setattr,
    required_torch_version,
)
from hadal.compat.zero import unwrap_model_for_generation
from hadal.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    LossScaleError,
    NotBuiltYetError,
    UsageError,
)
from hadal.zero.sharing import is_model_part

ROOT = Path(__file__).parents[2]

# ---- ranks ---------------------------------------------------------------------------------------


def _groups() -> dict[str, Any]:
    groups._newest.clear()  # another test's engine, whose process group these ranks share
    world = groups.get_data_parallel_world_size()
    config = config_of(2, sequence_parallel_size=2)
    engine = initialize(model=model_of(), config=config)[0]
    shared, data = groups.get_sequence_parallel_group(), groups.get_data_parallel_group()
    assert shared is not None and shared is engine.seq_parallel_group
    return {
        "before": world,
        "sequence": (groups.get_sequence_parallel_rank(), shared.size()),
        "size": groups.get_sequence_parallel_world_size(),
        "data": (groups.get_data_parallel_rank(), data.size()),
        "both": groups.get_sequence_data_parallel_group().size(),
        "parts": groups.get_tensor_model_parallel_world_size(),
        "first": groups.get_tensor_model_parallel_src_rank(),
    }


def test_groups_are_those_of_the_newest_engine(ranks: RankPools) -> None:
    for rank, told in enumerate(ranks(4).run(_groups)):
        assert told == {
            "before": 4,
            "sequence": (rank % 2, 2),
            "size": 2,
            "data": (rank // 2, 2),
            "both": 4,
            "parts": 1,
            "first": rank,
        }
    assert groups.get_tensor_model_parallel_group() is None
    with pytest.raises(NotBuiltYetError, match=r"groups\.initialize\(ep_size=2\)"):
        groups.initialize(ep_size=2)


def test_a_backend_names_torch_s_calls() -> None:
    backend = TorchBackend(None, timedelta(minutes=1), None)
    comm = alias("deepspeed.comm")
    assert backend.is_initialized()
    assert comm.has_all_gather_into_tensor()
    assert comm.get_world_group() is torch.distributed.group.WORLD
    whole = torch.zeros(2)
    backend.get_all_gather_function()(whole, torch.ones(2))
    assert whole.tolist() == [1.0, 1.0]
    comm.allgather_fn(whole, torch.full((2,), 3.0), group=None, async_op=False)
    assert whole.tolist() == [3.0, 3.0]
    backend.get_reduce_scatter_function()(whole, torch.ones(2))
    assert whole.tolist() == [1.0, 1.0]
    comm.reduce_scatter_fn(whole, torch.ones(2), prof=False, debug="a call")
    assert alias("deepspeed.comm.comm").all_reduce is comm.all_reduce is hadal.comm.all_reduce


def test_the_log_of_collectives_is_switched_and_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hadal.init_distributed()
    comm = alias("deepspeed.comm")
    log = alias("deepspeed.utils.comms_logging").CommsLogger()
    log.reset_data()
    try:
        comm.configure(enabled=True, prof_all=False, prof_ops=["all_gather_into_tensor"])
        comm.all_reduce(torch.ones(4))
        comm.all_gather_into_tensor(torch.ones(4), torch.ones(4))
        assert log.enabled and log.get_operation_names() == ["all_gather"]
        log.start_profiling_op(["all_reduce"])
        comm.all_reduce(torch.ones(4))
        comm.all_reduce(torch.ones(8))
        log.stop_profiling_op(["all_reduce"])
        comm.all_reduce(torch.ones(4))
        assert log.get_total_operations() == 3 and log.has_data()
        raw = log.get_raw_data()
        assert raw.keys() == {"all_gather", "all_reduce"} and raw["all_reduce"].keys() == {16, 32}
        count, latencies, algorithm, bus = raw["all_reduce"][16]
        assert count == len(latencies) == len(algorithm) == len(bus) == 1
        assert algorithm[0] == pytest.approx(16 * 8e-9 / (latencies[0] / 1e3))
        assert not log.prof_all and log.prof_ops == ["all_gather"]
        log.start_profiling_comms()
        assert log.prof_all
        comm.all_reduce(torch.ones(4))
        log.stop_profiling_comms()
        assert not log.prof_all
        comm.all_reduce(torch.ones(4))
        assert {n: one["count"] for n, one in log.get_operation_summary("all_reduce").items()} == {
            16: 2,
            32: 1,
        }
        assert log.get_operation_summary("barrier") is None
        assert comm.log_summary() is None
        assert "all_reduce" in capsys.readouterr().out
        told = log.log_all(print_log=False, return_dict=True)
        assert capsys.readouterr().out == ""
        assert {
            name: {n: one["count"] for n, one in of.items()} for name, of in told["summary"].items()
        } == {
            "all_reduce": {32: 1, 16: 2},
            "all_gather": {16: 1},
        }
        assert told["metadata"]["world_size"] == 1
        assert comm.log_summary(show_straggler=True, return_dict=True)["summary"].keys() == {
            "all_reduce",
            "all_gather",
        }
        comm.reset_log()
        assert not log.has_data() and comm.comms_logger.get_operation_names() == []
    finally:
        comm.configure(enabled=False, prof_all=True, prof_ops=())


def test_the_time_to_wait_comes_from_the_environment() -> None:
    assert env_timeout({}) == timedelta(minutes=30)
    assert env_timeout({"DEEPSPEED_TIMEOUT": "90"}) == timedelta(minutes=90)
    for wrong in ("0", "-1", "inf", "an hour"):
        with pytest.raises(CommunicationError, match="DEEPSPEED_TIMEOUT must be a number"):
            env_timeout({"DEEPSPEED_TIMEOUT": wrong})


# ---- the device ----------------------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_cpu_answers_every_question_about_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = get_accelerator()
    set_accelerator(device)
    with pytest.raises(UsageError, match="PrivateUse1"):
        set_accelerator(object())
    assert (device.device_count(), device.is_synchronized_device()) == (1, True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # programs expect local_rank == rank % device_count
    assert device.device_count() == 4
    assert device.Stream is device.Event is device.current_stream() is None
    with device.stream(None):
        device.range_push("here")
        device.range_pop()
    assert set(device.supported_dtypes()) == {torch.float32, torch.half, torch.bfloat16}
    assert 0 < device.available_memory() < device.total_memory()
    device.reset_peak_memory_stats()
    assert device.memory_stats() == {}
    tensor = torch.ones(2)
    assert device.pin_memory(tensor) is tensor
    assert device.is_pinned(tensor)
    assert device.on_accelerator(tensor)
    assert (device.export_envs(), device.visible_devices_envs()) == ([], [])
    environment = {"A": "1"}
    device.set_visible_devices_envs(environment, [0, 1])
    assert environment == {"A": "1"}
    state = device.get_rng_state()
    drawn = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    device.manual_seed_all(3)
    assert device.initial_seed() == torch.initial_seed() == 3
    assert device.default_generator(0) is torch.default_generator
    assert device.default_stream() is None
    assert device.use_host_timers() and device.resolves_data_dependency()
    assert device.is_fp64_supported() and not device.is_triton_supported()
    assert device.memory_reserved() > 0 and device.max_memory_cached() > 0
    assert device.pin_memory(tensor, make_copy=False, match_shape=False) is tensor
    makers = (device.FloatTensor, device.HalfTensor, device.BFloat16Tensor, device.DoubleTensor)
    assert [maker([1.0]).dtype for maker in makers] == [
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64)
    ]
    makers = (device.IntTensor, device.LongTensor, device.ByteTensor)
    assert [maker([1]).dtype for maker in makers] == [torch.int32, torch.int64, torch.uint8]
    called: list[int] = []
    device.lazy_call(lambda: called.append(1))
    assert called == [1]


# A torch that is made for another device is not here: torch's own questions are answered in its
# place, and what is shown is which names and backend follow, not that such a device computes.
_FAKED = """
import sys, types, torch, torch.distributed as dist
kind, vendor = sys.argv[1:]
if kind == "npu":
    torch.utils.rename_privateuse1_backend("npu")
    module = types.SimpleNamespace(is_bf16_supported=lambda: False, default_stream=lambda d: str(d))
    dist.Backend.register_backend("hccl", lambda *_: None, devices=["npu"])
    torch.get_device_module = lambda device: module
found = torch.accelerator
found.is_available = lambda: True
found.current_accelerator = lambda: torch.device(kind)
found.current_device_index = lambda: 1
found.device_count = lambda: 4
chosen = []
found.set_device_index = chosen.append
import hadal
from hadal.compat.accelerator import get_accelerator
from hadal.device import collective_backend, rank_device
device = get_accelerator()
rank_device(6)
print(
    device.device_name(), device.device_name(3), device.current_device_name(), chosen,
    collective_backend(), device.communication_backend_name(), device.visible_devices_envs(),
    device.is_synchronized_device(), device.use_host_timers(), device.device_count(), sep="|",
)
if kind == "npu":
    print(device.is_bf16_supported(), device.default_stream(0), device.Stream, sep="|")
"""


@pytest.mark.fast_cells("npu-hccl-ASCEND_RT_VISIBLE_DEVICES")
@pytest.mark.parametrize(
    ("kind", "backend", "variable"),
    [("xpu", "xccl", "ZE_AFFINITY_MASK"), ("npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES")],
)
def test_other_devices_are_asked_by_torchs_names(kind: str, backend: str, variable: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": kind}
    done = forks.run(["-c", _FAKED, kind, backend], env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.split("|") == [
        *(kind, f"{kind}:3", f"{kind}:1", "[2]", f"cpu:gloo,{kind}:{backend}", backend),
        *(f"['{variable}']", "False", "False", "4"),
    ]
    assert rest == ([] if kind == "xpu" else ["False|npu:0|None"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
def test_an_accelerator_answers_every_question_about_a_device() -> None:
    device = get_accelerator()
    assert device.device_count() >= 1
    assert device.on_accelerator(torch.ones(2, device=device.current_device_name()))
    with device.stream(device.Stream()):
        device.range_push("here")
        torch.ones(2, device=device.device())
        device.range_pop()
    device.synchronize()
    assert device.current_stream() is not None
    assert 0 < device.available_memory() <= device.total_memory()
    assert device.memory_stats()
    assert device.is_pinned(device.pin_memory(torch.ones(2)))
    environment: dict[str, str] = {}
    device.set_visible_devices_envs(environment, [0, 1])
    assert list(environment.values()) == ["0,1"]
    state = device.get_rng_state()
    drawn = torch.rand(3, device=device.device())
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device.device()), drawn)


@pytest.mark.slow
def test_the_environment_may_choose_the_cpu_and_nothing_that_is_not_there() -> None:
    code = (
        "import hadal; hadal.install_as_deepspeed()\n"
        "from deepspeed.accelerator import get_accelerator\n"
        "print(get_accelerator().device_name()); hadal.init_distributed()\n"
        "import torch; print(torch.distributed.get_backend())"
    )
    told = {}
    for kind in ("cpu", "meta"):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": kind}
        done = forks.run(["-c", code], env=env, timeout=300)
        told[kind] = done.stdout.split() or done.stderr
    assert told["cpu"] == ["cpu", "gloo"]
    assert "the chosen device is 'meta'" in told["meta"]


def test_the_cpu_may_be_chosen_despite_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.accelerator
    monkeypatch.setattr(found, "is_available", lambda: True)
    monkeypatch.setattr(found, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(found, "current_device_index", lambda: 0)
    monkeypatch.setattr("hadal.device.accelerator._chosen", [])
    assert get_accelerator().current_device_name() == "meta:0"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert get_accelerator().current_device_name() == "cpu"
    assert get_accelerator().device_count() == 1
    assert get_accelerator().communication_backend_name() == "gloo"
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(UsageError, match="torch finds cpu and meta here"):
        init_distributed()


def test_builders_report_compatibility_and_build_nothing() -> None:
    builders = alias("deepspeed.ops.op_builder")
    assert COMPATIBLE_OPS is alias("deepspeed.ops").__compatible_ops__
    assert COMPATIBLE_OPS[builders.AsyncIOBuilder.NAME] is builders.AsyncIOBuilder().is_compatible()
    assert builders.CPUAdamBuilder().is_compatible()
    assert get_accelerator().create_op_builder("FusedAdamBuilder").NAME == "fused_adam"
    assert get_accelerator().get_op_builder("NoSuchBuilder") is None
    assert get_accelerator().create_op_builder("NoSuchBuilder") is None
    with pytest.raises(NotBuiltYetError, match=r"CPUAdamBuilder\(\)\.load\(\)"):
        builders.CPUAdamBuilder().load()


def test_builders_answer_what_programs_ask_when_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = alias("deepspeed.ops.op_builder.builder")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert not builder.OpBuilder.is_rocm_pytorch()
    assert not builder.CUDAOpBuilder.is_sycl_enabled()
    assert builder.OpBuilder.installed_rocm_version() == (0, 0)
    for question in (builder.installed_cuda_version, builder.assert_no_cuda_mismatch):
        with pytest.raises(builder.MissingCUDAException, match="not built for CUDA"):
            question("an operator")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert builder.installed_cuda_version() == (12, 8)
    assert builder.assert_no_cuda_mismatch() is True
    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242")
    assert builder.OpBuilder.is_rocm_pytorch()
    assert builder.OpBuilder.installed_rocm_version() == (6, 4)
    assert (builder.TORCH_MAJOR, builder.TORCH_MINOR) >= (2, 11)
    for name in ("deepspeed.ops.op_builder", "deepspeed.ops.op_builder.builder"):
        assert alias(name).get_default_compute_capabilities() == "6.0;6.1;7.0"
    with pytest.raises(alias("deepspeed.utils.exceptions").DeprecatedException):
        raise NotBuiltYetError("a name of the surface")


def test_a_program_shows_the_report_with_arguments_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--num-layers", "2"])
    assert alias("deepspeed.env_report").main(hide_operator_status=True) is None
    assert f"torch{' ' * 4}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        alias("deepspeed.env_report").cli_main()


# ---- loss scales and kinds of optimizers ---------------------------------------------------------


def test_a_loss_scaler_moves_as_the_engine_s() -> None:
    scaler = DynamicLossScaler(init_scale=8, scale_window=2, delayed_shift=1, min_scale=2)
    scales = []
    for overflow in (True, False, False, False, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [4.0, 4.0, 4.0, 8.0, 4.0, 2.0]
    assert (scaler.scale_window, scaler.min_scale, scaler.delayed_shift) == (2, 2, 1)
    assert scaler.scale_factor == 2 and scaler.raise_error_at_min_scale and scaler.dynamic
    assert not hasattr(scaler, "nope")
    with pytest.raises(LossScaleError, match="floor"):
        scaler.update_scale(True)
    weight = nn.Parameter(torch.ones(2))
    scaler.backward(weight.sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]
    assert not scaler.has_overflow([weight])
    weight.grad[0] = torch.inf
    assert scaler.has_overflow([weight, nn.Parameter(torch.ones(1))])
    fixed = LossScaler(4)
    fixed.update_scale(True)
    assert (fixed.cur_scale, fixed.dynamic, fixed.has_overflow([weight])) == (4.0, False, False)
    assert fixed.scale_gradient(None, (torch.ones(1),), None)[0].item() == 4.0
    with pytest.raises(UsageError, match="scale_factor=3"):
        DynamicLossScaler(scale_factor=3)


@pytest.mark.parametrize(
    ("stage", "changes", "kind"),
    [
        (0, {}, None),
        (0, {"bf16": {"enabled": True}}, kinds.FP16_Optimizer),
        (
            0,
            {"fp16": {"enabled": True}, "optimizer": {"type": "Lamb"}},
            kinds.FP16_UnfusedOptimizer,
        ),
        (1, {}, kinds.DeepSpeedZeroOptimizer),
        (2, {}, kinds.DeepSpeedZeroOptimizer),
        (3, {}, kinds.DeepSpeedZeroOptimizer_Stage3),
    ],
)
def test_an_optimizer_is_of_the_class_that_programs_expect(
    stage: int, changes: Any, kind: Any
) -> None:
    optimizer = initialize(model=model_of(), config=config_of(stage, **changes))[1]
    known = (
        kinds.FP16_Optimizer,
        kinds.FP16_UnfusedOptimizer,
        kinds.DeepSpeedZeroOptimizer,
        kinds.DeepSpeedZeroOptimizer_Stage3,
    )
    assert [each for each in known if isinstance(optimizer, each)] == ([kind] if kind else [])
    assert not isinstance(torch.optim.SGD([torch.ones(1)]), known)
    with pytest.raises(UsageError, match="FP16_Optimizer cannot be created by programs"):
        kinds.FP16_Optimizer(None)


# ---- configurations ------------------------------------------------------------------------------


class _Mpu:
    def get_data_parallel_world_size(self) -> int:
        return 4


def test_a_configuration_can_be_read_before_there_is_an_engine() -> None:
    told = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "sparse_attention": {"mode": "fixed", "block": 32},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    }
    config = DeepSpeedConfig(told, mpu=_Mpu())
    assert config.train_micro_batch_size_per_gpu == 1
    assert config.sparse_attention["mode"] == "fixed"
    assert config.sparse_attention["block"] == 32
    assert (config.zero_enabled, config.zero_optimization_stage) == (True, 2)
    assert config.zero_config.stage == 2
    assert (config.optimizer_name, config.optimizer_params["lr"]) == ("adam", 0.5)
    assert config.fp16_enabled is False
    assert config._param_dict == told
    assert (config.pld_enabled, config.mics_shard_size, config.amp_enabled) == (False, -1, False)
    assert config.torch_autocast_enabled is False and config.sparse_gradients_enabled is False
    assert config.tensor_parallel_config.autotp_size == 0
    assert config.param_dtype is config.buffer_dtype is None
    assert config.data_efficiency_config["enabled"] is config.data_efficiency_enabled is False
    assert DeepSpeedConfig({"train_batch_size": 1}).sparse_attention is None
    assert DeepSpeedConfig({"train_batch_size": 1}).optimizer_name is None
    with pytest.raises(AttributeError, match="no key 'no_such_thing'"):
        config.no_such_thing  # noqa: B018
    with pytest.raises(alias("deepspeed").DeepSpeedConfigError, match="train_batch_sise"):
        DeepSpeedConfig({"train_batch_sise": 8})
    assert issubclass(alias("deepspeed.runtime.config").DeepSpeedConfigError, ConfigError)
    assert get_gradient_clipping({}) == 1.0
    assert get_gradient_clipping({"gradient_clipping": 0.5}) == 0.5
    assert (get_log_level({}), get_log_level({"log_level": "info"})) == (None, "info")


# ---- leaf modules, weights that are whole --------------------------------------------------------


def test_leaf_modules_are_marked_by_name_and_by_name_suffix() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert set_z3_leaf_modules_by_name(model, ["1", "9"]) == ([model[1]], ["9"])
    assert get_z3_leaf_modules(model) == [model[1]]
    assert z3_leaf_module(model[1])
    assert model[1]._z3_leaf
    assert get_z3_leaf_modules(copy.deepcopy(model)) != []
    set_z3_leaf_modules_by_name(model, ["1"], flag=False)
    assert not z3_leaf_module(model[1])
    assert not model[1]._z3_leaf
    assert set_z3_leaf_modules_by_suffix(model, [".1", "x"]) == ([model[1][1]], ["x"])
    with pytest.raises(ValueError, match="'nine'"):
        set_z3_leaf_modules_by_name(model, ["nine"])
    assert set_z3_leaf_modules_by_name(model, ["nine"], raise_if_not_found=False) == ([], ["nine"])


def test_leaf_modules_of_the_configuration_are_marked() -> None:
    config = config_of(3)
    config["zero_optimization"]["leaf_module"] = {"names": ["0"]}
    engine = initialize(model=model_of(), config=config)[0]
    assert get_z3_leaf_modules(engine.module) == [engine.module[0]]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_embeddings_with_sparse_gradients_are_named(is_sparse: bool) -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
    config = {**config_of(0), "sparse_gradients": is_sparse}
    engine = initialize(model=model, config=config)[0]
    assert engine.sparse_tensor_module_names == ({"0.weight"} if is_sparse else set())


def test_weights_are_whole_while_a_model_generates() -> None:
    engine = initialize(model=model_of(), config=config_of(3))[0]
    with unwrap_model_for_generation(engine.module) as model:
        assert model is engine.module
        assert all(bool(p.isfinite().all()) for p in model.parameters())


# ---- files ---------------------------------------------------------------------------------------


def test_files_of_deepspeed_are_found(tmp_path: Path) -> None:
    for rank in (1, 0):
        (tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        get_optim_files(tmp_path)
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    assert [Path(path).name[:19] for path in get_optim_files(tmp_path)] == [
        "bf16_zero_pp_rank_0",
        "bf16_zero_pp_rank_1",
    ]
    assert get_model_state_file(tmp_path, 2) == str(tmp_path / "mp_rank_00_model_states.pt")
    assert get_model_state_files(tmp_path) == [str(tmp_path / "mp_rank_00_model_states.pt")]
    with pytest.raises(CheckpointError, match="is not a directory"):
        get_optim_files(tmp_path / "nowhere")
    for found in tmp_path.glob("*optim*"):
        found.unlink()
    with pytest.raises(CheckpointError, match="of stage 0"):
        get_optim_files(tmp_path)


def test_model_states_of_deepspeed_are_parsed(tmp_path: Path) -> None:
    parse = alias("deepspeed.utils.zero_to_fp32").parse_model_states
    shapes = [{"weight": torch.Size([2, 2])}]
    state = {
        "module": {"weight": torch.ones(0), "mean": torch.ones(2).half()},
        "buffer_names": ["mean"],
        "param_shapes": shapes,
        "shared_params": {"tied": "weight"},
        "ds_version": "0.19.8",
    }
    torch.save(state, tmp_path / "states.pt")
    (found,) = parse([tmp_path / "states.pt"])
    assert found.buffers["mean"].dtype == torch.float32 and found.param_shapes == shapes
    assert (found.shared_params, found.ds_version) == ([["tied", "weight"]], "0.19.8")
    torch.save({"module": {}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="param_shapes"):
        parse([tmp_path / "other.pt"])


def test_an_engine_s_states_are_on_a_device() -> None:
    where = alias("deepspeed.runtime.zero.offload_states").get_state_devices
    kinds = alias("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
    engine, *_ = initialize(model=model_of(), config=config_of(3))
    assert where(engine, kinds.lp_params) == {torch.device("cpu")}
    engine.optimizer.offload_states(include=[kinds.lp_params])
    assert where(engine, kinds.lp_params) == {torch.device("cpu")}
    engine.reload_states()
    engine.destroy()


def test_checkpoints_of_hadal_become_files_that_record_their_reads(
    tmp_path: Path,
) -> None:
    engine = initialize(model=model_of(), config=config_of(2))[0]
    engine.save_checkpoint(str(tmp_path), tag="one", client_state={"epoch": 4})
    (path,) = get_optim_files(tmp_path / "one")
    optimizer = torch.load(path, weights_only=False)
    assert optimizer == {"optimizer_state_dict": {"zero_stage": 2}}
    model = torch.load(get_model_state_file(tmp_path / "one", 2), weights_only=False)
    assert (model["epoch"], model["global_steps"], model["dp_world_size"]) == (4, 0, 1)
    (alone,) = get_model_state_files(tmp_path / "one")
    assert torch.load(alone, weights_only=False)["epoch"] == 4


# ---- tools ---------------------------------------------------------------------------------------


def test_gradients_of_an_engine_are_not_clipped_for_nothing() -> None:
    engine = initialize(model=model_of(), config=config_of(1))[0]
    with pytest.raises(UsageError, match=r'write "gradient_clipping": 1\.0 in the conf'):
        clip_grad_norm_(engine.parameters(), 1.0)
    own = nn.Parameter(torch.ones(4))
    own.grad = torch.full((4,), 3.0)
    assert clip_grad_norm_(own, 3.0).item() == 6.0
    assert own.grad.norm().item() == pytest.approx(3.0, abs=1e-4)


def _clip_parts(norm_type: float) -> tuple[float, list[float]]:
    """A gradient of 3 on all ranks, and one of 1 or 2 on each that holds a part."""
    part = megatron().get_model_parallel_rank()
    whole, cut = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    cut.tensor_model_parallel = True  # type: ignore[attr-defined]
    whole.grad, cut.grad = torch.tensor([3.0]), torch.tensor([1.0 + part])
    norm = clip_grad_norm_([whole, cut], 0.5, norm_type, mpu=megatron())
    return norm.item(), [whole.grad.item(), cut.grad.item()]


@pytest.mark.parametrize(("norm_type", "wanted"), [(2, 14**0.5), (1, 6.0), (torch.inf, 3.0)])
def test_gradients_are_clipped_by_the_norm_of_all_parts(
    norm_type: float, wanted: float, ranks: RankPools
) -> None:
    for part, (norm, clipped) in enumerate(ranks(2).run(_clip_parts, norm_type)):
        assert norm == pytest.approx(wanted)
        assert clipped == pytest.approx([3.0 * 0.5 / wanted, (1 + part) * 0.5 / wanted], rel=1e-4)


def _clip_an_expert() -> tuple[float, float]:
    initialize(model=model_of(), config=config_of(1))  # its groups are those that count
    shared, expert = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    shared.grad, expert.grad = torch.tensor([1.0]), torch.tensor([1.0 + hadal.comm.get_rank()])
    return clip_grad_norm_([shared, expert], 0.1).item(), shared.grad.item()


def test_ranks_clip_alike_although_experts_have_norms_of_their_own(ranks: RankPools) -> None:
    mean = (2**0.5 + 5**0.5) / 2
    for norm, clipped in ranks(2).run(_clip_an_expert):
        assert (norm, clipped) == (pytest.approx(mean), pytest.approx(0.1 / mean))


def test_clocks_add_up_and_tell_means(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("hadal.engine.clocks.time.perf_counter", lambda: next(now))
    timers = SynchronizedWallClockTimer()
    assert type(timers("one")) is timers.Timer
    timers("step").start()
    timers("step").stop(record=True)
    timers("step").start()
    timers("step").stop(record=True)
    assert timers("step").elapsed(reset=False) == 2000.0
    timers("step").start()
    assert timers("step").elapsed() == 3000.0
    assert timers("step").started_
    timers("step").stop(reset=True)
    assert timers("step").elapsed() == 1000.0
    assert timers.has_timer("step")
    assert not timers.has_timer("other")
    timers.log(["step", "other"])
    assert timers.get_mean(["step", "other"], normalizer=2.0) == {"step": 500.0}
    assert timers("step").mean() == 0.0
    assert trim_mean([9.0, 1.0, 2.0, 3.0, -9.0], 0.2) == 2.0


class _Conv1D(nn.Module):
    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(into, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def test_tools_match_their_names() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sequential(_Conv1D(3, 2)))
    x = torch.randn(4, 2)
    before = model(x)
    assert isinstance(convert_conv1d_to_linear(model, _Conv1D)[1][0], nn.Linear)
    torch.testing.assert_close(model(x), before)
    recursive_setattr(model, "1.0", nn.Identity())
    recursive_setattr(model, "0", nn.ReLU())
    assert isinstance(recursive_getattr(model, "1.0"), nn.Identity)
    assert isinstance(model[0], nn.ReLU)
    assert required_torch_version(min_version=2.11)
    assert not required_torch_version(min_version="99.0")
    assert not required_torch_version(max_version=2.1)
    assert call_to_str("f", 1, x="a") == "f(1, x='a')"
    assert parse_range_list("0-2, 4") == [0, 1, 2, 4]
    for wrong in ("2-1", "1,0-2", "4,0-2", "0,2-6,5-9", "a"):
        with pytest.raises(ValueError, match=r"ascending|invalid literal"):
            parse_range_list(wrong)
    assert instrument_w_nvtx(lambda a: a + 1)(2) == 3
    logger = logging.getLogger("hadal.of this test")
    set_log_level_from_string("error", logger)
    assert logger.level == logging.ERROR
    with pytest.raises(ValueError, match="LOUD"):
        set_log_level_from_string("loud", logger)
    part = nn.Parameter(torch.ones(1))
    part.model_parallel = True  # type: ignore[attr-defined]
    assert is_model_part(part)
    init_distributed()


def test_an_accelerator_s_class_is_the_device_s() -> None:
    kind = alias("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator
    other = alias("deepspeed.accelerator.npu_accelerator").NPU_Accelerator
    present = get_accelerator()
    assert isinstance(present, kind) == (present.device_name() == "cpu")
    assert not isinstance(present, other) and not isinstance(3, kind)
    assert isinstance(present, alias("deepspeed.accelerator").DeepSpeedAccelerator)
    if isinstance(present, kind):
        assert kind() is present
    with pytest.raises(UsageError, match="get_accelerator"):
        other()


def test_linear_functions_of_stage_3_are_torch_s() -> None:
    linear = alias("deepspeed.runtime.zero.linear")
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3)
    expected = nn.functional.linear(x, weight)
    assert torch.equal(linear.LinearFunctionForZeroStage3.apply(x, weight), expected)
    assert torch.equal(linear.zero3_linear_wrap(x, weight), expected)
    assert issubclass(linear.LinearModuleForZeroStage3, nn.Module)
    assert linear.autocast_custom_fwd.func is torch.amp.custom_fwd
    kinds = alias("deepspeed.utils.types")
    assert kinds.GATED_ACTIVATION_TYPES == [3, 4] and kinds.ActivationFuncType.GELU == 1


def checked_for_overflow(first: float) -> tuple[bool, bool, float]:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    rank = torch.distributed.get_rank()
    weight.grad = torch.tensor([1.0, first if rank == 0 else 1.0])
    names = alias("deepspeed.runtime.utils")
    checker = names.CheckOverflow([{"params": [weight]}])
    norm = names.get_weight_norm(weight)
    return checker.check(), checker.has_overflow_serial([weight]), norm


def test_gradients_that_are_not_finite_on_any_rank(ranks: RankPools) -> None:
    found = ranks(2).run(checked_for_overflow, float("inf"))
    assert found == [(True, True, 5.0), (True, False, 5.0)]
    assert ranks(2).run(checked_for_overflow, 2.0) == 2 * [(False, False, 5.0)]


def test_a_leaf_module_is_marked_and_sharded_weights_describe_themselves() -> None:
    model = nn.Sequential(nn.Linear(3, 5))
    DS = alias("deepspeed")
    DS.utils.set_z3_leaf_modules(model, [nn.Linear])
    assert model[0]._z3_leaf is True and not hasattr(model, "_z3_leaf")
    engine, *_ = initialize(model=model, config=config_of(3))
    weight: Any = engine.module[0].weight
    assert weight.aligned_size() - weight.padding_size() == weight.numel() == 15
    told = weight.ds_summary()
    assert (told["id"], told["shape"], told["numel"]) == (weight.ds_id, (5, 3), 15)
    weight.all_gather_coalesced([weight])
    weight.partition([weight])


def test_a_program_sets_attributes_of_a_parameter_of_its_own() -> None:
    engine, *_ = initialize(model=nn.Linear(3, 5), config=config_of(3))
    outside: Any = nn.Parameter(torch.ones(2))
    inside: Any = engine.module.weight
    number, others = inside.ds_id, engine.module.bias.ds_id
    for weight in (outside, inside):
        weight.ds_id, weight.ds_status, weight.param_idx_in_group = 70, "mine", 3
        weight.all_gather = lambda: "gathered"
        assert (weight.ds_id, weight.ds_status, weight.param_idx_in_group) == (70, "mine", 3)
        assert weight.all_gather() == "gathered"
        del weight.ds_id, weight.ds_status, weight.all_gather
    assert not hasattr(outside, "ds_id") and not hasattr(outside, "all_gather")
    assert (inside.ds_id, engine.module.bias.ds_id) == (number, others)
    saved: Any = torch.ones(2)
    saved.ds_status = "mine"
    assert saved.ds_status == "mine"
    torch.overrides._get_overridable_functions.cache_clear()
    torch.overrides.get_overridable_functions()  # before a compilation


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("init_inference", "hybrid_engine"),
        ("replace_transformer_layer", "engine.compile"),
        ("runtime.domino.transformer.DominoTransformer", "tp_overlap_comm"),
        ("compile.backend.launch_compile_passes", "stage3_prefetch_bucket_size"),
        ("module_inject.auto_ep.AutoEP", "expert_parallel"),
        ("checkpoint.ds_to_universal.merge_tp_slices", "hadal checkpoint"),
    ],
)
def test_names_that_are_not_built_say_what_to_use(name: str, instead: str) -> None:
    module, _, leaf = f"deepspeed.{name}".rpartition(".")
    with pytest.raises(NotImplementedError, match=instead):
        getattr(alias(module), leaf)()


def test_rows_of_a_sparse_gradient() -> None:
    kind = alias("deepspeed.runtime.sparse_tensor").SparseTensor
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1, 4, 1])).sum().backward()
    rows = kind(table.weight.grad)
    assert rows.indices.tolist() == [1, 4] and rows.sparse_size() == (2 + 4, 12)
    assert torch.equal(rows.to_dense(), table.weight.grad.to_dense())
    rows.add(kind(table.weight.grad))
    assert torch.equal(rows.to_dense(), 2 * table.weight.grad.to_dense())
    dense = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, -2.0]])
    assert kind(dense).indices.tolist() == [1, 2] and torch.equal(kind(dense).to_dense(), dense)


def test_an_engine_writes_its_checkpoints_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, *_ = initialize(model=model_of(), config=config_of(1))
    own = engine.checkpoint_engine
    engine.checkpoint_engine = own
    with pytest.raises(UsageError, match=r"checkpoint\.async_save"):
        engine.checkpoint_engine = object()
    monkeypatch.setattr(torch, "save", own.save)  # to catch what DeepSpeed would write
    with pytest.raises(UsageError, match=r"torch\.save was set to .*Torch"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    assert "exclude_frozen_parameters" in signature(engine.save_checkpoint).parameters
    names = alias("deepspeed.runtime.torch_autocast").get_default_autocast_lower_precision_modules()
    assert "torch.nn.modules.linear.Linear" in names


def test_a_key_at_any_depth() -> None:
    utils = alias("deepspeed.autotuning.utils")
    config = {"a": 1, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    assert [utils.get_val_by_key(config, key) for key in ("stage", "device", "x")] == [
        2,
        "cpu",
        None,
    ]
    utils.set_val_by_key(config, "device", "none")
    assert config["zero_optimization"] == {"stage": 2, "offload_param": {"device": "none"}}


def averaged(name: str) -> tuple[list[float], float]:
    backend = alias(f"deepspeed.runtime.comm.{name.lower()}")
    rank = torch.distributed.get_rank()
    mean = getattr(backend, f"{name}Backend")(None)
    values = torch.tensor([4.0, -4.0, 4.0]) * (rank + 1)
    errors = torch.zeros(4), torch.zeros(2)
    first = mean.compressed_allreduce(values.clone(), *errors, rank)
    total = first.clone()
    for _ in range(50):
        total += mean.compressed_allreduce(values.clone(), *errors, rank)
    return first.sign().tolist(), (total / 51 - torch.tensor([6.0, -6.0, 6.0])).abs().max().item()


@pytest.mark.parametrize("name", ["Compressed", "Nccl", "Mpi"])
def test_means_with_one_bit_lose_nothing_in_the_long_run(name: str, ranks: RankPools) -> None:
    for signs, error in ranks(2).run(averaged, name):
        assert signs == [1, -1, 1] and error < 0.5


def test_muon_s_update_is_that_of_its_step() -> None:
    from hadal.optim.muon import Muon

    weight, gradient = nn.Parameter(torch.randn(6, 4)), torch.randn(6, 4)
    momentum = torch.zeros(6, 4)
    update = alias("deepspeed.runtime.zero.muon.original_muon").muon_update
    expected = weight.detach() - 0.1 * update(gradient, momentum)
    weight.grad = gradient
    Muon([{"params": [weight], "use_muon": True}], lr=0.1, ns_method="gram").step()
    torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(momentum, gradient * 0.05)
    with pytest.raises(UsageError, match="ns_steps=3"):
        update(gradient, momentum, ns_steps=3)


def test_hooks_of_outputs_see_a_backward() -> None:
    utils = alias("deepspeed.runtime.utils")
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    outputs = {"a": used * 2, "b": [used * 3, torch.ones(1)]}
    seen = []
    utils.register_output_backward_hooks(
        outputs,
        lambda: seen.append(utils.count_used_parameters_in_backward([used, idle, used])),
        lambda gradient: gradient * 10,
    )
    (outputs["a"] + outputs["b"][0]).sum().backward()
    assert seen == [1] and used.grad is not None and used.grad.tolist() == [50, 50]
    with pytest.raises(UsageError, match="hook"):
        utils.count_used_parameters_in_backward([used])


def test_small_functions_of_private_names(caplog: pytest.LogCaptureFixture) -> None:
    primes = alias("deepspeed.runtime.pipe.topology")._prime_factors
    assert [primes(number) for number in (1, 12, 97)] == [[], [2, 2, 3], [97]]
    with pytest.raises(ValueError, match="positive"):
        primes(0)
    turn = alias("deepspeed.sequence.layer")._rotate_half
    assert turn(torch.arange(4.0)).tolist() == [-2, -3, 0, 1]
    assert alias("deepspeed.utils.groups")._get_expert_model_parallel_world_size() == 1
    pinned = alias("deepspeed.utils.pin_memory_tracker")
    pinned.track_pinned_memory(2048)
    logger = alias("deepspeed.utils.logging").logger
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger.name):
        pinned.pinned_memory_summary("here")
    logger.removeHandler(caplog.handler)
    assert "pinned memory here: " in caplog.text and pinned._fmt_bytes(2048) == "2 KiB"
    counter = pinned._tracker
    counter.reset()
    pinned.track_pinned_memory(40 * 2**30)
    pinned.track_pinned_memory(1)
    assert (counter._bytes, counter._calls, counter._next_checkpoint) == (
        40 * 2**30 + 1,
        2,
        64 * 2**30,
    )
    counter.reset()
    assert counter._bytes == counter._calls == 0
    made = alias("deepspeed.runtime.zero.partition_parameters")._orig_torch_empty(2, 1)
    assert made.shape == (2, 1)
    gathered = alias("deepspeed.runtime.zero.partition_parameters").get_allgather_dtype
    weight = nn.Parameter(torch.ones(1))
    assert gathered(weight, weight.detach().half()) == torch.float16
    assert not alias("deepspeed.runtime.torch_autocast").has_autocast_dtype(weight)


def scattered() -> list[list[float]]:
    names = alias("deepspeed.runtime.comm.coalesced_collectives")
    rank = torch.distributed.get_rank()
    tensors = [torch.arange(5.0) * (rank + 1), torch.full((2, 2), float(rank)), torch.ones(1)]
    return [part.tolist() for part in names.reduce_scatter_coalesced(tensors)]


def test_means_of_several_tensors_in_slices(ranks: RankPools) -> None:
    assert ranks(2).run(scattered) == [
        [[0.0, 1.5, 3.0], [0.5, 0.5], [1.0]],
        [[4.5, 6.0], [0.5, 0.5], []],
    ]


def test_versions_are_this_machine_s() -> None:
    told = alias("deepspeed.git_version_info")
    assert told.version == alias("deepspeed").__version__ == "0.19.8"
    assert told.torch_info["version"] == ".".join(torch.__version__.split(".")[:2])
    assert told.torch_info["cuda_version"] == (torch.version.cuda or "0.0")
    assert told.installed_ops == COMPATIBLE_OPS
    assert alias("deepspeed").HAS_TRITON is (importlib.util.find_spec("triton") is not None)


def reduced_in_four_bits() -> list[list[float]]:
    rank = torch.distributed.get_rank()
    names = alias("deepspeed.runtime.comm.coalesced_collectives")
    whole = torch.linspace(-1, 1, 16).view(4, 4) * (rank + 1)
    everybody = torch.distributed.new_group()
    alone = [torch.distributed.new_group([one]) for one in range(2)]
    is_one_host = get_accelerator().device_count() == 2
    far, near = ("local", "global") if is_one_host else ("global", "local")
    groups = {f"{far}_0": everybody, **{f"{near}_{one}": alone[one] for one in range(2)}}
    found = names.all_to_all_quant_reduce([whole, torch.arange(4.0), torch.ones(3, 1)], groups)
    return [each.tolist() for each in found]


def test_a_mean_in_four_bits_is_near_the_exact_one(ranks: RankPools) -> None:
    parts = ranks(2).run(reduced_in_four_bits)
    mean = torch.tensor(parts[0][0] + parts[1][0])
    torch.testing.assert_close(mean, torch.linspace(-1.5, 1.5, 16), atol=0.08, rtol=0)
    assert not torch.equal(mean, torch.linspace(-1.5, 1.5, 16))
    assert [parts[0][1], parts[1][1]] == [[0.0, 1.0], [2.0, 3.0]]
    assert [parts[0][2], parts[1][2]] == [[1.0, 1.0], [1.0]]


def reduced_rows() -> list[Any]:
    engine, *_ = initialize(model=model_of(), config=config_of(1))
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    dense = torch.zeros(4, 2)
    if rank:
        dense[[1, 3]] = torch.tensor([[2.0, 4.0], [6.0, 8.0]])
    sparse = dense.to_sparse(1)
    rows = alias("deepspeed.runtime.sparse_tensor").SparseTensor
    (mean,) = engine.sparse_allreduce_bucket([rows(sparse)], group)
    engine.sparse_allreduce_no_retain([rows(sparse)], group)
    parts = engine.sparse_all_gather(torch.full((rank, 2), 5.0), group)
    engine.destroy()
    return [mean.to_dense().tolist(), sparse.to_dense().tolist(), [len(each) for each in parts]]


def test_sparse_gradients_are_averaged_by_their_rows(ranks: RankPools) -> None:
    mean = [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]
    assert ranks(2).run(reduced_rows) == [[mean, mean, [0, 1]]] * 2


def test_parameters_in_a_dict_that_knows_its_module() -> None:
    names = alias("deepspeed.runtime.zero.parameter_offload")
    layer = nn.Linear(2, 2)
    own = layer._parameters
    names.ensure_zero_ordered_dict(layer)
    held = layer._parameters
    assert isinstance(held, names.ZeROOrderedDict) and layer._original_parameters is own
    assert held == own and held._parent_module is layer  # type: ignore[attr-defined]
    names.ensure_zero_ordered_dict(layer)
    assert layer._parameters is held
    twin = copy.deepcopy(layer)
    assert twin._parameters._parent_module is twin  # type: ignore[attr-defined]
    engine, *_ = initialize(model=nn.Sequential(layer), config=config_of(3))
    assert engine(torch.ones(1, 2)).shape == (1, 2)
    engine.destroy()


def test_several_gathers_are_waited_for() -> None:
    waited = []
    handle = SimpleNamespace(wait=lambda handle_dependency: waited.append(handle_dependency))
    kind = alias("deepspeed.runtime.zero.partition_parameters").MultipleAllGatherHandles
    kind([handle, handle]).wait(handle_dependency=False)
    assert waited == [False, False]
