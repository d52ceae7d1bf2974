"""JSON examples for docs/configuration.md, by section; the sections that have one are built."""

from collections.abc import Mapping
from typing import Any

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "": {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 50,
    },
    "optimizer": {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
    },
    "scheduler": {
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 500, "total_num_steps": 10000},
        },
    },
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}},
    "bf16": {"bf16": {"enabled": True}},
    "amp": {"amp": {"enabled": True, "opt_level": "O1"}},
    "torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "data_types": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "zero_optimization": {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 10000,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "zero_optimization.zeropp_loco_param": {
        "zero_optimization": {
            "stage": 2,
            "zero_quantized_gradients": True,
            "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
        },
    },
    "zero_optimization.offload_param": {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
        },
    },
    "zero_optimization.offload_optimizer": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
    "zero_optimization.leaf_module": {
        "zero_optimization": {
            "stage": 3,
            "leaf_module": {"classes": ["MixtralSparseMoeBlock"]},
        },
    },
    "aio": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
        },
        "aio": {"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 2},
    },
    "timers": {
        "steps_per_print": 50,
        "timers": {"throughput": {"enabled": True, "synchronized": False}},
    },
    "tensorboard": {
        "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "first"},
    },
    "csv_monitor": {
        "csv_monitor": {"enabled": True, "output_path": "runs", "job_name": "first"},
    },
    "wandb": {"wandb": {"enabled": True, "project": "deep", "group": "ablations"}},
    "comet": {"comet": {"enabled": True, "project": "deep", "samples_log_interval": 1000}},
    "jsonl_monitor": {
        "jsonl_monitor": {"enabled": True, "output_path": "runs", "job_name": "first"},
    },
    "monitor": {"csv_monitor": {"enabled": True}, "monitor": {"extra": False}},
    "tensor_parallel": {"tensor_parallel": {"autotp_size": 2}},
    "autotuning": {"autotuning": {"enabled": True, "metric": "throughput"}},
    "flops_profiler": {
        "flops_profiler": {"enabled": True, "profile_step": 5, "output_file": "profile.json"},
    },
    "activation_checkpointing": {
        "activation_checkpointing": {"modules": "units", "cpu_checkpointing": True},
    },
    "sparse_attention": {
        "sparse_attention": {
            "mode": "bigbird",
            "num_random_blocks": 2,
            "num_sliding_window_blocks": 5,
        },
    },
    "curriculum_learning": {
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 64,
            "max_difficulty": 1024,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 10000, "difficulty_step": 8},
        },
    },
    "data_efficiency": {
        "data_efficiency": {
            "data_routing": {
                "random_ltd": {
                    "enabled": True,
                    "total_layer_num": 12,
                    "random_ltd_layer_num": 10,
                    "random_ltd_layer_id": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
                    "model_mask_name": "attention_mask",
                    "model_type": "decoder",
                    "hidden_state_order": "batch_seq_dim",
                    "random_ltd_schedule": {
                        "min_value": 128,
                        "max_value": 1024,
                        "schedule_type": "fixed_linear",
                        "schedule_config": {"require_steps": 10000, "seq_per_step": 16},
                    },
                },
            },
        },
    },
    "progressive_layer_drop": {
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
    },
    "pipeline": {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 32,
        "pipeline": {"activation_checkpoint_interval": 1},
    },
    "hybrid_engine": {
        "zero_optimization": {"stage": 3},
        "hybrid_engine": {"enabled": True},
    },
    "eigenvalue": {
        "eigenvalue": {"enabled": True, "layer_name": "transformer.h", "layer_num": 12},
    },
    "compression_training": {
        "compression_training": {
            "weight_quantization": {
                "shared_parameters": {"enabled": True, "quantize_groups": 64},
                "different_groups": {
                    "all": {
                        "params": {"start_bits": 8, "target_bits": 4, "quantization_period": 200},
                        "modules": ["attention", "mlp"],
                    }
                },
            },
            "activation_quantization": {
                "shared_parameters": {
                    "enabled": True,
                    "range_calibration": "dynamic",
                    "schedule_offset": 200,
                },
                "different_groups": {"all": {"params": {"bits": 8}, "modules": ["mlp"]}},
            },
        },
    },
    "quantize_training": {
        "quantize_training": {
            "enabled": True,
            "quantize_bits": {"start_bits": 16, "target_bits": 8},
            "quantize_schedule": {"quantize_period": 400, "schedule_offset": 0},
            "quantize_groups": 8,
        },
    },
    "expert_parallel": {
        "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"},
    },
    "elasticity": {
        "elasticity": {
            "enabled": True,
            "max_train_batch_size": 2000,
            "micro_batch_sizes": [2, 4, 6],
            "max_gpus": 64,
        },
    },
    "comms_logger": {"comms_logger": {"enabled": True, "debug": True}},
    "checkpoint": {"checkpoint": {"async_save": True, "keep_last": 3}},
    "datastates_ckpt": {"datastates_ckpt": {}},
}
"""Each example is part of a ds_config.json. The empty path is the top level."""

MOST_USED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.type",
    "optimizer.params",
    "scheduler.type",
    "scheduler.params",
    "bf16.enabled",
    "fp16.enabled",
    "fp16.loss_scale",
    "zero_optimization.stage",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "steps_per_print",
    "wall_clock_breakdown",
    "checkpoint.async_save",
)
"""Keys that the page shows first."""
