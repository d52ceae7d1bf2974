"""A key that is not built yet is refused where it asks for something, and only there."""

import pytest

from hadal.config import load_config
from hadal.config.plain import plain
from hadal.config.section import default_of, mark_of
from hadal.config.top_level import Config
from hadal.errors import ConfigError, UnbuiltConfigError

from .faults import BASE, only_fault, with_zero


def test_the_message_says_what_to_do():
    assert only_fault({**BASE, "use_data_before_expert_parallelism": True}) == (
        "use_data_before_expert_parallelism",
        "true is not built yet; leave it out or give false",
    )


def test_a_real_fault_beside_makes_it_an_ordinary_error():
    with pytest.raises(ConfigError) as caught:
        load_config({**BASE, "use_data_before_expert_parallelism": True, "fp16": {"enabled": 3}})
    assert not isinstance(caught.value, UnbuiltConfigError)
    assert len(caught.value.faults) == 2


SWITCHES = [
    name
    for name in Config.model_fields
    if (child := Config.child(name, {})) is not None
    and child.model.switch == "enabled"
    and mark_of(child.model.model_fields["enabled"]).status == "not built yet"
]


@pytest.mark.parametrize("section", SWITCHES)
def test_a_section_that_is_off_always_loads(section):
    model = Config.child(section, {}).model
    other = next((name for name, f in model.model_fields.items() if f.annotation is bool), None)
    source = {"enabled": False} | ({other: True} if other not in (None, "enabled") else {})
    assert not getattr(load_config({**BASE, section: source}), section).enabled


def test_a_section_that_is_on_is_told_once():
    source = {**BASE, "wandb": {"enabled": True, "project": "mine", "group": "ours"}}
    assert only_fault(source)[0] == "wandb.enabled"


def test_keys_at_their_defaults_always_load():
    whole = {name: plain(default_of(field)) for name, field in Config.model_fields.items()}
    config = load_config(
        {
            **whole,
            "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": 1,
            **BASE,
            "train_batch_size": 1,
        }
    )
    assert config.notes == ()
    again = load_config(config.as_dict())
    assert again.as_dict() == config.as_dict()


@pytest.mark.parametrize(
    "keys",
    [
        {"pipeline_loading_checkpoint": True},
    ],
)
def test_what_acts_at_stage_3_only_asks_for_nothing_below(keys):
    load_config(with_zero(stage=2, **keys))
    assert "not built yet" in only_fault(with_zero(stage=3, **keys))[1]


@pytest.mark.parametrize("size", [0, 1])
def test_values_that_mean_off(size):
    load_config(with_zero(stage=3, zero_hpz_partition_size=size))
    load_config({**BASE, "tensor_parallel": {"autotp_size": size}})


BUILT = [
    {"fp16": {"enabled": True, "loss_scale": 128, "consecutive_hysteresis": True}},
    {"bf16": {"enabled": True, "check_grad_overflow": False}},
    {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "amsgrad": True}}},
    {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
    {"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}},
    {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "maximize": True}}},
    {"optimizer": {"type": "Adagrad", "params": {"lr_decay": 0.1}}},
    {"optimizer": {"type": "LION", "params": {"weight_decay": 0.1}}},
    with_zero(stage=3, stage3_max_live_parameters=0, stage3_max_reuse_distance=0),
    with_zero(stage=3, stage3_prefetch_bucket_size=1, log_trace_cache_warnings=True),
    with_zero(stage=3, stage3_allgather_sequential=True, divergent_ranks=False),
    {"dump_state": True, "log_level": "INFO", "dataloader_drop_last": True, "steps_per_print": 1},
    {"vocabulary_size": 104, "sequence_parallel_size": 1},
    {"prescale_gradients": True, "sparse_gradients": True, "gradient_allreduce_op": "sum"},
    with_zero(stage=1, grad_hooks=False),
    with_zero(stage=3, ignore_unused_parameters=False, parameter_alignment=True),
]


@pytest.mark.parametrize("keys", BUILT)
def test_what_is_built_loads_in_silence(keys):
    assert load_config({**BASE, **keys}).notes == ()


@pytest.mark.parametrize(
    "keys",
    [
        {"round_robin_gradients": True},
        {"contiguous_gradients": False},
    ],
)
def test_what_changes_nothing_says_so(keys):
    (note,) = load_config(with_zero(stage=3, **keys)).notes
    assert note.endswith("has no effect")
    assert next(iter(keys)) in note


def test_keys_without_effect_are_told():
    config = load_config(
        {**BASE, "disable_allgather": True, **with_zero(memory_efficient_linear=False)}
    )
    assert "disable_allgather: true has no effect" in config.notes
    assert "zero_optimization.memory_efficient_linear: false has no effect" in config.notes


def test_origins_cover_the_effective_configuration():
    config = load_config({"train_batch_size": 8, "fp16": {"enabled": True}}, world_size=2)
    assert config.origins["fp16.enabled"] == "you"
    assert config.origins["fp16.hysteresis"] == "default"
    assert config.origins["train_micro_batch_size_per_gpu"] == "inferred"
    assert set(config.origins.values()) == {"you", "default", "inferred"}
