"""What a program can tell of an engine: kinds of errors, identities, attributes, schedules."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.toys import assert_equal, backward, config_of, model_of, train
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from hadal.compat.engine import initialize
from hadal.compat.install import alias
from hadal.compat.kinds import also
from hadal.compat.surface import NameKind, modules
from hadal.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    HadalError,
    UsageError,
)

DS = alias("deepspeed")
STAGES = (0, 1, 2, 3)


def begin(**changes: Any) -> Any:
    return initialize(model=model_of(), config=config_of(1, **changes))[0]


def missing_tag(folder: Path) -> None:
    engine = begin()
    engine.save_checkpoint(folder, tag="there")
    engine.load_checkpoint(folder, tag="elsewhere")


def unused_parameter(folder: Path) -> None:
    config = config_of(1, zero_optimization={"stage": 1, "ignore_unused_parameters": False})
    engine = initialize(model=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), config=config)[0]
    engine.backward(engine.module[0](torch.ones(1, 2)).sum())
    engine.step()


def step_without_averages(folder: Path) -> None:
    engine = begin()
    with engine.no_sync():
        engine.step()


WRONG: dict[str, tuple[type[Exception], Callable[[Path], Any]]] = {
    "batches that contradict": (AssertionError, lambda _: begin(train_batch_size=7)),
    "an unknown schedule": (AssertionError, lambda _: begin(scheduler={"type": "Nope"})),
    "two precisions": (
        AssertionError,
        lambda _: begin(fp16={"enabled": True}, bf16={"enabled": True}),
    ),
    "no model": (AssertionError, lambda _: initialize(config=config_of(1))),
    "no configuration": (AssertionError, lambda _: initialize(model=model_of())),
    "no file": (ValueError, lambda _: initialize(model=model_of(), config="/none.json")),
    "an unknown key": (ValueError, lambda _: begin(zero_optimization={"stge": 1})),
    "a batch that does not divide": (ValueError, lambda _: begin().set_train_batch_size(4)),
    "a tag that is not there": (AssertionError, missing_tag),
    "a parameter that is not used": (AssertionError, unused_parameter),
    "a step without averages": (AssertionError, step_without_averages),
    "no directory": (ValueError, lambda _: begin().save_checkpoint(None)),
    "groups of no experts": (
        AssertionError,
        lambda _: alias("deepspeed.utils.groups")._get_expert_parallel_group("nope"),
    ),
    "a loss of several elements": (
        AssertionError,
        lambda _: begin().backward(torch.ones(2, requires_grad=True) * 2),
    ),
    "a scaled loss of several elements": (
        AssertionError,
        lambda _: begin().scale(torch.ones(2, requires_grad=True) * 2),
    ),
    "a boundary that is not counted": (
        AssertionError,
        lambda _: begin(
            managed_gradient_accumulation=False, zero_optimization={"overlap_comm": False}
        ).set_gradient_accumulation_boundary(True),
    ),
    "states moved to a disk": (ValueError, lambda _: begin().offload_states(device="nvme")),
    "no optimizer": (
        TypeError,
        lambda _: alias("deepspeed.runtime.lr_schedules").WarmupLR(object()),
    ),
    "an unknown random state": (
        Exception,
        lambda _: alias("deepspeed.checkpointing").get_cuda_rng_tracker().fork("x").__enter__(),
    ),
}
"""What is wrong -> the kind of error that DeepSpeed 0.19.8 raises, and a program that does it."""


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_of_deepspeed_s_kind_and_of_hadal_s(name: str, tmp_path: Path) -> None:
    kind, program = WRONG[name]
    with pytest.raises(kind) as found:
        program(tmp_path)
    assert isinstance(found.value, HadalError | ValueError)


def test_a_lost_rank_is_no_assertion_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lost = begin(), CommunicationError("rank 0 lost rank 1")

    def run(*given: Any, **named: Any) -> None:
        raise lost

    monkeypatch.setattr(engine._backwards, "run", run)
    with pytest.raises(CommunicationError) as found:
        backward(engine, 0)
    assert found.value is lost and not isinstance(lost, AssertionError)


def test_every_error_s_name_can_be_caught() -> None:
    ends = ("Error", "Exception", "Aborted", "IncompatibleWorldSize")
    found = [
        getattr(alias(module), name)
        for module, entry in modules().items()
        for name in (*entry.kinds, *entry.same)
        if name.endswith(ends) and entry.kinds.get(name) is not NameKind.FUNCTION
    ]
    assert len(found) > 9 and all(issubclass(each, Exception) for each in found)


def test_configuration_errors_have_deepspeed_s_name() -> None:
    with pytest.raises(DS.DeepSpeedConfigError) as found:
        begin(train_batch_size=7)
    assert type(found.value).__name__ == "ConfigError" and found.value.faults


def test_kinds_are_added_without_changing_the_error() -> None:
    @also(AssertionError, ValueError)
    def fails(error: Exception) -> None:
        """Fail."""
        raise error

    given = ConfigError("wrong", ())
    with pytest.raises(AssertionError) as found:
        fails(given)
    assert found.value is given and fails.__doc__ == "Fail."
    assert type(pickle.loads(pickle.dumps(given))) is ConfigError
    with pytest.raises(KeyError):
        fails(KeyError("x"))
    with pytest.raises(CheckpointError) as kept:
        also(OSError)(fails)(CheckpointError("gone"))
    assert isinstance(kept.value, ValueError)


@pytest.mark.parametrize("stage", STAGES)
def test_param_groups_stay_the_program_s(stage: int) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.mine = "kept"  # type: ignore[attr-defined]
    groups, first = optimizer.param_groups, optimizer.param_groups[0]
    config = config_of(stage)
    config.pop("optimizer")
    engine, outer, _, _ = initialize(model=model, optimizer=optimizer, config=config)
    assert outer is engine.optimizer and outer.param_groups is optimizer.param_groups is groups
    assert outer.param_groups[0] is first and outer.mine == "kept"
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    seen = []
    for number in range(3):
        train(engine, range(number, number + 1))
        schedule.step()
        seen.append(engine.get_lr()[0])
    assert seen == pytest.approx([1 / 2, 1 / 3, 1 / 4])


@pytest.mark.parametrize("stage", STAGES)
def test_a_schedule_runs_on_the_engine_s_optimizer(stage: int) -> None:
    engine, optimizer, _, given = initialize(model=model_of(), config=config_of(stage))
    warm_up = alias("deepspeed.runtime.lr_schedules").WarmupLR
    schedule = warm_up(optimizer, warmup_max_lr=0.4, warmup_num_steps=4, warmup_type="linear")
    seen = []
    for number in range(3):
        train(engine, range(number, number + 1))
        schedule.step()
        seen.append(engine.get_lr()[0])
    assert given is None and seen == pytest.approx([0.0, 0.1, 0.2])
    assert schedule.get_last_lr() == [seen[-1]]


@pytest.mark.parametrize("stage", STAGES)
def test_attributes_of_the_program_s_own_stay(stage: int) -> None:
    model = model_of()
    weight = next(model.parameters())
    weight.tag = "mine"  # type: ignore[attr-defined]
    engine, optimizer, _, _ = initialize(model=model, config=config_of(stage))
    engine.mine, optimizer.mine, weight.late = 1, 2, 3  # type: ignore[attr-defined]
    assert engine.module is model and next(engine.module.parameters()) is weight
    assert (weight.tag, weight.late) == ("mine", 3)  # type: ignore[attr-defined]
    assert (engine.mine, engine.optimizer.mine) == (1, 2)
    assert not hasattr(weight, "_hp_mapping")


def test_a_progress_line_of_the_program_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        DS.DeepSpeedEngine, "_report_progress", lambda self, step: seen.append(step)
    )
    engine = begin(steps_per_print=2)
    train(engine, range(4))
    assert seen == [2, 4]
    monkeypatch.undo()
    train(engine, range(2))
    assert seen == [2, 4]
    engine._report_progress(6)


def test_what_is_replaced_and_never_called_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin()
    assert "never called" not in caplog.text
    monkeypatch.setattr(DS.DeepSpeedEngine, "clip_fp32_gradients", lambda self: None)
    begin()
    assert "clip_fp32_gradients, which is never called" in caplog.text


@pytest.mark.parametrize("stage", [0, 3])
def test_an_attribute_of_deepspeed_s_that_nothing_reads_warns_when_it_is_set(
    stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = initialize(model=model_of(), config=config_of(stage))[0]
    for _ in range(2):
        engine.enable_backward_allreduce = False
        engine.optimizer.clip_grad = 0.5
    engine._support_torch_style_backward = True  # as every engine does
    engine._config.zero_enabled = False
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "engine.enable_backward_allreduce = False has no effect",
        "optimizer.clip_grad = 0.5 has no effect",
        "DeepSpeedConfig.zero_enabled = False has no effect",
    ]
    assert engine._config.zero_enabled == (stage > 0)
    assert engine.enable_backward_allreduce is False and engine.optimizer.clip_grad == 0.5


def weights_sent_in(changes: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Tensor]:
    engine: Any = initialize(model=model_of(), config=config_of(2, **changes))[0]
    if dtype is not None:
        engine.communication_data_type = dtype
        assert engine.communication_data_type is dtype
    train(engine, range(2))
    return engine.module_state_dict()  # type: ignore[no-any-return]


def test_a_program_sets_the_dtype_of_gradients_on_the_wire(ranks: RankPools) -> None:
    run = ranks(2).run
    plain, sets = run(weights_sent_in, {}, None)[0], run(weights_sent_in, {}, torch.bfloat16)[0]
    configured = run(weights_sent_in, {"communication_data_type": "bf16"}, None)[0]
    for name, value in sets.items():
        assert torch.equal(value, configured[name])
    assert any(not torch.equal(value, plain[name]) for name, value in sets.items())
    with pytest.raises(UsageError, match="communication_data_type = 'bf16': expected one of"):
        begin().communication_data_type = "bf16"


@pytest.mark.parametrize("stage", [0, 3])
def test_options_that_a_program_has_kept_come_back_after_a_load(stage: int, tmp_path: Path) -> None:
    engine: Any = initialize(model=model_of(), config=config_of(stage))[0]
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    optimizer = engine.optimizer
    optimizer.param_groups[0]["lr"] = 0.5
    kept = optimizer.param_groups.copy()
    engine.load_checkpoint(tmp_path)
    assert engine.get_lr() == [0.01] and kept[0]["lr"] == 0.5
    optimizer.param_groups = kept
    assert engine.get_lr() == [0.5] and optimizer.param_groups[0] is kept[0]
    train(engine, range(1, 2))


def test_an_attribute_that_the_optimizer_lacks_names_what_to_use() -> None:
    optimizer: Any = begin().optimizer
    for name in ("averaged_gradients", "scaled_global_norm", "override_loss_scale"):
        assert not hasattr(optimizer, name)
        with pytest.raises(AttributeError, match=f"{name}.*safe_get_full_grad.*fp16.loss_scale"):
            getattr(optimizer, name)


def test_what_an_engine_tells_of_itself() -> None:
    engine = begin(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    assert engine.get_data_types() == (torch.bfloat16, torch.float32)
    assert engine.dynamic_loss_scale_args() is None and engine.get_compile_time() == []
    assert not engine.is_first_weights_partition_group() and engine.zero_partial_offload() == 1.0
    assert not engine.zero_nvme_offload_optimizer() and not engine.compile_autosp()
    assert engine.checkpoint_serialization_enabled() and not engine.optimizer_legacy_fusion()
    assert engine.allreduce_gradients() is None and engine.clip_fp32_gradients() is None
    [value] = engine.all_gather_scalar(torch.ones(1), None)
    assert value == 1 and engine.collect_python_gc() >= 0
    scaled = begin(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 3})
    told = scaled.dynamic_loss_scale_args()
    assert (told["init_scale"], told["delayed_shift"]) == (16.0, 3)
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    engine.set_train_micro_batch_size(micro + 1)
    assert engine.get_batch_info() == ((micro + 1) * steps, micro + 1, steps)
    with pytest.raises(UsageError, match="from 1 on"):
        engine.set_train_micro_batch_size(0)


@on_ranks(2)
def test_an_engine_averages_tensors_of_the_program() -> None:
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    engine = begin(zero_optimization={"stage": 2})
    tensors = [torch.full((2, 3), float(rank)), torch.tensor([4.0 * rank]), torch.ones(0)]
    assert engine.allreduce_bucket(tensors, group).tolist() == [0.5] * 6 + [2.0]
    assert tensors[1] == 4 * rank
    engine.allreduce_no_retain(tensors, group, numel_per_bucket=6)
    assert bool((tensors[0] == 0.5).all()) and tensors[1] == 2
    engine.buffered_allreduce_fallback([tensors[1].fill_(rank)])
    engine.buffered_allreduce_fallback()
    assert tensors[1] == 0.5


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_reductions_of_several_backwards_may_wait_for_the_step(stage: int) -> None:
    def weights_after(coalesces: bool) -> Any:
        engine = initialize(
            model=model_of(), config=config_of(stage, gradient_accumulation_steps=2)
        )[0]
        with engine.coalesce_grad_reduction() if coalesces else nullcontext():
            for at in range(2):
                engine.set_gradient_accumulation_boundary(at == 1)
                with engine.no_sync() if coalesces and at == 0 else nullcontext():
                    backward(engine, at)
            if coalesces:
                with pytest.raises(UsageError, match="no_sync"):
                    engine.step()
        engine.step()
        return engine.state_dict()

    assert_equal(weights_after(True), weights_after(False))


def test_names_of_deepspeed_s_files() -> None:
    engine = begin()
    assert engine._get_expert_ckpt_name("a", 2, 3, "t") == (
        "a/t/layer_2_expert_3_mp_rank_00_model_states.pt"
    )
    split = SimpleNamespace(get_model_parallel_rank=lambda: 1)
    assert engine._get_expert_ckpt_name("a", -1, 3, None, split) == (
        "a/expert_3_mp_rank_01_model_states.pt"
    )
    assert engine._get_optimizer_ckpt_name("a", "t", 1) == (
        "a/t/expp_rank_1_mp_rank_00_optim_states.pt"
    )


def test_a_curriculum_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UsageError, match="curriculum"):
        begin().set_custom_curriculum_learning_schedule({"seqlen": lambda step: step})


def test_a_parameter_of_one_element_is_whole_until_initialize() -> None:
    with DS.zero.Init():
        module = nn.Linear(1, 2)
        module.scale = nn.Parameter(torch.ones(1))
    assert hasattr(module.bias, "ds_id") and not hasattr(module.scale, "ds_id")
    initialize(model=module, config=config_of(3))
    assert module.scale.ds_numel == 1


def test_an_existing_module_is_shown_in_the_configured_dtype() -> None:
    config = config_of(3, bf16={"enabled": True})
    module = nn.Linear(4, 4)
    DS.zero.Init(module=module, config_dict_or_path=config)
    assert module.weight.dtype is torch.bfloat16


def test_sharding_pauses_inside_init() -> None:
    names = alias("deepspeed.runtime.zero.partition_parameters")
    config = config_of(3)
    names.shutdown_init_context()  # no effect: no context is entered
    with DS.zero.Init(config_dict_or_path=config):
        before = nn.Linear(4, 4)
        names.shutdown_init_context()
        paused = nn.Sequential(nn.Linear(4, 4))
        names.restore_init_context()
        after = nn.Sequential(nn.Linear(4, 4), paused)
    outside = nn.Linear(4, 4)
    assert hasattr(before.weight, "ds_id") and hasattr(after[0].weight, "ds_id")
    assert not hasattr(paused[0].weight, "ds_id") and not hasattr(outside.weight, "ds_id")
    with DS.zero.Init(config_dict_or_path=config):
        names.shutdown_init_context()
    with DS.zero.Init(config_dict_or_path=config):
        again = nn.Linear(4, 4)
    assert hasattr(again.weight, "ds_id")


def test_dtypes_of_gradients_that_autocast_sends() -> None:
    names = alias("deepspeed.runtime.torch_autocast")
    loose = nn.Parameter(torch.ones(2))
    assert names.get_comm_dtype(loose) is torch.float32 and not names.has_comm_dtype(loose)
    section = {"enabled": True, "dtype": "bfloat16"}
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    engine = initialize(model=model, config=config_of(1, torch_autocast=section))[0]
    weight, scale = model[0].weight, model[1].weight
    assert names.is_autocast_initialized() and names.has_comm_dtype(weight)
    assert names.get_comm_dtype(weight) is torch.bfloat16
    assert not names.has_comm_dtype(scale)
    with names.autocast_if_enabled(engine):
        assert model[0](torch.ones(1, 4)).dtype is torch.bfloat16
    engine.destroy()
    assert names.get_comm_dtype(weight) is torch.float32
