"""Methods with which DeepSpeed's engines report their configuration: one per key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hadal.compat.efficiency import (
    CurriculumScheduler,
    ProgressiveLayerDrop,
    RandomLTDScheduler,
    layer_drop_of,
)
from hadal.compat.placeholders import placeholder
from hadal.compat.surface import NameKind
from hadal.config.plain import plain
from hadal.engine.engine import Engine

# method -> the key that it returns
_TOP = (
    "dataloader_drop_last dump_state gradient_predivide_factor log_level"
    " managed_gradient_accumulation memory_breakdown wall_clock_breakdown"
    " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
)
_ZERO = (
    "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients"
    " elastic_checkpoint ignore_unused_parameters legacy_stage1 load_from_fp32_weights"
    " log_trace_cache_warnings overlap_comm parameter_alignment reduce_bucket_size reduce_scatter"
    " round_robin_gradients save_muon_momentum_buffer_in_memory sub_group_size"
    " offload_optimizer offload_param"
)
_STAGE_3 = (
    "max_live_parameters max_reuse_distance model_persistence_threshold"
    " module_granularity_threshold param_persistence_threshold prefetch_bucket_size"
)
_PATHS: dict[str, str] = {
    **{name: name for name in _TOP.split()},
    **{f"zero_{name}": f"zero_optimization.{name}" for name in _ZERO.split()},
    **{f"zero_{name}": f"zero_optimization.stage3_{name}" for name in _STAGE_3.split()},
    "aio_config": "aio",
    "autotp_size": "tensor_parallel.autotp_size",
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "autotuning_metric": "autotuning.metric",
    "autotuning_metric_path": "autotuning.metric_path",
    "autotuning_model_info_path": "autotuning.model_info_path",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "cpuadam_cores_perc": "zero_optimization.offload_optimizer.cpuadam_cores_perc",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_learning_config": "data_efficiency.data_sampling.curriculum_learning",
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "data_efficiency_config": "data_efficiency",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_sampling_config": "data_efficiency.data_sampling",
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "is_deepcompile_enabled": "compile.deepcompile",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "optimizer_params": "optimizer.params",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_gamma": "progressive_layer_drop.gamma",
    "pld_params": "progressive_layer_drop",
    "pld_theta": "progressive_layer_drop.theta",
    "random_ltd_config": "data_efficiency.data_routing.random_ltd",
    "random_ltd_enabled": "data_efficiency.data_routing.random_ltd.enabled",
    "scheduler_params": "scheduler.params",
    "super_offload": "zero_optimization.offload_optimizer.super_offload",
    "tensor_parallel_config": "tensor_parallel",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zenflow_config": "zero_optimization.zenflow",
    "zero_allgather_sequential": "zero_optimization.stage3_allgather_sequential",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": (
        "zero_optimization.zero_quantized_nontrainable_weights"
    ),
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
}
# DeepSpeed's ways of reducing, compiling and saving, which differ here.
_UNBUILT = (
    "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain"
    " buffered_allreduce_fallback checkpoint_serialization_enabled"
    " clip_fp32_gradients coalesce_grad_reduction collect_python_gc compile_autosp compile_autotp"
    " compile_zero_optimization_stage dynamic_loss_scale_args get_autosp_backend get_autotp_backend"
    " get_compile_time get_data_types get_deepcompile_backend get_deepspeed_compile_backend"
    " get_optimizer_configuration get_type get_wall_clock_timers is_deepcompile_active"
    " is_first_weights_partition_group load_moe_state_dict"
    " optimizer_legacy_fusion print_forward_breakdown register_compile_pass"
    " set_train_micro_batch_size sparse_all_gather sparse_allreduce sparse_allreduce_bucket"
    " sparse_allreduce_no_retain swap_tensor_config uses_parallelization_pass_only"
    " zero_nvme_offload_optimizer zero_partial_offload"
)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Accessors(Engine):
    """An engine with these methods. Those in the table return the key's value.

    Sections are plain dicts; keys of an absent section are None.
    """

    @property
    def communication_data_type(self) -> torch.dtype:
        """Return the dtype of gradients on the wire."""
        named = self._parts.config.communication_data_type
        if named:
            return _DTYPES[named]
        trained = (each for each in self._parts.runtime.buckets if each.trainable)
        return next((each.precision.reduce for each in trained), torch.float32)

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of autocast, if the configuration names one."""
        section = self._parts.config.torch_autocast
        return None if section is None else _DTYPES.get(section.dtype or "")

    def postscale_gradients(self) -> bool:
        """Return whether gradients are divided after they are summed, not before."""
        return not self._parts.config.prescale_gradients

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Return whether the ranks' tags are compared when saving."""
        return self._parts.config.checkpoint.tag_validation != "Ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Return whether different tags are an error."""
        return self._parts.config.checkpoint.tag_validation == "Fail"

    def checkpoint_writer_enabled(self) -> bool:
        """Return whether the configuration has a checkpoint writer section."""
        return self._parts.config.checkpoint.writer is not None

    def autotuning_profile_model_info(self) -> bool:
        """Return whether this run is an experiment that measures one forward pass."""
        section = self._parts.config.autotuning
        return section.enabled and section.model_info is not None and section.model_info.profile

    def curriculum_params_legacy(self) -> dict[str, Any]:
        """Return the section `curriculum_learning` without its switch."""
        section = plain(self._parts.config.curriculum_learning) or {}
        return {name: value for name, value in section.items() if name != "enabled"}

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """The schedule of `curriculum_learning`, if it is on."""
        found = self.length_curriculum
        if found is None:
            return None
        return CurriculumScheduler.of(found.pacer, self.curriculum_params_legacy())

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """The keep probability of layers, if `progressive_layer_drop` is on."""
        section, found = self._parts.config.progressive_layer_drop, self.layer_drop
        if section is None or found is None:
            return None
        assert section.theta is not None  # the rules of the configuration check it
        assert section.gamma is not None
        return layer_drop_of(found, section.theta, section.gamma)

    @property
    def random_ltd_scheduler(self) -> RandomLTDScheduler | None:
        """The schedule of kept tokens, if `random_ltd` is on."""
        return None if self.token_drop is None else RandomLTDScheduler(self.token_drop)

    def random_ltd_initialize(self) -> None:
        """Let the converted layers drop tokens, as `convert_to_random_ltd` does."""
        if self.token_drop is not None:
            self.token_drop.adopt(self.module)

    def get_pld_theta(self) -> float | None:
        """Return the keep probability after the last update; None without layer drop."""
        return None if self.layer_drop is None else self.layer_drop.theta

    def zero_cpu_offload(self) -> bool:
        """Return whether the optimizer's state is in host memory."""
        section = self._parts.config.zero_optimization.offload_optimizer
        return section is not None and section.device == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        """Return whether the optimizer's state is offloaded, so that the host updates it."""
        section = self._parts.config.zero_optimization.offload_optimizer
        return section is not None and section.device != "none"

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the train batch, the micro-batch and the accumulation steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among those that see different samples."""
        return self.topology.data_parallel.rank

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among those that hold the parts of its model."""
        parts = self.topology.model_parallel
        return 0 if parts is None else parts.rank

    def get_tensor_parallel_rank(self) -> int:
        """Return the result of `get_model_parallel_rank`."""
        return self.get_model_parallel_rank()

    def dynamic_loss_scale(self) -> bool:
        """Return whether overflows change the loss scale."""
        return self._parts.scale_rule.dynamic

    def initial_dynamic_scale(self) -> float:
        """Return the loss scale of the first update."""
        return self._parts.scale_rule.initial

    def empty_partition_cache(self) -> None:
        """Free gathered weights, for example between training and generation."""
        self._parts.runtime.reshard_all()

    @staticmethod
    def is_map_style_dataset(obj: object) -> bool:
        """Return whether samples are accessed by index."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: object) -> bool:
        """Return whether samples are accessed by iteration."""
        return isinstance(obj, IterableDataset)


def _accessor(name: str, path: str) -> Callable[[Engine], Any]:
    def read(engine: Engine) -> Any:
        value: Any = engine._parts.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if value is None and name.endswith("_enabled"):
            return False  # a key of an absent section is off
        return plain(value)

    read.__name__ = name
    read.__doc__ = f"What `{path}` is."
    return read


for _name, _path in _PATHS.items():
    setattr(Accessors, _name, _accessor(_name, _path))
for _name in _UNBUILT.split():
    setattr(Accessors, _name, placeholder(f"deepspeed.DeepSpeedEngine.{_name}", NameKind.FUNCTION))
