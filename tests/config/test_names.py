"""Unknown keys, "auto", kinds of value, and names of older releases."""

import logging

import pytest

from hadal.config import load_config, log_notes

from .faults import BASE, faults_of, only_fault, with_zero


def test_an_unknown_top_level_key_is_reported(caplog):
    with caplog.at_level(logging.WARNING, logger="hadal.config"):
        config = load_config({**BASE, "my_own_thing": 3})
        log_notes(config)
    assert config.notes == ("my_own_thing: unknown key at the top level, ignored",)
    assert caplog.messages == list(config.notes)


def test_a_typo_at_the_top_level_is_a_fault():
    path, message = only_fault({**BASE, "gradient_cliping": 1.0})
    assert (path, message) == (
        "gradient_cliping",
        'unknown key; did you mean "gradient_clipping"?',
    )


@pytest.mark.parametrize("name", ["_comment", "$schema", "//"])
def test_comments_as_keys_pass_in_silence(name):
    assert load_config({**BASE, name: "x"}).notes == ()


@pytest.mark.parametrize("name", ["msamp", "inference", "comment"])
def test_keys_of_other_programs_are_not_typos(name):
    assert load_config({**BASE, name: {}}).notes[0].startswith(f"{name}: ignored: ")


# Keys of public configurations, which DeepSpeed ignores or has ignored.
PUBLIC = {
    "pipe-parallel-size": 1,
    "model_parallel_size": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu"},
    "stage3_max_live_parameters": 1e9,
    "loss_scale": 0,
    "hysteresis": 2,
    "optimizer": {"type": "Adam", "adam_w_mode": True},
    "fp16": {"opt_level": "O2", "fp16_scale_tolerance": 0.25},
    "compile": {"disable": False, "backend": "inductor"},
    "flops_profiler": {"step": 1},
}


def test_keys_of_public_configurations_are_ignored_and_reported():
    config = load_config({**BASE, **PUBLIC})
    assert sorted(config.notes) == [
        "compile.backend: ignored, an old key: engine.compile(backend=...)",
        "compile.disable: ignored, an old key: the program calls engine.compile()",
        "flops_profiler.step: ignored, as by DeepSpeed: use profile_step",
        "fp16.fp16_scale_tolerance: ignored: another program reads it",
        "fp16.opt_level: ignored: a level of Apex, which only `amp` has",
        'loss_scale, hysteresis: ignored at the top level, also by DeepSpeed: it acts in "fp16"',
        "offload_optimizer, offload_param, stage3_max_live_parameters: ignored at the top level,"
        ' also by DeepSpeed: it acts in "zero_optimization"',
        'optimizer.adam_w_mode: ignored here, also by DeepSpeed: it acts in "params"',
        "pipe-parallel-size, model_parallel_size: ignored: another program reads it; here"
        " tensor_parallel and pipeline divide a model",
    ]
    assert not config.zero_optimization.offload_optimizer


def test_parameters_of_a_section_that_is_ignored_are_not_refused():
    source = {**BASE, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}
    assert only_fault(source)[0] == "optimizer.params.max_grad_norm"
    config = load_config(source, client_optimizer=True)
    assert config.notes == ("optimizer: ignored: the program passes its own optimizer",)


def test_a_key_outside_its_section_is_a_fault():
    path, message = only_fault({**BASE, "overlap_comm": True})
    assert (path, message) == (
        "overlap_comm",
        'unknown key here; it belongs in "zero_optimization"',
    )
    assert "the top level" in only_fault(with_zero(gradient_clipping=1))[1]


SECTIONS = {
    "strict": ["fp16", "bf16", "zero_optimization", "tensorboard", "wandb", "csv_monitor"],
    "silent elsewhere": ["aio", "autotuning", "flops_profiler", "checkpoint", "data_types"],
    "more": ["activation_checkpointing", "data_efficiency", "pipeline", "expert_parallel"],
}


@pytest.mark.parametrize("section", [name for names in SECTIONS.values() for name in names])
def test_an_unknown_key_in_any_section_is_a_fault(section):
    path, message = only_fault({**BASE, section: {"xyzzy": 1}})
    assert path == f"{section}.xyzzy"
    assert message.startswith("unknown key; leave it out (known here: ")


def test_an_unknown_key_deep_below_is_a_fault():
    groups = {"g": {"params": {"bitz": 8}}}
    source = {**BASE, "compression_training": {"activation_quantization": {}}}
    source["compression_training"]["activation_quantization"]["different_groups"] = groups
    path, message = only_fault(source)
    assert path.endswith("different_groups.g.params.bitz")
    assert 'did you mean "bits"?' in message


def test_auto_means_the_default_and_is_logged_once():
    config = load_config(
        with_zero(stage=3, reduce_bucket_size="auto", stage3_max_live_parameters="auto")
        | {"fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    )
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.gradient_clipping == 1.0
    assert config.fp16.enabled is False
    assert config.origins["zero_optimization.reduce_bucket_size"] == "auto"
    assert config.origins["fp16.enabled"] == "auto"
    (note,) = config.notes
    assert note.endswith('"auto" was not replaced by any program; using the default')
    assert "zero_optimization.stage3_max_live_parameters" in note


def test_auto_in_params_is_dropped():
    config = load_config(
        {**BASE, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}}}
    )
    assert config.optimizer.params == {"eps": 1e-6}
    assert config.origins["optimizer.params.lr"] == "auto"
    assert config.origins["optimizer.params.eps"] == "you"


@pytest.mark.parametrize("value", [500, 500.0, 5e2, "500", "5e2"])
def test_integers_are_taken_from_numbers_and_texts(value):
    config = load_config(with_zero(reduce_bucket_size=value))
    assert config.zero_optimization.reduce_bucket_size == 500
    assert type(config.zero_optimization.reduce_bucket_size) is int


@pytest.mark.parametrize("value", [500.5, "500.5", "many", True, None, [], {}, 0, -3])
def test_other_things_are_not(value):
    if value == []:
        value = [True]
    path, message = only_fault(with_zero(reduce_bucket_size=value))
    assert path == "zero_optimization.reduce_bucket_size"
    assert "expected an integer > 0, got " in message or "range for the autotuner" in message


@pytest.mark.parametrize("value", [1, 0, "yes", "", None, 1.0])
def test_booleans_are_true_or_false(value):
    path, message = only_fault({**BASE, "fp16": {"enabled": value}})
    assert path == "fp16.enabled"
    assert message.startswith("expected true or false, got ")


def test_all_faults_are_reported_at_once():
    faults = faults_of(
        {
            "train_batch_size": True,
            "fp16": {"enabled": 1, "loss_scale": -1},
            "optimizer": {"type": "Adam", "params": {"lr": -1, "betas": [0.9], "lrr": 3}},
            "zero_optimization": {"stage": 9},
            "wandb": 7,
            "checkpoint": {"tag_validation": "maybe"},
        }
    )
    assert faults.keys() == {
        "train_batch_size",
        "fp16.enabled",
        "fp16.loss_scale",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.lrr",
        "zero_optimization.stage",
        "wandb",
        "checkpoint.tag_validation",
    }
    assert faults["optimizer.params.betas"] == (
        "expected a list of 2, each a number >= 0 and < 1, got [0.9] (a list)"
    )
    assert faults["wandb"] == "expected an object, got 7"


def test_auto_batch_sizes_are_inferred():
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "auto",
    )
    config = load_config(auto, world_size=4)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (4, 1)
    assert config.gradient_accumulation_steps == 1
    assert config.notes == (
        'train_micro_batch_size_per_gpu: no batch size is given and some are "auto"; using 1',
    )
    config = load_config(auto | {"train_batch_size": 32}, world_size=4)
    assert config.train_micro_batch_size_per_gpu == 8
    assert config.notes == ()


UNPREFIXED = {"prefetch_bucket_size": 4, "max_reuse_distance": 5, "max_live_parameters": 6}


@pytest.mark.parametrize(("name", "value"), UNPREFIXED.items())
def test_unprefixed_names(name, value):
    config = load_config(with_zero(stage=3, **{name: value}))
    assert getattr(config.zero_optimization, f"stage3_{name}") == value
    assert config.origins[f"zero_optimization.stage3_{name}"] == "you"
    assert all(note.endswith("has no effect") for note in config.notes)
    both = with_zero(stage=3, **{name: value, f"stage3_{name}": value})
    assert only_fault(both) == (
        f"zero_optimization.{name}",
        f'duplicates "stage3_{name}", which is given too; keep "stage3_{name}"',
    )


@pytest.mark.parametrize("old", [True, False])
def test_an_old_name_together_with_the_new_one_is_a_fault(old):
    name = "stage3_gather_fp16_weights_on_model_save"
    new = "stage3_gather_16bit_weights_on_model_save"
    assert only_fault(with_zero(**{name: old, new: True}))[0] == f"zero_optimization.{name}"
    config = load_config(with_zero(**{name: old}))
    assert getattr(config.zero_optimization, new) is old
    assert f'zero_optimization.{name}: an old name, read as "{new}"' in config.notes


def test_boolean_zero():
    config = load_config({**BASE, "zero_optimization": True, "allgather_size": 400})
    assert config.zero_optimization.stage == 1
    assert config.zero_optimization.allgather_bucket_size == 400
    assert len(config.notes) == 2
    config = load_config({**BASE, "zero_optimization": False})
    assert config.zero_optimization.stage == 0
    assert "old form of stage 0" in config.notes[0]


def test_boolean_clipping():
    for given, norm in ((True, 1.0), (False, 0.0)):
        config = load_config({**BASE, "gradient_clipping": given})
        assert config.gradient_clipping == norm
        assert config.notes == (f"gradient_clipping: {str(given).lower()} is read as {norm}",)


def test_allgather_size_with_a_section_is_ignored_and_logged():
    config = load_config({**with_zero(stage=1), "allgather_size": 400})
    assert config.zero_optimization.allgather_bucket_size == 500_000_000
    assert "ignored" in config.notes[0]


def test_bfloat16():
    config = load_config({**BASE, "bfloat16": {"enabled": True}})
    assert config.bf16.enabled
    assert config.notes == ('bfloat16: an old name, read as "bf16"',)
    both = {**BASE, "bfloat16": {"enabled": True}, "bf16": {"enabled": True}}
    assert only_fault(both)[0] == "bfloat16"


def test_fp32_allreduce():
    config = load_config({**BASE, "fp32_allreduce": True})
    assert config.communication_data_type == "fp32"
    assert config.notes[0].startswith("fp32_allreduce: an old name")
    assert load_config({**BASE, "fp32_allreduce": False}).communication_data_type is None
    both = {**BASE, "fp32_allreduce": True, "communication_data_type": "fp16"}
    assert only_fault(both)[0] == "fp32_allreduce"
    assert only_fault({**BASE, "fp32_allreduce": "yes"})[0] == "fp32_allreduce"


def test_a_key_of_another_program_inside_fp16():
    config = load_config({**BASE, "fp16": {"fp16": True, "enabled": True}})
    assert config.fp16.enabled
    assert config.notes[0].startswith("fp16.fp16: ignored: ")


def test_cpu_offload_params():
    config = load_config(with_zero(stage=3, cpu_offload_params=True), allow_unbuilt=True)
    assert config.zero_optimization.offload_param.device == "cpu"


def test_cpu_offload():
    config = load_config(
        with_zero(stage=3, cpu_offload=True, cpu_offload_param=True), allow_unbuilt=True
    )
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert config.zero_optimization.offload_param.device == "cpu"
    config = load_config(with_zero(cpu_offload=False, cpu_offload_use_pin_memory=True))
    assert config.zero_optimization.offload_optimizer is None
    assert any("cpu_offload_use_pin_memory: ignored" in note for note in config.notes)
    both = with_zero(cpu_offload=False, offload_optimizer={"device": "none"})
    path, message = only_fault(both)
    assert path == "zero_optimization.cpu_offload"
    assert 'remove "cpu_offload"' in message
    assert only_fault(with_zero(cpu_offload="yes"))[0] == "zero_optimization.cpu_offload"


def test_documented_keys_that_were_never_fields():
    config = load_config(
        with_zero(grad_hooks=True)
        | {"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1}}
    )
    assert config.bf16.enabled
    assert config.zero_optimization.grad_hooks
    scaled = next(note for note in config.notes if "never scaled" in note)
    assert scaled.startswith("bf16.loss_scale, bf16.hysteresis, bf16.min_loss_scale: ignored")


@pytest.mark.parametrize(
    ("section", "old", "new", "value"),
    [
        ("aio", "thread_count", "intra_op_parallelism", 4),
        ("elasticity", "prefer_large_batch", "prefer_larger_batch", False),
        ("autotuning", "start_step", "start_profile_step", 4),
        ("autotuning", "end_step", "end_profile_step", 9),
    ],
)
def test_names_that_were_ignored_in_silence(section, old, new, value):
    config = load_config({**BASE, section: {old: value}})
    assert getattr(getattr(config, section), new) == value
    assert config.origins[f"{section}.{new}"] == "you"
    told, *idle = config.notes
    assert told == f'{section}.{old}: an old name, read as "{new}"'
    assert all(note.startswith(f"{section}.{new}: has no effect without") for note in idle)
    path, _ = only_fault({**BASE, section: {old: value, new: value}})
    assert path == f"{section}.{old}"


@pytest.mark.claims("data_efficiency.curriculum_learning", "data_efficiency.random_ltd")
def test_old_places_in_data_efficiency():
    config = load_config(
        {
            **BASE,
            "data_efficiency": {
                "curriculum_learning": {"enabled": False, "min_difficulty": 8},
                "random_ltd": {"enabled": False, "total_layer_num": 24},
            },
        }
    )
    assert config.curriculum_learning.min_difficulty == 8
    assert config.data_efficiency.data_routing.random_ltd.total_layer_num == 24
    assert len(config.notes) == 2
    curriculum = {"enabled": False}
    both = {**BASE, "curriculum_learning": curriculum}
    both["data_efficiency"] = {"curriculum_learning": curriculum}
    assert only_fault(both)[0] == "data_efficiency.curriculum_learning"


def test_the_inner_switches_decide_but_for_an_outer_one_that_contradicts():
    inner = {"dynamic_batching": {"enabled": True, "max_tokens": 8}}
    source = {**BASE, "data_efficiency": {"data_sampling": inner}}
    path = "data_efficiency.data_sampling.dynamic_batching.enabled"
    assert load_config(source).data_efficiency.data_sampling.dynamic_batching.enabled
    source["data_efficiency"]["enabled"] = False
    faults = faults_of(source)
    assert path in faults["data_efficiency.enabled"]
    assert load_config({**BASE, "data_efficiency": {"enabled": True}}).notes == ()


@pytest.mark.parametrize("section", ["amp", "curriculum_learning", "progressive_layer_drop"])
def test_sections_that_require_enabled(section):
    path, message = only_fault({**BASE, section: {}})
    assert path == f"{section}.enabled"
    assert "add it" in message
    load_config({**BASE, section: {"enabled": False}})
    load_config({**BASE, section: None})


def test_sections_that_are_null_are_absent():
    config = load_config({**BASE, "fp16": None, "aio": None, "optimizer": None, "wandb": None})
    assert config.fp16.enabled is False
    assert config.aio.queue_depth == 8
    assert config.optimizer is None
    assert config.notes == ()


def test_misplaced_arg_mappings_find_home():
    config = load_config({**BASE, "arg_mappings": {"gradient_accumulation_steps ": "--gas"}})
    assert config.autotuning.arg_mappings == {"gradient_accumulation_steps": "--gas"}
    both = {**BASE, "arg_mappings": {}, "autotuning": {"arg_mappings": {"a": "--a"}}}
    assert only_fault(both)[0] == "arg_mappings"


def test_an_uneven_vocabulary_is_reported():
    config = load_config({**BASE, "vocabulary_size": 100})
    assert config.notes[0].startswith("vocabulary_size: 100 is not a multiple of 8")


def test_immovable_states_are_reported():
    faults = faults_of({**BASE, "data_efficiency": {"data_routing": 3, "random_ltd": {}}})
    assert "data_efficiency.data_routing.random_ltd" in faults["data_efficiency.random_ltd"]
    faults = faults_of({**BASE, "autotuning": 3, "arg_mappings": {}})
    assert faults["autotuning"] == "expected an object, got 3"
    assert "autotuning.arg_mappings" in faults["arg_mappings"]
