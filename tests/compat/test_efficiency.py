"""Data efficiency under DeepSpeed's names."""

from __future__ import annotations

import pytest
import torch
from data_efficiency.test_layer_drop import Told as LayerTold
from data_efficiency.test_seqlen import SECTION, Told, ids
from data_efficiency.test_token_drop import Layer, Net, around, section
from torch import nn

from hadal.compat import engine as compat
from hadal.compat.efficiency import (
    CurriculumScheduler,
    ProgressiveLayerDrop,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
from hadal.errors import ConfigError, UsageError
from hadal.plugins.data_efficiency.token_drop import convert_to_random_ltd

METRIC = {name: value for name, value in SECTION.items() if name[0] != "e"}


def engine_of(model: nn.Module, **sections):
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **sections,
    }
    return compat.initialize(model=model, config=config)[0]


def test_a_scheduler_of_difficulty():
    scheduler = CurriculumScheduler(METRIC)
    assert scheduler.first_step
    assert [scheduler.update_difficulty(step) for step in range(1, 6)] == [16, 24, 40, 48, 64]
    assert scheduler.get_difficulty(1) == 16
    assert scheduler.get_current_difficulty() == 64
    state = scheduler.get_state()
    assert (state["current_difficulty"], state["schedule_type"]) == (64, "fixed_linear")
    other = CurriculumScheduler({**METRIC, "max_difficulty": 16})
    other.set_state(state)
    assert other.get_state() == state
    other.set_current_difficulty(8)
    assert other.get_current_difficulty() == 8
    custom = CurriculumScheduler({**METRIC, "schedule_type": "custom"})
    custom.set_custom_get_difficulty(lambda step: 2 * step)
    assert custom.update_difficulty(5) == 10


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"min_difficulty": None}, r"min_difficulty +required"),
        ({"min_difficulty": "short"}, r"min_difficulty +expected an integer"),
        ({"max_difficulty": 4}, r"max_difficulty +4 is less than min_difficulty 8"),
        ({"schedule_config": {"difficulty_step": 8}}, r"total_curriculum_step +required"),
        ({"schedule_type": "fixed_discrete"}, r"schedule_config.difficulty +required"),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [1, 2, 3], "max_step": [3]},
            },
            "expected one level more than the 1 steps of max_step, got 3",
        ),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [1, 2], "max_step": [3, 4]},
            },
            "expected one level more than the 2 steps of max_step, got 2",
        ),
    ],
)
def test_a_scheduler_refuses_what_does_not_fit(changes, fault):
    with pytest.raises(ConfigError, match=fault):
        CurriculumScheduler({**METRIC, **changes})


def test_the_engine_has_both_curricula_by_their_names():
    engine = engine_of(Told(), curriculum_learning=SECTION)
    assert engine.curriculum_enabled_legacy() is True
    assert engine.curriculum_learning_enabled() is False
    assert engine.curriculum_learning_config() is not None
    assert engine.curriculum_params_legacy()["max_difficulty"] == 64
    scheduler = engine.curriculum_scheduler_legacy
    engine.backward(engine(ids()))
    engine.step()
    assert scheduler.get_current_difficulty() == 16
    assert engine.get_pld_theta() is engine.progressive_layer_drop is None
    assert engine.pld_enabled() is False
    engine.destroy()


def test_layer_drop():
    drop = ProgressiveLayerDrop(theta=0.5, gamma=0.1)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    drop.update_state(1)
    assert drop.get_theta() == 0.9524187090179798
    section = {"enabled": True, "theta": 0.5, "gamma": 0.1}
    engine = engine_of(LayerTold(), progressive_layer_drop=section)
    thetas = [engine.get_pld_theta()]
    for _ in range(4):
        engine.backward(engine(torch.ones(3, 4)))
        engine.step()
        thetas.append(engine.get_pld_theta())
    assert thetas == [1.0, 1.0, 0.9524187090179798, 0.9093653765389909, 0.8704091103408589]
    assert engine.progressive_layer_drop.get_theta() == thetas[-1]
    assert (engine.pld_enabled(), engine.pld_theta(), engine.pld_gamma()) == (True, 0.5, 0.1)
    assert engine.curriculum_scheduler_legacy is None
    engine.destroy()


def test_random_token_dropping():
    ltd = section(first=4)
    model = Net()
    names = list(model.state_dict())
    engine = engine_of(model, data_efficiency=around(ltd))
    assert convert_to_random_ltd(engine, Layer) is engine
    engine.random_ltd_initialize()
    assert engine.random_ltd_enabled() is True
    scheduler = engine.random_ltd_scheduler
    for _ in range(3):
        engine.backward(engine(torch.randn(3, 16, 8)))
        engine.step()
    assert scheduler.get_current_seq() == 8
    assert scheduler.state["consumed_layer_tokens"] == 3 * (40 + 40 + 48)
    assert scheduler.get_total_layer_tokens(3) == scheduler.state["consumed_layer_tokens"]
    assert (scheduler.model_layer_num, scheduler.get_random_ltd_layer_num()) == (4, 2)
    assert scheduler.update_seq(4) == 16
    state = scheduler.state_dict()
    scheduler.load_state_dict({**state, "consumed_layer_tokens": 7})
    assert scheduler.get_state() == {**state, "consumed_layer_tokens": 7}
    assert list(save_without_random_ltd(engine)) == list(save_without_random_ltd(model)) == names
    assert remove_random_ltd_state_dict(dict.fromkeys(names, 1)) == dict.fromkeys(names, 1)
    assert remove_random_ltd_state_dict({"a.0.random_ltd_layer.b": 1}) == {"a.0.b": 1}
    engine.destroy()
    plain = engine_of(LayerTold())
    assert plain.random_ltd_scheduler is None
    plain.random_ltd_initialize()
    plain.destroy()


def test_schedules_and_batches_of_a_program_reach_the_loader_and_the_curriculum():
    custom = {**SECTION, "schedule_type": "custom"}
    config = {"train_micro_batch_size_per_gpu": 1, "curriculum_learning": custom}
    engine = compat.initialize(model=Told(), config=config)[0]
    engine.set_custom_curriculum_learning_schedule(lambda step: 8 * step)
    with pytest.raises(UsageError, match="for loss; the configuration has seqlen"):
        engine.set_custom_curriculum_learning_schedule({"loss": int})
    with pytest.raises(UsageError, match="the engine has no training loader; pass training_data"):
        engine.set_data_post_process_func(print)
    loader = engine.deepspeed_io(torch.zeros(4, 2), 1)
    engine.set_data_post_process_func(lambda batch, state: batch + 1)
    assert next(iter(loader)).min() == 1
    engine.destroy()
