"""The engine and the parameters as programs written for DeepSpeed look at them."""

from __future__ import annotations

import base64
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from engine.toys import (
    assert_equal,
    batch_of,
    config_of,
    engine_of as engine_of_hadal,
    loss_of,
    model_of,
    train,
)
from moe.test_blocks import model_of as transformer_of
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from hadal.comm import get_rank
from hadal.compat import accessors
from hadal.compat.checkpointing import checkpoint, configure, is_configured
from hadal.compat.engine import DeepSpeedEngine, initialize
from hadal.compat.optimizer import (
    DeepSpeedOptimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
)
from hadal.compat.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    OnebitAdam,
    OnebitLamb,
    ZeroOneAdam,
)
from hadal.compat.parameters import ZeroParamStatus
from hadal.compat.tools import clone_tensors_for_torch_save, move_to_device
from hadal.compat.zero import OnDevice, zero_wrapper_for_fp_tensor_constructor
from hadal.engine.engine import Engine
from hadal.errors import NotBuiltYetError, OptimizerError, UsageError
from hadal.optim import one_bit
from hadal.plugins.moe import MoE
from hadal.utils import safe_get_full_fp32_param
from hadal.zero import GatheredParameters, Init

ROOT = Path(__file__).parents[2]


def engine_of(stage: int, **changes: Any) -> DeepSpeedEngine:
    return initialize(model=model_of(), config=config_of(stage, **changes))[0]


# ---- the engine ----------------------------------------------------------------------------------


def test_initialize_returns_what_programs_expect() -> None:
    model, config = model_of(), config_of(2)
    engine, optimizer, loader, schedule = initialize(model=model, config_params=config)
    assert type(engine) is DeepSpeedEngine
    assert engine.module is model
    assert engine.config is config
    assert (loader, schedule) == (None, None)
    assert optimizer is engine.optimizer
    assert isinstance(optimizer, DeepSpeedOptimizer)
    inner = optimizer.optimizer
    assert isinstance(inner, torch.optim.AdamW)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert not hasattr(optimizer, "consolidate_state_dict")
    engine._is_accelerate_prepared = optimizer._is_accelerate_prepared = True


def test_getters_return_the_configuration() -> None:
    engine = engine_of(2, gradient_clipping=0.5, bf16={"enabled": True})
    assert engine.zero_optimization_stage() == 2
    assert engine.zero_optimization()
    assert engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights()
    assert engine.bfloat16_enabled()
    assert not engine.fp16_enabled()
    assert engine.gradient_clipping() == 0.5
    assert engine.optimizer_name() == "adamw"
    assert engine.scheduler_name() is None
    assert (engine.local_rank, engine.global_rank, engine.world_size) == (0, 0, 1)
    assert engine.data_parallel_group.size() == 1


def test_the_configuration_of_a_file_is_a_dict_to_programs(tmp_path: Path) -> None:
    config, path = config_of(1), tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    text = base64.urlsafe_b64encode(path.read_bytes()).decode()
    given: list[dict[str, Any]] = [
        {"config": str(path)},
        {"config_params": path},
        {"config": text},
        {"args": SimpleNamespace(deepspeed_config=str(path))},
    ]
    for one in given:
        engine = initialize(model=model_of(), **one)[0]
        assert engine.config == config
        assert engine._config.zero_config.stage == 1
        assert engine._config.optimizer_name == "adamw"
        engine.destroy()


@pytest.mark.parametrize(("said", "expected"), [({}, 1.0), ({"early_rounding": False}, 1 + 2**-10)])
def test_masters_start_from_rounded_weights(said: dict[str, bool], expected: float) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1 + 2**-10)
    config = config_of(2, bf16={"enabled": True}, data_types=said)
    engine = initialize(model=model, config=config)[0]
    assert engine.config == config
    master = safe_get_full_fp32_param(model.weight)
    assert master is not None
    assert master.unique().tolist() == [expected]


def test_the_engine_has_every_member_that_programs_use() -> None:
    names = (ROOT / "tests/data/deepspeed_names.txt").read_text().split()
    engine, before = engine_of(2), "deepspeed.DeepSpeedEngine."
    members = [name.removeprefix(before) for name in names if name.startswith(before)]
    assert len(members) > 40
    set_by_programs = {"_is_accelerate_prepared"}
    assert {name for name in members if not hasattr(engine, name)} == set_by_programs


def test_accessors_tell_the_configuration() -> None:
    config = config_of(
        3,
        communication_data_type="fp32",
        prescale_gradients=False,
        checkpoint={"tag_validation": "Fail"},
        gradient_accumulation_steps=2,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    )
    config["zero_optimization"] |= {"stage3_max_reuse_distance": 7, "reduce_bucket_size": 99}
    engine: Any = initialize(model=model_of(), config=config)[0]
    assert engine.zero_max_reuse_distance() == 7
    assert engine.zero_reduce_bucket_size() == 99
    assert engine.zero_overlap_comm() is True
    assert engine.zero_offload_param() is None
    assert engine.communication_data_type is torch.float32
    assert engine.postscale_gradients()
    assert engine.checkpoint_tag_validation_fail()
    assert engine.checkpoint_tag_validation_enabled()
    assert not engine.checkpoint_writer_enabled()
    assert not engine.use_node_local_storage()
    assert engine.optimizer_params()["lr"] == 0.01
    assert engine.scheduler_params()["warmup_num_steps"] == 5
    assert engine.aio_config()["queue_depth"] > 0
    assert engine.get_batch_info() == (6, 3, 2)
    assert engine.get_data_parallel_rank() == engine.get_tensor_parallel_rank() == 0
    assert (engine.torch_autocast_enabled(), engine.torch_autocast_dtype()) == (False, None)
    assert engine.curriculum_learning_enabled() is False
    assert engine.steps_per_print() == float("inf")
    assert not engine.zero_use_cpu_optimizer()
    assert (engine.has_moe_layers, engine.num_experts, engine.dist_backend) == (False, [], "gloo")
    assert not engine.zero_cpu_offload()
    assert not engine.dynamic_loss_scale()
    assert engine.initial_dynamic_scale() == 1.0
    assert engine.scale(torch.ones((), requires_grad=True)).item() == 1.0
    engine.empty_partition_cache()
    assert engine.is_map_style_dataset([1])
    assert not engine.is_iterable_style_dataset([1])
    with pytest.raises(NotImplementedError, match=r"print_forward_breakdown is not"):
        engine.print_forward_breakdown()


def test_the_engine_counts_the_experts_of_each_layer() -> None:
    expert = nn.Linear(4, 4)
    layers = [MoE(4, expert, num_experts=2), nn.Linear(4, 4), MoE(4, expert, num_experts=3, k=2)]
    engine = initialize(model=nn.Sequential(*layers), config=config_of(2))[0]
    assert engine.has_moe_layers is True
    assert engine.num_experts == [2, 3]


def experts_of_a_cut_model() -> tuple[bool, list[int], int]:
    model = transformer_of("mixtral")
    config = config_of(1, expert_parallel={"enabled": True, "autoep_size": 2})
    engine = initialize(model=model, config=config)[0]
    own = [len(p) for n, p in model.named_parameters() if n.endswith("experts.down_proj")]
    return engine.has_moe_layers, engine.num_experts, own[0]


@pytest.mark.runs("transformers")
def test_experts_on_other_ranks_are_counted(ranks: RankPools) -> None:
    assert ranks(2).run(experts_of_a_cut_model) == [(True, [4, 4], 2)] * 2


def test_an_applied_step_is_distinguished_from_a_micro_step_and_a_skipped_one() -> None:
    engine = engine_of(2, gradient_accumulation_steps=2)
    assert not engine.was_step_applied()
    seen = []
    for number in range(4):
        train(engine, range(number, number + 1))
        seen.append(engine.was_step_applied())
    assert seen == [False, True, False, True]
    skipping: Any = engine_of(1)
    train(skipping, range(1))
    assert skipping.was_step_applied()
    skipping.optimizer.skip_step = True
    train(skipping, range(1))
    assert (skipping.skipped_steps, skipping.was_step_applied()) == (1, False)


def test_the_gradient_norm_is_a_number_that_may_be_asked_as_a_tensor() -> None:
    engine, alone = engine_of(2), engine_of_hadal(2)
    assert engine.get_global_grad_norm() is None
    for each in (engine, alone):
        train(each, range(1))
    norm = engine.get_global_grad_norm()
    assert norm is not None
    assert isinstance(norm, float)
    assert norm == norm.item() == alone.get_global_grad_norm()
    assert type(norm.item()) is float
    assert json.loads(json.dumps({"grad_norm": norm})) == {"grad_norm": norm.item()}


def test_clocks_and_rates_are_the_programs_to_read() -> None:
    engine: Any = engine_of(1, wall_clock_breakdown=True)
    quiet = engine_of(1)
    assert engine.tput_timer.avg_samples_per_sec() == -1.0
    for each in (engine, quiet):
        train(each, range(4))
    assert engine.tput_timer.global_step_count == 4
    assert engine.tput_timer.batch_size == engine.train_batch_size()
    counted = 2 * engine.train_batch_size()
    rate = engine.tput_timer.avg_samples_per_sec()
    assert rate * engine.tput_timer.total_elapsed_time == pytest.approx(counted)
    phases = {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"}
    assert engine.timers.get_timers().keys() == phases
    assert engine.timers("fwd").mean() > 0
    assert engine.timers("bwd").elapsed() >= engine.timers("bwd_inner").elapsed() > 0
    assert engine.timers("bwd").elapsed() == 0
    assert quiet.timers.get_timers() == {}
    quiet.timers("mine").start()
    assert quiet.timers("mine").elapsed() > 0
    assert not engine.monitor.enabled
    engine.monitor.write_events([("loss", 1.0, 4)])


@pytest.mark.parametrize("stage", [0, 3])
def test_names_of_the_engine_s_state_begin_as_those_of_its_parameters(stage: int) -> None:
    engine = engine_of(stage)
    own = list(model_of().state_dict())
    state = engine.state_dict()
    assert list(state) == [f"module.{name}" for name in own]
    assert [name for name, _ in engine.named_parameters()] == list(state)
    assert list(engine.module_state_dict()) == own
    into: dict[str, Any] = {"kept": 1}
    assert engine.state_dict(into, "a.") is into
    assert list(into) == ["kept", *(f"a.module.{name}" for name in own)]
    train(engine, range(1))
    changed = {name.removeprefix("module."): each + 1 for name, each in state.items()}
    assert not engine.load_state_dict(changed).missing_keys
    assert_equal(engine.state_dict(), {f"module.{name}": each for name, each in changed.items()})
    assert not engine.load_state_dict(state).unexpected_keys
    assert_equal(engine.state_dict(), state)
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_state_dict({"module.other": torch.ones(1)})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_weights_alone_are_loaded_into_an_engine(stage: int) -> None:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, fresh = engine_of(stage, **sgd), initialize(model=model_of(8), config=config_of(0))[0]
    wanted = {name: value.clone() for name, value in fresh.module_state_dict().items()}
    again = initialize(model=model_of(8), config=config_of(stage, **sgd))[0]
    train(engine, range(2))
    assert engine.load_module_state_dict({"module": wanted}, fetch_z3_params=True) is None
    assert_equal(engine.module_state_dict(), wanted)
    for each in (engine, again):
        train(each, range(1))
    assert_equal(engine.state_dict(), again.state_dict())  # the masters were loaded, too
    engine.load_module_state_dict({f"module.{name}": value for name, value in wanted.items()})
    assert_equal(engine.module_state_dict(), wanted)
    part = {"0.bias": torch.ones(9)}
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_module_state_dict(part)
    engine.load_module_state_dict(part, strict=False)

    def halved(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: value / 2 for name, value in src.items()})

    assert_equal(engine.module_state_dict(), {**wanted, **part})
    engine.load_module_state_dict(wanted, custom_load_fn=halved)
    assert_equal(engine.module_state_dict(), {name: each / 2 for name, each in wanted.items()})
    for each in (engine, fresh, again):
        each.destroy()


def test_a_module_within_the_model_may_be_called_module() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    engine = initialize(model=Wrapper(), config=config_of(1))[0]
    state = engine.state_dict()
    assert list(state) == ["module.module.weight", "module.module.bias"]
    engine.load_state_dict({name: each + 1 for name, each in state.items()})
    engine.load_state_dict({name: each + 1 for name, each in engine.module_state_dict().items()})
    assert_equal(engine.state_dict(), {name: each + 1 + 1 for name, each in state.items()})


def test_a_16_bit_model_is_one_file_that_torch_reads(tmp_path: Path) -> None:
    engine = engine_of(1, bf16={"enabled": True})
    assert inspect.signature(engine.save_16bit_model).parameters["save_filename"].default == (
        "pytorch_model.bin"
    )
    assert engine.save_16bit_model(tmp_path / "one")
    assert engine.save_fp16_model(tmp_path / "two")
    for folder in ("one", "two"):
        assert [path.name for path in (tmp_path / folder).iterdir()] == ["pytorch_model.bin"]
        weights = torch.load(tmp_path / folder / "pytorch_model.bin")
        model_of().load_state_dict(weights)
        assert {each.dtype for each in weights.values()} == {torch.bfloat16}


@pytest.mark.filterwarnings("error")
def test_torch_s_schedules_hang_on_the_optimizer_where_nothing_is_cut() -> None:
    engine, optimizer, _, _ = initialize(model=model_of(), config=config_of(0, gradient_clipping=0))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, DeepSpeedOptimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    plain = model_of()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    beside = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.5)
    for number in range(3):
        train(engine, range(number, number + 1))
        schedule.step()
        inputs, targets = batch_of(number)
        loss_of(plain(inputs), targets).backward()
        reference.step()
        reference.zero_grad()
        beside.step()
    assert engine.get_lr() == schedule.get_last_lr() == beside.get_last_lr()
    torch.testing.assert_close(engine.module_state_dict(), dict(plain.state_dict()))
    again = {key: optimizer.state_dict()[key] for key in ("state", "param_groups")}
    optimizer.load_state_dict(again)
    assert repr(optimizer) == repr(optimizer.optimizer)
    for changes in ({"stage": 1}, {"stage": 0, "bf16": {"enabled": True}}):
        assert not isinstance(engine_of(**changes).optimizer, torch.optim.Optimizer)  # type: ignore[arg-type]


def test_accessors_shadow_no_attribute_and_resolve() -> None:
    engine: Any = engine_of(2, fp16={"enabled": True}, torch_autocast={"enabled": False})
    named = {*accessors.PATHS, *accessors._UNBUILT}
    own = set(vars(accessors.Accessors)) - {"__module__", "__doc__"}
    assert named < own
    assert not own & {name for name in dir(Engine) if not name.startswith("__")}
    sections = engine._parts.config.as_dict()
    for name, path in accessors.PATHS.items():
        getattr(engine, name)()
        scope: Any = sections
        for part in path.split("."):
            if scope is None:
                break
            assert part in scope, name
            scope = scope[part]


def test_unbuilt_names_say_so_and_unknown_names_are_missing() -> None:
    engine = engine_of(3)
    for name in accessors._UNBUILT:
        with pytest.raises(NotImplementedError, match=rf"DeepSpeedEngine\.{name} is not built yet"):
            getattr(DeepSpeedEngine, name)(engine)
    with pytest.raises(AttributeError):
        engine.no_such_thing  # noqa: B018
    assert not hasattr(engine, "hf_device_map")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_may_be_given_to_a_second_engine(stage: int) -> None:
    model, other = model_of(), engine_of(stage)
    first = initialize(model=model, config=config_of(stage))[0]
    train(first, range(1))
    weights = {name: value.clone() for name, value in first.state_dict().items()}
    second = initialize(model=model, config=config_of(stage))[0]
    assert_equal(second.state_dict(), weights)
    train(second, range(1))
    train(other, range(1))
    with pytest.raises(UsageError, match="destroyed"):
        first(batch_of(0)[0])


def test_backward_returns_the_divided_loss() -> None:
    engine = engine_of(1, gradient_accumulation_steps=4)
    loss = loss_of(engine(batch_of(0)[0]), batch_of(0)[1])
    assert engine.backward(loss).item() == loss.item() / 4
    engine.step()
    loss = loss_of(engine(batch_of(0)[0]), batch_of(0)[1])
    assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()
    engine.step()
    assert engine.global_steps == 0
    with pytest.raises(UsageError, match="takes no metric"):
        engine.step(lr_kwargs={"metrics": 3})
    with pytest.raises(UsageError, match="there is no schedule"):
        engine.step(lr_kwargs={"increment": 3})


def test_a_loss_may_pass_through_another_engines_model_without_changing_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine, other = engine_of(1), engine_of(1)
    for _ in range(2):
        mine.backward(other.module(mine(batch_of(0)[0]).repeat(1, 2)[:, :6]).square().mean())
        mine.step()
    assert [record.message.count("are dropped") for record in caplog.records].count(1) == 1
    assert all(parameter.grad is None for parameter in other.module.parameters())
    with pytest.raises(UsageError, match="no backward came"):
        other.step()
    other.module(batch_of(0)[0]).square().mean().backward()
    other.step()
    assert other.global_steps == 1


def test_a_checkpoint_is_loaded_from_its_tag_s_folder(tmp_path: Path) -> None:
    engine: Any = engine_of(1)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path, tag="first")
    kept = engine.module_state_dict()
    train(engine, range(1))
    assert engine.load_checkpoint(tmp_path / "first", tag=".", load_module_only=True)[0]
    assert_equal(engine.module_state_dict(), kept)


def test_a_program_may_take_the_schedule_away() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1}}
    engine = engine_of(1, scheduler=schedule)
    assert engine.lr_scheduler is not None
    engine.lr_scheduler = None
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["lr"] = 0.25
    train(engine, range(2))
    assert engine.get_lr() == [0.25]


def test_a_program_that_steps_the_optimizer_steps_the_schedule_itself() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}}
    by_engine, by_hand = (engine_of(2, scheduler=schedule) for _ in range(2))
    for number in range(3):
        for engine in (by_engine, by_hand):
            inputs, targets = batch_of(number)
            engine.backward(loss_of(engine(inputs), targets))
        by_engine.step()
        assert by_hand.optimizer is not None
        by_hand.optimizer.step()
        by_hand.lr_scheduler.step()
        assert by_hand.get_lr() == by_engine.get_lr()
    assert by_hand.get_lr() != [0.0]
    assert all(
        a.equal(b) for a, b in zip(by_hand.parameters(), by_engine.parameters(), strict=True)
    )


def test_the_optimizer_tells_of_the_last_update() -> None:
    engine = engine_of(0, fp16={"enabled": True, "initial_scale_power": 8})
    optimizer = engine.optimizer
    assert optimizer is not None
    assert (optimizer.overflow, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (
        False,
        256.0,
        True,
    )
    assert optimizer.needs_scaler() and not engine_of(0).optimizer.needs_scaler()
    inputs, targets = batch_of(0)
    engine.backward(loss_of(engine(inputs.half()), targets) * torch.inf)
    optimizer.step()
    assert optimizer.overflow
    assert engine.global_steps == 1


def _skip_together() -> list[Any]:
    """Two models, of which one overflows on one rank: neither is stepped."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    actor, critic = engine_of(2, fp16=fp16), engine_of(3, fp16=fp16)
    before = critic.state_dict()
    inputs, targets = batch_of(0)
    blown = torch.inf if torch.distributed.get_rank() else 1.0
    actor.backward(loss_of(actor(inputs.half()), targets) * blown)
    critic.backward(loss_of(critic(inputs.half()), targets))
    assert actor.optimizer is not None
    assert critic.optimizer is not None
    seen = [each.optimizer.check_overflow(external=True) for each in (actor, critic)]
    critic.optimizer.skip_step = seen[0] and not seen[1]
    actor.step()
    critic.step()
    assert_equal(critic.state_dict(), before)
    seen += [critic.optimizer.overflow, critic.skipped_steps, critic.loss_scale]
    train_half(critic)
    seen += [critic.skipped_steps, critic.optimizer.check_overflow()]
    actor.destroy()
    critic.destroy()
    return seen


def train_half(engine: DeepSpeedEngine) -> None:
    inputs, targets = batch_of(1)
    engine.backward(loss_of(engine(inputs.half()), targets))
    engine.step()


def test_one_model_s_update_may_be_skipped_with_another_s(ranks: RankPools) -> None:
    for found in ranks(2).run(_skip_together):
        assert found == [True, False, True, 1, 128.0, 1, False]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_are_reported_under_the_name_of_their_stage(stage: int) -> None:
    optimizer: Any = engine_of(stage, bf16={"enabled": True}).optimizer
    names = {1: "single_partition_of_fp32_groups", 3: "fp32_partitioned_groups_flat"}
    names[2] = names[1]
    for name in set(names.values()):
        assert hasattr(optimizer, name) == (name == names.get(stage))
    if stage:
        masters = getattr(optimizer, names[stage])
        assert {master.dtype for master in masters} == {torch.float32}
        assert sum(master.numel() for master in masters) >= 6 * 9 + 9 + 9 + 9 + 9 * 4 + 4
    assert hasattr(optimizer, "param_coordinator") == (stage == 3)
    if stage == 3:
        assert optimizer.parameter_offload.get_param_coordinator().is_invalid_trace()
    scaler = optimizer.loss_scaler
    assert (scaler.loss_scale, scaler.cur_scale, scaler.dynamic) == (1.0, 1.0, False)
    assert (scaler.scale_window, scaler.scale_factor) == (1000, 2.0)


# ---- parameters ----------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_gathered_before_initialize_is_available() -> None:
    with Init():
        weight: Any = model_of()[0].weight
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with GatheredParameters([weight], modifier_rank=1):
        assert weight.ds_status is weight.ds_tensor.status is ZeroParamStatus.AVAILABLE
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE


def _statuses() -> list[Any]:
    engine = engine_of(3)
    weight: Any = next(engine.module.parameters())
    seen = [weight.ds_status, weight.ds_numel, weight.ds_tensor.numel(), weight.ds_shape]
    assert weight.ds_tensor.ds_numel == seen[2]
    assert weight.ds_tensor.status is weight.ds_status
    with GatheredParameters([weight]):
        seen.append(weight.ds_status)
        fragment = weight.ds_tensor
        place = weight.detach().flatten().clone()
    parts = [torch.empty(0)] * 2
    torch.distributed.all_gather_object(parts, fragment)
    seen.append(torch.equal(torch.cat(parts), place))
    numbers = {parameter.ds_id for parameter in engine.module.parameters()}
    seen.append(len(numbers))
    engine.destroy()
    seen.append(hasattr(weight, "ds_id"))
    return seen


class _Looks(torch.autograd.Function):
    """Multiplies by a weight, and looks at it again in backward, as custom losses do."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        _Looks.seen.append(weight.ds_status)
        return gradient @ weight, gradient.t() @ x


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 9, bias=False), nn.Linear(9, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _Looks.apply(_Looks.apply(x, self.first.weight), self.last.weight)  # type: ignore


def _seen_in_backward() -> list[Any]:
    _Looks.seen.clear()
    config = config_of(3)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 20
    engine, *_ = initialize(model=_Custom(), config=config)
    engine.backward(engine(batch_of(0)[0]).sum())
    assert not hasattr(torch.ones(2), "ds_status")
    return _Looks.seen


def test_saved_tensors_of_a_parameter_answer_too(ranks: RankPools) -> None:
    # The last one is small and stays whole, the first is gathered again.
    for seen in ranks(2).run(_seen_in_backward):
        assert seen == [ZeroParamStatus.AVAILABLE] * 2


def test_parameters_of_stage_3_answer_for_themselves(ranks: RankPools) -> None:
    away, here = ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE
    for found in ranks(2).run(_statuses):
        numel = found.pop(2)
        assert 0 <= numel <= 54
        assert found == [away, 54, torch.Size([9, 6]), here, True, 6, False]


def _generate_as_trl() -> tuple[bool, list[Any]]:
    engine = engine_of(3)
    train(engine, range(2))
    inputs = batch_of(5, rank=0)[0]
    expected = engine.module(inputs).detach()
    assert engine.optimizer is not None
    offload = engine.optimizer.parameter_offload
    with GatheredParameters(list(engine.module.parameters())):
        model = offload.module
        for _, parameter in [*model.named_parameters(), *model.ds_external_parameters()]:
            parameter.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        with torch.no_grad():
            found = [engine.module(inputs) for _ in range(3)]
        offload._register_deepspeed_module(model)
        offload.setup_zero_stage3_hooks()
    return all(torch.equal(one, expected) for one in found), train(engine, range(2, 4))


def _trained_without() -> list[Any]:
    engine = engine_of(3)
    train(engine, range(2))
    return train(engine, range(2, 4))


def test_hooks_may_be_taken_off_to_generate(ranks: RankPools) -> None:
    plain = ranks(2).run(_trained_without)
    for (are_equal, losses), expected in zip(ranks(2).run(_generate_as_trl), plain, strict=True):
        assert are_equal
        assert losses == expected
    assert not hasattr(engine_of(2).optimizer, "parameter_offload")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_parameters_have_no_such_attributes(stage: int) -> None:
    engine = engine_of(stage)
    assert not any(hasattr(p, "ds_id") for p in engine.module.parameters())
    assert not hasattr(nn.Parameter(torch.ones(2)), "ds_numel")


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_a_program_may_give_rank_0s_weights_to_all(stage: int) -> None:
    engine = engine_of(stage)
    for parameter in engine.module.parameters():
        parameter.data.fill_(1.0 + get_rank())
    engine._broadcast_model()
    assert all(bool((value == 1.0).all()) for value in engine.state_dict().values())
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_a_program_may_write_the_file_of_weights_on_one_rank(stage: int, tmp_path: Path) -> None:
    engine = engine_of(stage)
    train(engine, range(1))
    if get_rank() == 0:
        assert engine._create_checkpoint_file(tmp_path, "4", False)
        engine._save_checkpoint(tmp_path, "4", client_state={"iteration": 4})
        found = torch.load(tmp_path / "4" / "mp_rank_00_model_states.pt")
        assert found.pop("iteration") == 4
        assert_equal(found["module"], dict(engine.module.state_dict()))
    engine.destroy()


def test_programs_set_the_counters() -> None:
    engine = engine_of(2, gradient_accumulation_steps=2)
    train(engine, range(1))
    assert engine.is_gradient_accumulation_boundary()
    engine.zero_grad()
    engine.micro_steps = 0
    assert not engine.is_gradient_accumulation_boundary()
    engine.global_steps, engine.global_samples, engine.skipped_steps = 7, 28, 1
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (7, 28, 1)
    engine.destroy()


def test_an_optimizer_may_come_after_the_engine() -> None:
    config = {key: value for key, value in config_of(2).items() if key != "optimizer"}
    engine = initialize(model=model_of(), config=config)[0]
    weights = list(engine.module.parameters())
    engine._configure_optimizer(lambda given: torch.optim.SGD(given, lr=0.5), weights)
    assert isinstance(engine.optimizer.optimizer, torch.optim.SGD)
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer.optimizer, 0.5)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    train(engine, range(1))
    assert engine.global_steps == 1 and engine.get_lr() == [0.25]
    assert any(not torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.destroy()


def test_the_recovery_script_is_placed_on_request(tmp_path: Path) -> None:
    engine_of(1)._copy_recovery_script(tmp_path)
    assert (tmp_path / "zero_to_fp32.py").is_file()


def test_methods_of_zero_s_optimizers_are_found_and_not_replaced() -> None:
    for name in ("copy_grads_in_partition", "get_all_grad_tensors", "setup_buckets"):
        with pytest.raises(NotBuiltYetError, match=rf"{name} is not built yet"):
            getattr(DeepSpeedZeroOptimizer, name)([])
        with pytest.raises(NotBuiltYetError, match=rf"replacing DeepSpeedZeroOptimizer\.{name}"):
            setattr(DeepSpeedZeroOptimizer, name, print)
    hidden = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
    with pytest.raises(NotBuiltYetError, match="__avg_scatter_grads is not built yet"):
        getattr(DeepSpeedZeroOptimizer_Stage3, hidden)()


def test_parameters_of_stages_1_and_2_have_a_place_in_their_group() -> None:
    for stage in (1, 2):
        engine = engine_of(stage)
        parameters: list[Any] = list(engine.module.parameters())
        found = sorted(parameter.param_idx_in_group for parameter in parameters)
        assert found == list(range(len(parameters)))
        parameters[0].ds_grad_is_ready = False  # by programs, for a while
        engine.destroy()
        assert not hasattr(parameters[0], "param_idx_in_group")
    assert not any(hasattr(p, "param_idx_in_group") for p in engine_of(3).module.parameters())


def test_stage_3_on_one_rank_is_still_reported() -> None:
    engine = engine_of(3)
    statuses = {p.ds_status for p in engine.module.parameters()}  # type: ignore[attr-defined]
    assert statuses == {ZeroParamStatus.AVAILABLE}


# ---- optimizers by name --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("maker", "expected"),
    [
        (FusedAdam, torch.optim.AdamW),
        (DeepSpeedCPUAdam, torch.optim.AdamW),
        (DeepSpeedCPUAdagrad, torch.optim.Adagrad),
    ],
)
def test_optimizer_classes_make_torchs_own(maker: Any, expected: type) -> None:
    made = maker([nn.Parameter(torch.ones(3))], lr=0.5)
    assert type(made) is expected
    assert made.param_groups[0]["lr"] == 0.5


def test_optimizers_take_the_options_that_their_names_had() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert type(FusedAdam([parameter], adam_w_mode=False)) is torch.optim.Adam
    assert type(DeepSpeedCPUAdam([parameter], adamw_mode=False)) is torch.optim.Adam
    groups = [{"params": [parameter], "lr": 0.25, "weight_decay": 0.5}]
    assert DeepSpeedCPUAdam(groups, lr=1.0).param_groups[0]["lr"] == 0.25
    assert DeepSpeedCPULion([parameter]).__class__.__name__ == "Lion"
    assert FusedLamb([parameter], max_coeff=5.0).param_groups[0]["max_coeff"] == 5.0
    fused = FusedAdam(params=[parameter], lr=2.0)
    assert fused.param_groups[0]["lr"] == 2.0
    assert isinstance(fused, FusedAdam) and not isinstance(fused, DeepSpeedCPUAdam)
    assert not isinstance(torch.optim.AdamW([parameter]), FusedAdam)
    assert FusedAdam([parameter], 1e-3, True, (0.5, 0.9)).param_groups[0]["betas"] == (0.5, 0.9)
    assert "adamw_mode" in inspect.signature(DeepSpeedCPUAdam).parameters
    with pytest.raises(TypeError, match="momentum"):
        FusedAdam([parameter], momentum=0.5)
    with pytest.raises(OptimizerError, match="amsgrad"):
        FusedAdam([parameter], amsgrad=True)
    with pytest.raises(OptimizerError, match="gradient_clipping"):
        FusedLamb([parameter], max_grad_norm=1.0)


def test_the_1_bit_family_has_its_old_names() -> None:
    parameter, engine = nn.Parameter(torch.ones(3)), object()
    made = OnebitAdam([parameter], engine, lr=0.5, freeze_step=7, comm_backend_name="mpi")
    assert type(made) is one_bit.OneBitAdam and made.freeze_step == 7
    assert made.param_groups[0]["lr"] == 0.5
    lamb = OnebitLamb([parameter], factor_max=3.0, max_coeff=5.0)
    assert type(lamb) is one_bit.OneBitLamb and lamb.factor_max == 3.0
    assert lamb.param_groups[0]["max_coeff"] == 5.0
    zero_one = ZeroOneAdam([parameter], var_freeze_step=9, local_step_clipper=2)
    assert type(zero_one) is one_bit.ZeroOneAdam and zero_one.local_step_clipper == 2
    with pytest.raises(OptimizerError, match="gradient_clipping"):
        OnebitAdam([parameter], max_grad_norm=1.0)


# ---- small functions -----------------------------------------------------------------------------


def test_clones_own_their_memory_and_no_more() -> None:
    big = torch.arange(100.0)
    copied = clone_tensors_for_torch_save({"a": [big[2:4]], "b": (big[:1], "text")})
    assert copied["a"][0].untyped_storage().nbytes() == 8
    assert torch.equal(copied["a"][0], big[2:4])
    assert copied["b"][1] == "text"


def test_only_some_tensors_move() -> None:
    moved = move_to_device(
        [torch.ones(2), torch.ones(3)], "meta", criterion_func=lambda tensor: tensor.numel() > 2
    )
    assert [tensor.device.type for tensor in moved] == ["cpu", "meta"]


def test_modules_are_made_on_a_device() -> None:
    with OnDevice(torch.bfloat16):
        layer = nn.Linear(2, 3)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.bfloat16)
    with OnDevice(torch.bfloat16, enabled=False):
        layer = nn.Linear(2, 3)
    assert (layer.weight.device.type, layer.weight.dtype) == ("cpu", torch.float32)


def test_a_wrapped_constructor_makes_a_dtype() -> None:
    made = zero_wrapper_for_fp_tensor_constructor(torch.arange, torch.float16, torch.device("meta"))
    assert (made(3.0).dtype, made(3.0).device.type) == (torch.float16, "meta")
    assert (made(3, device="cpu").dtype, made(3, device="cpu").device.type) == (torch.int64, "cpu")


def test_recomputation_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(None, partition_activations=False)
    assert is_configured()
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    calls = []
    monkeypatch.setattr(layer, "forward", lambda x: calls.append(1) or x @ layer.weight)
    checkpoint(layer, x).sum().backward()
    assert len(calls) == 2
    assert layer.weight.grad is not None


def test_frozen_weights_are_quantised_by_initialize(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AttributeError, match="at stage 2"):
        engine_of(2).optimizer.quantize_nontrainable_params()
    for is_on in (True, False):
        caplog.clear()
        zero = {"stage": 3, "zero_quantized_nontrainable_weights": is_on}
        engine = engine_of(3, zero_optimization=zero)
        engine.optimizer.quantize_nontrainable_params()
        told = "zero_quantized_nontrainable_weights true" in caplog.text
        assert told == (not is_on)
        engine.destroy()
