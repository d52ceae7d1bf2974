"""Contradictions, each with its path and the remedy."""

import pytest

from hadal.config import load_config

from .faults import BASE, faults_of, only_fault, with_zero

FP16, BF16 = {"enabled": True}, {"enabled": True}
ADAM = {"type": "Adam", "params": {}}
CPU = {"device": "cpu"}


def amp(**keys):
    return {"amp": {"enabled": True, **keys}}


def elastic(**more):
    return {
        "elasticity": {
            "enabled": True,
            "max_train_batch_size": 64,
            "micro_batch_sizes": [2, 4],
            **more,
        }
    }


def pruned(**shared):
    return {"compression_training": {"head_pruning": {"shared_parameters": shared}}}


CONTRADICTIONS = [
    ({"fp16": FP16, "bf16": BF16}, "bf16.enabled", "keep one"),
    ({"amp": {"enabled": True}, **with_zero(stage=1)}, "amp.enabled", "stage 0, got 1"),
    ({"amp": {"enabled": True}, "bf16": BF16}, "amp.enabled", "bf16.enabled is true too"),
    ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale", "expected a number >= 0, got -1"),
    ({"fp16": {"loss_scale": True}}, "fp16.loss_scale", "got true (a boolean)"),
    ({"fp16": {"loss_scale": float("inf")}}, "fp16.loss_scale", "expected a number >= 0"),
    ({"fp16": {"loss_scale": float("nan")}}, "fp16.loss_scale", "expected a number >= 0"),
    ({"fp16": {"loss_scale_window": True}}, "fp16.loss_scale_window", "got true (a boolean)"),
    ({"fp16": {"min_loss_scale": False}}, "fp16.min_loss_scale", "got false (a boolean)"),
    ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis", "expected an integer >= 1, got 0"),
    ({"data_types": {"buffer_dtype": "fp8"}}, "data_types.buffer_dtype", '"fp32", "fp16"'),
    (
        {"fp16": {**FP16, "loss_scale_window": 0}},
        "fp16.loss_scale_window",
        "expected an integer > 0, got 0",
    ),
    (
        {"fp16": {**FP16, "min_loss_scale": -1}},
        "fp16.min_loss_scale",
        "expected an integer > 0, got -1",
    ),
    ({"fp16": {"min_loss_scale": 0.5}}, "fp16.min_loss_scale", "an integer"),
    (
        {"fp16": {**FP16, "fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads",
        "raise the stage",
    ),
    (
        {"bf16": {**BF16, "bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads",
        "raise the stage",
    ),
    (
        {"bf16": {**BF16, "bf16_optimizer_states": True}},
        "bf16.bf16_optimizer_states",
        "raise the stage",
    ),
    (
        {"bf16": {**BF16, "bf16_optimizer_states": True}, **with_zero(stage=2)},
        "bf16.bf16_optimizer_states",
        "enable that too",
    ),
    ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", "leave it out"),
    (
        {
            "torch_autocast": {"enabled": True},
            **with_zero(stage=3, zero_quantized_weights=True),
        },
        "torch_autocast.enabled",
        "keep one",
    ),
    (
        {
            "bf16": {**BF16, "immediate_grad_update": True},
            "data_types": {"grad_accum_dtype": "bf16"},
        },
        "bf16.immediate_grad_update",
        "leave one of them out",
    ),
    ({"data_types": {"keep_in_fp32_modules": "norm"}}, "data_types.keep_in_fp32_modules", "a list"),
    ({"data_types": {"keep_in_fp32_modules": 3}}, "data_types.keep_in_fp32_modules", "a list"),
    (
        {"data_types": {"keep_in_fp32_modules": ["norm", "*a"]}},
        "data_types.keep_in_fp32_modules[1]",
        "not a valid regular expression",
    ),
    (
        {"torch_autocast": {"enabled": True}, "fp16": {"loss_scale_window": 0}},
        "fp16.loss_scale_window",
        "expected an integer > 0",
    ),
    ({**amp(), "fp16": FP16}, "amp.enabled", "fp16.enabled is true too"),
    ({**amp(), "torch_autocast": {"enabled": True}}, "amp.enabled", "torch_autocast.enabled is"),
    (amp(cast_model_type="fp16"), "amp.cast_model_type", "without cast_model_type"),
    (
        amp(opt_level="O2", patch_torch_functions=True),
        "amp.patch_torch_functions",
        "without patch_torch_functions",
    ),
    (amp(min_loss_scale=4, max_loss_scale=2), "amp.min_loss_scale", "lower it"),
    (amp(loss_scale="fast"), "amp.loss_scale", 'expected "dynamic", a number > 0 or null'),
    (amp(opt_level="O4"), "amp.opt_level", '"O0", "O1", "O2" or "O3"'),
    (amp(keep_batchnorm_fp23=True), "amp.keep_batchnorm_fp23", '"keep_batchnorm_fp32"'),
    ({"torch_autocast": {"dtype": "fp8"}}, "torch_autocast.dtype", '"bf16", "fp16" or null'),
    (
        {"optimizer": {"type": "lamb"}, "fp16": {"loss_scale": 128}},
        "fp16.loss_scale",
        "Lamb needs a dynamic scale; set 0",
    ),
    ({"communication_data_type": "int8"}, "communication_data_type", '"fp32", "fp16"'),
    (
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm",
        "gradient_clipping",
    ),
    ({"optimizer": {"type": "OneBitAdam"}, **with_zero(stage=1)}, "optimizer.type", "stage 0"),
    (
        {"optimizer": {"type": "ZeroOneAdam"}, **with_zero(stage=0, enable_sanity_checks=True)},
        "zero_optimization.enable_sanity_checks",
        "local_step_clipper 1",
    ),
    ({"scheduler": {"type": "warmuplr"}}, "scheduler.type", 'did you mean "WarmupLR"?'),
    (with_zero(stage=4), "zero_optimization.stage", "expected 0, 1, 2 or 3, got 4"),
    (with_zero(stage=-1), "zero_optimization.stage", "expected 0, 1, 2 or 3, got -1"),
    (with_zero(stage=True), "zero_optimization.stage", "got true (a boolean)"),
    (
        with_zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        "zero_optimization.offload_optimizer.ratio",
        "set 1 or raise the stage",
    ),
    (
        with_zero(offload_param={"device": "tpu"}),
        "zero_optimization.offload_param.device",
        '"none", "cpu" or "nvme", got "tpu" (a string)',
    ),
    (
        with_zero(stage=3, offload_param={"device": "nvme"}),
        "zero_optimization.offload_param.nvme_path",
        "add it",
    ),
    ({"prescale_gradients": True, **with_zero(stage=2)}, "prescale_gradients", "remove it"),
    (
        {"gradient_predivide_factor": 2, **with_zero(stage=3)},
        "gradient_predivide_factor",
        "2.0 cannot be combined with zero_optimization.reduce_scatter at stage 3",
    ),
    (
        {"prescale_gradients": True, **with_zero(stage=3)},
        "prescale_gradients",
        "true cannot be combined with zero_optimization.reduce_scatter at stage 3; remove it or"
        " disable zero_optimization.reduce_scatter",
    ),
    (
        {"gradient_predivide_factor": 0.5, **with_zero(stage=2)},
        "gradient_predivide_factor",
        "0.5 cannot be combined with zero_optimization.reduce_scatter at stage 2",
    ),
    ({"gradient_predivide_factor": 0}, "gradient_predivide_factor", "expected a number > 0, got 0"),
    ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op", '"mean" or "sum"'),
    ({"gradient_clipping": -1}, "gradient_clipping", "expected a number >= 0, got -1"),
    (
        with_zero(reduce_bucket_size=0),
        "zero_optimization.reduce_bucket_size",
        "expected an integer > 0, got 0",
    ),
    (
        with_zero(stage=3, zero_hpz_partition_size=8, mics_shard_size=4),
        "zero_optimization.zero_hpz_partition_size",
        "8 saves nothing when weights are gathered over the 4 ranks of",
    ),
    (
        with_zero(stage=3, zero_hpz_partition_size=4, mics_shard_size=6),
        "zero_optimization.zero_hpz_partition_size",
        "4 does not divide zero_optimization.mics_shard_size, 6; use a divisor",
    ),
    (
        with_zero(stage=3, zero_quantized_gradients=True, reduce_scatter=False),
        "zero_optimization.zero_quantized_gradients",
        "enable that",
    ),
    (
        with_zero(stage=2, zero_quantized_gradients=True, reduce_scatter=False),
        "zero_optimization.zero_quantized_gradients",
        "enable that",
    ),
    (
        with_zero(stage=2, zeropp_loco_param={"err_beta": 0.5}),
        "zero_optimization.zeropp_loco_param",
        "needs zero_optimization.zero_quantized_gradients",
    ),
    (with_zero(legacy_stage1=True), "zero_optimization.legacy_stage1", "expected false"),
    (
        {"gradient_allreduce_op": "SUM", **with_zero(stage=3)},
        "gradient_allreduce_op",
        '"sum" cannot be combined with zero_optimization.stage 3; use "mean"',
    ),
    (
        {"gradient_allreduce_op": "sum", **with_zero(stage=2, zenflow={})},
        "gradient_allreduce_op",
        '"sum" cannot be combined with zero_optimization.zenflow; use "mean"',
    ),
    (
        {"gradient_allreduce_op": "sum", "compile": {"deepcompile": True}},
        "gradient_allreduce_op",
        '"sum" cannot be combined with compile.deepcompile; use "mean"',
    ),
    (
        with_zero(compute_grad_norm=False),
        "zero_optimization.compute_grad_norm",
        "needs zero_optimization.stage 1 or 2, got 0",
    ),
    (
        {"gradient_clipping": 0, **with_zero(stage=2, compute_grad_norm=False, zenflow={})},
        "zero_optimization.compute_grad_norm",
        "false cannot be combined with zero_optimization.zenflow; change that or leave it out",
    ),
    (
        {
            "gradient_clipping": 0,
            **with_zero(stage=1, compute_grad_norm=False, offload_optimizer=CPU),
        },
        "zero_optimization.compute_grad_norm",
        "cannot be combined with zero_optimization.offload_optimizer",
    ),
    (
        with_zero(stage=3, compute_grad_norm=False),
        "zero_optimization.compute_grad_norm",
        "needs zero_optimization.stage 1 or 2, got 3",
    ),
    (
        with_zero(stage=2, compute_grad_norm=False),
        "zero_optimization.compute_grad_norm",
        "needs gradient_clipping 0",
    ),
    (
        {
            **with_zero(stage=1),
            "tensor_parallel": {"autotp_size": 2},
            "compile": {"deepcompile": True, "passes": ["autotp", "z1"]},
        },
        "compile.passes",
        "cannot be combined with others",
    ),
    (
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 4}}},
        "tensor_parallel.tp.tp_size",
        "leave it out",
    ),
    (
        {
            "activation_checkpointing": {
                "contiguous_memory_optimization": True,
                "number_checkpoints": 4,
            }
        },
        "activation_checkpointing.contiguous_memory_optimization",
        "enable that too",
    ),
    ({"autotuning": {"exps_dir": ""}}, "autotuning.exps_dir", "that is not empty"),
    (
        {"checkpoint": {"tag_validation": "x"}},
        "checkpoint.tag_validation",
        '"Ignore", "Warn" or "Fail"',
    ),
    (
        {"checkpoint": {"parallel_write": {"pipeline_stage": 1}}},
        "checkpoint.parallel_write.pipeline_stage",
        "true or false",
    ),
    ({"checkpoint": {"writer": {"type": "x"}}}, "checkpoint.writer.type", '"mock"'),
    ({"checkpoint": {"writer": {"data_parallel": "x"}}}, "checkpoint.writer.data_parallel", ""),
    ({"sparse_attention": {"mode": "x"}}, "sparse_attention.mode", '"bslongformer"'),
    ({"sparse_attention": {"blok": 16}}, "sparse_attention.blok", 'did you mean "block"'),
    ({"sparse_attention": {"block": 0}}, "sparse_attention.block", "> 0"),
    (
        {"sparse_attention": {"num_local_blocks": 4, "num_global_blocks": 3}},
        "sparse_attention.num_local_blocks",
        "not a multiple of num_global_blocks 3",
    ),
    (
        {"sparse_attention": {"num_different_global_patterns": 4}},
        "sparse_attention.num_different_global_patterns",
        "needs different_layout_per_head true",
    ),
    (
        {
            "sparse_attention": {
                "different_layout_per_head": True,
                "num_different_global_patterns": 5,
            }
        },
        "sparse_attention.num_different_global_patterns",
        "= 4; lower it",
    ),
    (
        {"sparse_attention": {"attention": "unidirectional", "horizontal_global_attention": True}},
        "sparse_attention.horizontal_global_attention",
        'needs attention "bidirectional"',
    ),
    (
        {"sparse_attention": {"mode": "variable", "local_window_blocks": []}},
        "sparse_attention.local_window_blocks",
        "at least one size",
    ),
    (
        {"sparse_attention": {"mode": "variable", "global_block_indices": [-1]}},
        "sparse_attention.global_block_indices",
        ">= 0, got -1",
    ),
    (
        {
            "sparse_attention": {
                "mode": "bslongformer",
                "global_block_indices": [2],
                "global_block_end_indices": [2],
            }
        },
        "sparse_attention.global_block_end_indices",
        "is not after its start 2",
    ),
    (
        {
            "sparse_attention": {
                "mode": "bslongformer",
                "global_block_indices": [0, 2],
                "global_block_end_indices": [2],
            }
        },
        "sparse_attention.global_block_end_indices",
        "expected 2 ends",
    ),
    (
        {"sparse_attention": {"mode": "bigbird", "num_sliding_window_blocks": 4}},
        "sparse_attention.num_sliding_window_blocks",
        "expected an odd number, got 4",
    ),
    (
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
        "add it",
    ),
    (
        {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}},
        "data_efficiency.data_sampling.dynamic_batching.max_tokens",
        "add it",
    ),
    (
        {
            "data_efficiency": {
                "data_routing": {
                    "random_ltd": {
                        "enabled": True,
                        "random_ltd_layer_num": 2,
                        "random_ltd_layer_id": [1],
                    }
                }
            }
        },
        "data_efficiency.data_routing.random_ltd.random_ltd_layer_num",
        "set 1",
    ),
    (
        pruned(enabled=True, num_heads=4),
        "compression_training.head_pruning.different_groups",
        "add it",
    ),
    (
        pruned(enabled=True),
        "compression_training.head_pruning.shared_parameters.num_heads",
        "add it",
    ),
    (
        {"expert_parallel": {"load_balance_coeff": 0.1}},
        "expert_parallel.load_balance_coeff",
        "expected null",
    ),
    (
        {"expert_parallel": {"enabled": True, "num_expert_groups": 2}},
        "expert_parallel.num_limited_groups",
        "add it",
    ),
    (
        {
            "expert_parallel": {
                "enabled": True,
                "num_expert_groups": 2,
                "num_limited_groups": 3,
            }
        },
        "expert_parallel.num_limited_groups",
        "3 is more than num_expert_groups 2",
    ),
    ({"hybrid_engine": {"max_out_tokens": 0}}, "hybrid_engine.max_out_tokens", "> 0"),
    ({"elasticity": {"enabled": True}}, "elasticity.max_train_batch_size", "add it"),
    (elastic(micro_batch_sizes=[2, 0]), "elasticity.micro_batch_sizes", "each an integer"),
    (elastic(micro_batch_sizes=[128]), "elasticity.micro_batch_sizes", "128 is more than"),
    (elastic(min_gpus=4, max_gpus=2), "elasticity.max_gpus", "less than min_gpus 4"),
    (elastic(version=0.3), "elasticity.version", "expected 0.1 or 0.2"),
    (
        elastic(version=0.1, model_parallel_size=2),
        "elasticity.model_parallel_size",
        "needs version 0.2",
    ),
]


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    CONTRADICTIONS,
    ids=[path for _, path, _ in CONTRADICTIONS],
)
def test_a_contradiction_is_reported_at_its_path(keys, path, words):
    faults = faults_of({**BASE, **keys})
    assert words in faults[path]


SOUND = [
    {"fp16": {"loss_scale_window": 0, "min_loss_scale": 0}},
    {"fp16": {**FP16, "loss_scale": 128, "loss_scale_window": 0}},
    {"bf16": BF16, "data_types": {"grad_accum_dtype": "FP32"}, **with_zero(stage=1)},
    # Offload to a CPU's own Adam is the need of other kernels.
    {"fp16": {**FP16, "fp16_master_weights_and_grads": True}, **with_zero(stage=1)},
    {"bf16": {**BF16, "bf16_master_weights_and_grads": True}, **with_zero(stage=2)},
    {
        "bf16": {
            **BF16,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
            "immediate_grad_update": False,
        },
        **with_zero(stage=3),
    },
    {"bf16": {**BF16, "immediate_grad_update": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    amp(opt_level="O2", loss_scale="128", keep_batchnorm_fp32="True"),
    # Every stage accumulates in any dtype here, the one without sharding too.
    {"bf16": BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    {"bf16": BF16, "data_types": {"param_dtype": "bf16"}},
    {"communication_data_type": "BF16"},
    {"prescale_gradients": True, **with_zero(stage=1)},
    {"prescale_gradients": True, **with_zero(stage=3, reduce_scatter=False)},
    {"gradient_predivide_factor": 2, **with_zero(stage=1)},
    {"gradient_predivide_factor": 2, **with_zero(stage=2, reduce_scatter=False)},
    {"gradient_allreduce_op": "Sum", "gradient_predivide_factor": 2, **with_zero(stage=2)},
    {"gradient_clipping": 0, **with_zero(stage=2, compute_grad_norm=False)},
    {"optimizer": {"type": "ADAMW", "params": {"lr": 1}}},
    {"optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}},
    {"scheduler": {"type": "StepLR", "params": {"step_size": 3}}},
    {"gradient_clipping": 0},
    with_zero(stage="3"),
    with_zero(stage=2, offload_param={"device": "cpu"}),
    with_zero(stage=3, offload_param={}, offload_optimizer={}),
    with_zero(stage=3, allgather_bucket_size=5),
    {"checkpoint": {"tag_validation": "FAIL"}},
]


@pytest.mark.parametrize("keys", SOUND)
def test_intact_files_load(keys):
    load_config({**BASE, **keys})


def test_values_are_normalised():
    config = load_config(
        {
            **BASE,
            "communication_data_type": "BF16",
            "optimizer": {"type": "aDaMw", "params": {"lr": "1e-3", "betas": [0, "0.9"]}},
            "checkpoint": {"tag_validation": "ignore"},
            "torch_autocast": {"enabled": False, "dtype": "torch.float16"},
            "zero_optimization": {"leaf_module": {"names": "a.b"}},
        }
    )
    assert config.communication_data_type == "bf16"
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params == {"lr": 0.001, "betas": (0.0, 0.9)}
    assert config.checkpoint.tag_validation == "Ignore"
    assert config.torch_autocast.dtype == "fp16"
    assert config.zero_optimization.leaf_module.names == ["a.b"]


@pytest.mark.claims("zero_optimization.legacy_stage1")
def test_the_first_form_of_stage_1_is_refused():
    assert only_fault(with_zero(stage=1, legacy_stage1=True)) == (
        "zero_optimization.legacy_stage1",
        "expected false, got true (a boolean)",
    )
    load_config(with_zero(stage=1, legacy_stage1=False))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_is_true_wherever_something_can(stage):
    config = load_config(with_zero(stage=stage))
    assert config.zero_optimization.overlap_comm is True
    unmanaged = load_config({**with_zero(stage=stage), "managed_gradient_accumulation": False})
    assert unmanaged.zero_optimization.overlap_comm is (stage >= 2)
    assert config.origins["zero_optimization.overlap_comm"] == "default"
    config = load_config(with_zero(stage=stage, overlap_comm=False))
    assert config.zero_optimization.overlap_comm is False
    assert config.origins["zero_optimization.overlap_comm"] == "you"


def test_no_contradiction_follows_from_a_faulty_key():
    # Were the faulty stage taken as its default, 0, masters in bf16 would be refused too.
    keys = {"bf16": {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    faults = faults_of({**keys, **with_zero(stage="three")})
    assert "raise the stage" not in " ".join(faults.values())


def test_schedules_must_have_a_length():
    path, message = only_fault({**BASE, "scheduler": {"type": "WarmupDecayLR"}})
    assert path == "scheduler.params.total_num_steps"
    assert "add it" in message
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}
    assert only_fault({**BASE, "scheduler": cycle})[0] == "scheduler.params.cycle_max_lr"
    assert only_fault({**BASE, "scheduler": {"params": {}}})[0] == "scheduler.type"


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_schedule_of_no_updates_is_for_evaluation_alone(kind):
    source = {**BASE, "scheduler": {"type": kind, "params": {"total_num_steps": 0}}}
    assert load_config(source).notes == ()
    path, message = only_fault({**source, "optimizer": ADAM})
    assert path == "scheduler.params.total_num_steps"
    assert message == "expected an integer > 0, got 0"
    source["scheduler"]["params"]["total_num_steps"] = -1
    assert only_fault(source)[1] == "expected an integer >= 0 or null, got -1"


def test_the_brought_optimizer_makes_the_section_step_back():
    source = {**BASE, "optimizer": {"type": "OneBitLamb"}}
    assert load_config(source).notes == ()
    config = load_config(source, client_optimizer=True)
    assert config.notes == ("optimizer: ignored: the program passes its own optimizer",)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("scatters", [True, False])
def test_muon_works_at_every_stage(stage, scatters):
    """However gradients are reduced, a matrix's owner is sent all of its own."""
    zero = with_zero(stage=stage, reduce_scatter=scatters)
    load_config({**BASE, "optimizer": {"type": "Muon"}, **zero})


def test_torch_keywords_need_torch_adam():
    params = {"fused": True}
    path, message = only_fault({**BASE, "optimizer": {"type": "Adam", "params": params}})
    assert path == "optimizer.params.fused"
    assert "add torch_adam: true" in message


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_type_must_be_named(section):
    path, message = only_fault({**BASE, section: {"type": "auto"}})
    assert (path, message) == (
        f"{section}.type",
        f'"auto" was not replaced by any program; name the {section}',
    )


@pytest.mark.parametrize(
    ("written", "shared", "silent"),
    [
        ("communication_data_type", 2, "seq_parallel_communication_data_type"),
        ("seq_parallel_communication_data_type", 1, "communication_data_type"),
    ],
)
def test_a_wire_dtype_without_effect_is_reported(written: str, shared: int, silent: str) -> None:
    for key in (written, silent):
        text = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": shared, key: "bf16"}
        told = [note for note in load_config(text, world_size=2).notes if "has no effect" in note]
        assert [note.split(":")[0] for note in told] == ([written] if key == written else [])


@pytest.mark.parametrize("name", ["zero_hpz_partition_size", "mics_shard_size"])
def test_blocks_must_divide_the_ranks_that_share_weights(name):
    path, message = only_fault(with_zero(stage=3, **{name: 4}), world_size=2)
    assert path == f"zero_optimization.{name}"
    assert message.startswith("4 does not divide the 2 ranks that share the weights")
    for stage, brought in (
        (3, {"world_size": 8}),
        (3, {"world_size": 8, "sequence_parallel_size": 4}),
        (3, {}),  # one rank shares with nobody
        (2, {"world_size": 2}),
    ):
        load_config(with_zero(stage=stage, **{name: 4}), **brought)
    # Parts of the model share no weights.
    parts = {"world_size": 8, "data_parallel_size": 2, "sequence_parallel_size": 1}
    assert "the 2 ranks" in only_fault(with_zero(stage=3, **{name: 4}), **parts)[1]


SAMPLING = {"num_epochs": 3, "num_workers": 2, "pin_memory": True}
QUANTIZED = {"enabled": True, "schedule_offset": 1}
BITS = {"one": {"params": {"bits": 8}, "modules": ["*"]}}


def quantized(**shared):
    section = {"shared_parameters": {**QUANTIZED, **shared}, "different_groups": BITS}
    return {"compression_training": {"activation_quantization": section}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            {"data_efficiency": {"seed": 7, "data_sampling": SAMPLING}},
            "data_efficiency.seed, data_efficiency.data_sampling.num_epochs,"
            " data_efficiency.data_sampling.num_workers, data_efficiency.data_sampling.pin_memory:"
            " has no effect without curriculum_learning or dynamic_batching in data_sampling",
        ),
        (
            {
                "data_efficiency": {
                    "seed": 7,
                    "data_sampling": {
                        **SAMPLING,
                        "dynamic_batching": {"enabled": True, "max_tokens": 9},
                    },
                }
            },
            None,
        ),
        ({"data_efficiency": {"enabled": False, "seed": 7}}, None),
        (
            {"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}},
            "comms_logger.prof_ops: has no effect unless prof_all, which records all, is false",
        ),
        (
            {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}},
            None,
        ),
        (
            quantized(),
            "compression_training.activation_quantization.shared_parameters.range_calibration:"
            ' not set: "dynamic", as in DeepSpeed\'s code (its documentation says "static")',
        ),
        (quantized(range_calibration="dynamic"), None),
    ],
)
def test_settings_that_do_less_than_expected_are_told(text, told):
    assert load_config({**BASE, **text}).notes == (() if told is None else (told,))


@pytest.mark.parametrize("name", ["offload_param", "offload_optimizer"])
def test_offloading_needs_a_device(name):
    path, message = only_fault(with_zero(stage=3, **{name: {"pin_memory": True}}))
    assert path == f"zero_optimization.{name}.device"
    assert message == "required in this section; add it"


def test_a_fault_in_one_part_of_a_section_does_not_hide_those_of_other_parts():
    parts = {
        "weight_quantization": {"shared_parameters": {"enabled": "yes"}},
        "head_pruning": {"shared_parameters": {"enabled": True}, "different_groups": {}},
    }
    assert faults_of({**BASE, "compression_training": parts}).keys() == {
        "compression_training.weight_quantization.shared_parameters.enabled",
        "compression_training.head_pruning.shared_parameters.num_heads",
    }
