"""Where each name of the surface leads: `module:name` in Hadal or torch, or a module of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_ENGINE = "hadal.compat.engine"
_VALUES = "hadal.compat.values"
_OPTIMIZERS = "hadal.compat.optimizers"
_TOOLS = "hadal.compat.tools"
_COMM = "hadal.compat.comm"
_RECOMPUTING = "hadal.compat.checkpointing"
_LOG = "hadal.compat.log"
_ZERO = "hadal.compat.zero"

# module of the surface -> {module of ours -> names that are the same there}
_ALIKE: dict[str, dict[str, str]] = {
    "deepspeed": {
        "hadal": "add_config_arguments",
        _ENGINE: "DeepSpeedEngine initialize",
        _COMM: "init_distributed",
        "hadal.compat.accelerator": "get_accelerator",
        _LOG: "logger",
    },
    "deepspeed.accelerator": {"hadal.compat.accelerator": "get_accelerator"},
    "deepspeed.checkpoint.utils": {_TOOLS: "clone_tensors_for_torch_save"},
    "deepspeed.checkpointing": {_RECOMPUTING: "checkpoint configure is_configured reset"},
    "deepspeed.comm": {
        _COMM: "get_rank get_world_size init_distributed",
        "hadal.comm": "get_local_rank is_initialized",
        "torch.distributed": "ReduceOp all_gather all_gather_into_tensor all_gather_object"
        " all_reduce all_to_all all_to_all_single barrier broadcast broadcast_object_list"
        " destroy_process_group gather get_backend get_global_rank get_process_group_ranks"
        " irecv isend monitored_barrier new_group recv reduce reduce_scatter"
        " reduce_scatter_tensor scatter send",
    },
    "deepspeed.ops.adagrad": {_OPTIMIZERS: "DeepSpeedCPUAdagrad"},
    "deepspeed.ops.adam": {_OPTIMIZERS: "DeepSpeedCPUAdam FusedAdam"},
    "deepspeed.ops.lamb": {_OPTIMIZERS: "FusedLamb"},
    "deepspeed.ops.lion": {_OPTIMIZERS: "DeepSpeedCPULion FusedLion"},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        _RECOMPUTING: "checkpoint configure is_configured reset"
    },
    "deepspeed.runtime.base_optimizer": {"hadal.compat.optimizer": "DeepSpeedOptimizer"},
    "deepspeed.runtime.config": {_VALUES: "LAMB_OPTIMIZER ONEBIT_LAMB_OPTIMIZER"},
    "deepspeed.runtime.dataloader": {"hadal": "RepeatingLoader"},
    "deepspeed.runtime.engine": {_ENGINE: "DeepSpeedEngine"},
    "deepspeed.runtime.lr_schedules": {
        "hadal.optim.schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
        "hadal": "add_tuning_arguments",
    },
    "deepspeed.runtime.utils": {_TOOLS: "move_to_device see_memory_usage set_random_seed"},
    "deepspeed.runtime.zero": {
        _ZERO: "GatheredParameters Init register_external_parameter unregister_external_parameter",
        _VALUES: "ZeroParamStatus",
    },
    "deepspeed.runtime.zero.config": {_VALUES: "ZeroStageEnum"},
    "deepspeed.runtime.zero.offload_config": {_VALUES: "OffloadDeviceEnum OffloadStateTypeEnum"},
    "deepspeed.runtime.zero.partition_parameters": {
        _ZERO: "GatheredParameters Init register_external_parameter unregister_external_parameter",
        "hadal.compat.accelerator": "get_accelerator",
        _VALUES: "ZeroParamStatus",
    },
    "deepspeed.runtime.zero.stage3": {
        "hadal.zero": "estimate_zero3_model_states_mem_needs_all_cold"
        " estimate_zero3_model_states_mem_needs_all_live"
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "hadal.zero": "estimate_zero2_model_states_mem_needs_all_cold"
        " estimate_zero2_model_states_mem_needs_all_live"
    },
    "deepspeed.utils": {
        "hadal": "RepeatingLoader set_z3_leaf_modules unset_z3_leaf_modules",
        "hadal.comm": "is_initialized",
        "hadal.utils": "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state"
        " safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state"
        " safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state"
        " safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state",
        _LOG: "log_dist logger",
    },
    "deepspeed.utils.logging": {_LOG: "log_dist logger"},
    "deepspeed.utils.zero_to_fp32": {
        "hadal.utils": "convert_zero_checkpoint_to_fp32_state_dict"
        " get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint"
    },
    "deepspeed.utils.tensor_fragment": {
        "hadal.utils": "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state"
        " safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state"
        " safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state"
        " safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state",
        "hadal.compat.values": "fragment_address",
    },
    "deepspeed.zero": {
        _ZERO: "GatheredParameters Init register_external_parameter unregister_external_parameter",
    },
}
# What has another name here.
_OTHERS: dict[str, str] = {
    "deepspeed.__git_branch__": f"{_VALUES}:NO_GIT",
    "deepspeed.__git_hash__": f"{_VALUES}:NO_GIT",
    "deepspeed.dist": "deepspeed.comm",
    "deepspeed.OnDevice": f"{_ZERO}:OnDevice",
    "deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": (
        f"{_ZERO}:zero_wrapper_for_fp_tensor_constructor"
    ),
    "deepspeed.zero.MiCS_Init": f"{_ZERO}:MiCS_Init",
    "deepspeed.runtime.dataloader.DeepSpeedDataLoader": "hadal.engine.loader:ShardedLoader",
    "deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES": f"{_VALUES}:VALID_LR_SCHEDULES",
    "deepspeed.runtime.zero.partition_parameters._orig_torch_arange": "torch:arange",
}


def _alike() -> Iterator[tuple[str, str]]:
    for module, rooms in _ALIKE.items():
        for room, names in rooms.items():
            for name in _words(names):
                yield f"{module}.{name}", f"{room}:{name}"


def _words(names: str) -> Iterable[str]:
    return names.split()


HOMES: dict[str, str] = {**dict(_alike()), **_OTHERS}
"""Full name on the surface -> where it leads."""
