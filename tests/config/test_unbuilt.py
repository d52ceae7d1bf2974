"""A key that is not built yet is refused where it asks for something, and only there."""

import pytest

from hadal.config import load_config, log_notes
from hadal.config.not_built import NOT_BUILT
from hadal.config.section import default_of, mark_of, plain
from hadal.config.top_level import Config
from hadal.errors import ConfigError, UnbuiltConfigError

from .faults import BASE, only_fault, with_zero


def test_the_message_names_the_remedy():
    section = {"deepcompile": True, "offload_parameters": True}
    assert only_fault({**BASE, "compile": section}) == (
        "compile.offload_parameters",
        "true is not built yet: zero_optimization.offload_param keeps them there; leave it out or"
        " set false",
    )


def test_another_real_fault_makes_it_an_ordinary_error():
    with pytest.raises(ConfigError) as caught:
        load_config({**BASE, "nebula": {"enabled": True}, "fp16": {"enabled": 3}})
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


def test_an_enabled_section_is_logged_once():
    source = {**BASE, "nebula": {"enabled": True, "persistent_time_interval": 7}}
    assert only_fault(source)[0] == "nebula.enabled"


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
        {"save_muon_momentum_buffer_in_memory": True},
    ],
)
def test_keys_of_stage_3_require_nothing_below_it(keys):
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
def test_built_names_load_without_a_warning(keys):
    assert load_config({**BASE, **keys}).notes == ()


@pytest.mark.parametrize(
    "keys",
    [
        {"round_robin_gradients": True},
        {"contiguous_gradients": False},
    ],
)
def test_arguments_without_effect_are_reported(keys):
    (note,) = load_config(with_zero(stage=3, **keys)).notes
    assert note.endswith("has no effect")
    assert next(iter(keys)) in note


def test_keys_without_effect_are_reported():
    config = load_config(
        {
            **BASE,
            "disable_allgather": True,
            "pipeline": {"seed_layers": True},
            **with_zero(memory_efficient_linear=False),
        }
    )
    assert "disable_allgather, pipeline.seed_layers: true has no effect" in config.notes
    assert "zero_optimization.memory_efficient_linear: false has no effect" in config.notes


IDLE = [
    # A key of the section, the stage, and the rest of its message.
    ({"zero_quantized_weights": True}, 1, "at stage 1, only at stage 3"),
    ({"zero_quantized_nontrainable_weights": True}, 2, "at stage 2, only at stage 3"),
    ({"zero_quantized_gradients": True}, 1, "at stage 1, only at stages 2 and 3"),
    ({"zero_hpz_partition_size": 2}, 0, "at stage 0, only at stage 3"),
    ({"mics_shard_size": 2}, 2, "at stage 2, only at stage 3"),
    ({"mics_hierarchical_params_gather": True}, 2, "at stage 2, only at stage 3"),
    ({"stage3_max_live_parameters": 7}, 2, "at stage 2, only at stage 3"),
    ({"stage3_gather_16bit_weights_on_model_save": True}, 2, "at stage 2, only at stage 3"),
    ({"grad_hooks": False}, 3, "at stage 3, only at stages 0 and 1"),
    ({"save_muon_momentum_buffer_in_memory": True}, 2, "at stage 2, only at stage 3"),
    ({"offload_param": {"device": "cpu"}}, 1, "at stage 1, only at stage 3"),
    ({"sub_group_size": 7}, 3, 'without an offload device "nvme"'),
]


@pytest.mark.parametrize(("keys", "stage", "why"), IDLE)
def test_a_key_without_effect_at_its_place_is_reported(keys, stage, why):
    (note,) = load_config(with_zero(stage=stage, **keys)).notes
    assert note.startswith(f"zero_optimization.{next(iter(keys))}")
    assert f": has no effect {why}" in note


def test_a_section_that_no_stage_reads_is_silent_where_it_is_off():
    zero = with_zero(stage=1, offload_param={"device": "none", "pin_memory": False})
    assert load_config(zero).notes == ()


WITHOUT_A_SWITCH = [
    ({"tensorboard": {"job_name": "x"}}, "tensorboard.job_name", "tensorboard.enabled"),
    (
        {"tensor_parallel": {"preset_model": "llama"}},
        "tensor_parallel.preset_model",
        "tensor_parallel.autotp_size",
    ),
    ({"fp16": {"loss_scale": 128}}, "fp16.loss_scale", "fp16.enabled"),
    (
        {"compression_training": {"row_pruning": {"different_groups": {"a": {"modules": ["x"]}}}}},
        "compression_training.row_pruning.different_groups",
        "compression_training.row_pruning.shared_parameters.enabled",
    ),
]


@pytest.mark.parametrize(("keys", "path", "switch"), WITHOUT_A_SWITCH)
def test_keys_without_their_switch_are_reported(keys, path, switch):
    assert load_config({**BASE, **keys}).notes == (f"{path}: has no effect without {switch}",)


OFF_ON_PURPOSE = [
    {"tensorboard": {"enabled": False, "job_name": "x"}},
    {"fp16": {"enabled": False, "loss_scale": 128}},
    {"data_efficiency": {"enabled": False, "seed": 7}},
    {"fp16": {"loss_scale": 0, "hysteresis": 2}},  # the defaults
    {"aio": {"queue_depth": 8}},
    {"weight_quantization": {"enabled": False, "num_bits": 4}},
    {
        "compression_training": {
            "row_pruning": {
                "shared_parameters": {"enabled": False, "method": "topk"},
                "different_groups": {"a": {"params": {"dense_ratio": 0.5}, "modules": ["x"]}},
            }
        }
    },
]


@pytest.mark.parametrize("keys", OFF_ON_PURPOSE)
def test_deliberately_disabled_features_are_silent(keys):
    assert load_config({**BASE, **keys}).notes == ()


def test_an_unresolved_switch_is_not_a_missing_one():
    (note,) = load_config({**BASE, "fp16": {"enabled": "auto", "loss_scale": 128}}).notes
    assert note.startswith("fp16.enabled: ")


def test_keys_of_unbuilt_techniques_are_reported():
    keys = {
        "activation_checkpointing": {"number_checkpoints": 4},
    }
    (blocks,) = load_config({**BASE, **keys}).notes
    assert blocks.startswith("activation_checkpointing.number_checkpoints: has no effect without")


def test_all_keys_that_do_nothing_are_logged_in_one_line(caplog):
    zero = {"stage": 1, "zero_quantized_weights": True, "contiguous_gradients": False}
    config = load_config({**BASE, "zero_optimization": zero, "tensorboard": {"job_name": "x"}})
    log_notes(config)
    (line,) = caplog.messages
    assert line.startswith("keys that do nothing here: ")
    assert len(config.notes) == 3
    assert all(note in line for note in config.notes)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"weight_quantization": {"enabled": True}}, "weight_quantization.enabled"),
        ({"weight_quantization": {"q_groups": 2}}, "weight_quantization.enabled"),
    ],
)
def test_unbuilt_features_are_refused_by_name(keys, path):
    found, message = only_fault({**BASE, **keys})
    assert found == path
    assert "not built yet" in message


def test_a_section_of_experts_names_what_has_them():
    found, message = only_fault({**BASE, "moe": {"num_experts": 4}})
    assert found == "moe"
    assert "hadal.moe.MoE" in message and '"expert_parallel"' in message


def test_a_quantization_period_of_zero_loads():
    bits = {"start_bits": 8, "target_bits": 8, "quantization_period": 0}
    group = {"params": bits, "modules": ["attention"]}
    section = {"shared_parameters": {"enabled": False}, "different_groups": {"a": group}}
    config = load_config({**BASE, "compression_training": {"weight_quantization": section}})
    groups = config.compression_training.weight_quantization.different_groups
    assert groups["a"].params.quantization_period == 0


def test_origins_cover_the_effective_configuration():
    config = load_config({"train_batch_size": 8, "fp16": {"enabled": True}}, world_size=2)
    assert config.origins["fp16.enabled"] == "you"
    assert config.origins["fp16.hysteresis"] == "default"
    assert config.origins["train_micro_batch_size_per_gpu"] == "inferred"
    assert set(config.origins.values()) == {"you", "default", "inferred"}


def not_built(model, path=""):
    """Yield the paths of the keys that are refused as not built yet."""
    for name, field in model.model_fields.items():
        mark, child = mark_of(field), model.child(name, {})
        if mark.status == "not built yet" and not mark.serves:
            yield path + name
        elif child is not None:
            yield from not_built(child.model, f"{path}{name}.")


def test_every_refusal_has_its_reason_and_remedy():
    assert sorted(not_built(Config)) == sorted(NOT_BUILT)
