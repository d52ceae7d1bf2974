"""The home of each name of the surface: `module:name` in Hadal or torch, or a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_ENGINE = "hadal.compat.engine"
_VALUES = "hadal.compat.parameters"
_OPTIMIZERS = "hadal.compat.optimizers"
_TOOLS = "hadal.compat.tools"
_COMM = "hadal.compat.comm"
_COMPRESSION = "hadal.compat.compression"
_RECOMPUTING = "hadal.compat.checkpointing"
_RANDOM_STATES = "hadal.activation_checkpointing.random_states"
_LOG = "hadal.compat.log"
_ELASTICITY = "hadal.compat.elasticity"
_ZERO = "hadal.compat.zero"
_GROUPS = "hadal.compat.groups"
_EXPERTS = "hadal.compat.experts"
_EXPERT_GROUPS = "hadal.compat.expert_groups"
_BUILDERS = "hadal.compat.builders"
_LEAVES = "hadal.compat.leaves"
_KINDS = "hadal.compat.kinds"
_CONFIG = "hadal.compat.configuration"
_ACCELERATOR = "hadal.compat.accelerator"
_FILES = "hadal.compat.files"
_PARAMETERS = "hadal.compat.parameters"
_EFFICIENCY = "hadal.compat.efficiency"
_LOSSES = "hadal.compat.losses"
_MONITORS = "hadal.compat.monitors"
_TENSORS = "hadal.compat.tensor_parallel"
_TOPOLOGY = "hadal.pipeline.topology"
_PIPELINE = "hadal.pipeline"
_SAFE = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state"
    " safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state"
    " safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state"
    " safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"
)
_CHECKPOINTING = {
    _RECOMPUTING: "CheckpointFunction checkpoint configure is_configured"
    " model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed non_reentrant_checkpoint"
    " partition_activations_in_checkpoint reset set_num_layers",
    _RANDOM_STATES: "CudaRNGStatesTracker get_cuda_rng_tracker",
}
_COLLECTIVES = {
    _COMM: "TorchBackend allgather_fn comms_logger configure init_distributed log_summary"
    " reduce_scatter_fn",
    "hadal.comm": "P2POp ReduceOp all_gather all_gather_coalesced all_gather_into_tensor"
    " all_gather_object all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier"
    " batch_isend_irecv broadcast broadcast_object_list destroy_process_group gather get_backend"
    " get_all_ranks_from_group get_global_rank get_local_rank get_process_group_ranks get_rank"
    " get_world_group get_world_size has_all_gather_into_tensor has_all_reduce_coalesced"
    " has_coalescing_manager has_reduce_scatter_tensor inference_all_reduce initialize_mesh_device"
    " irecv is_available is_initialized isend monitored_barrier new_group recv reduce"
    " reduce_scatter reduce_scatter_tensor reset_log scatter send",
}

# module of the surface -> {module of Hadal -> names that are the same there}
_ALIKE: dict[str, dict[str, str]] = {
    "deepspeed": {
        "hadal": "add_config_arguments",
        "hadal.engine.tensor": "tp_model_init",
        _ENGINE: "DeepSpeedEngine initialize",
        _COMM: "init_distributed",
        _ACCELERATOR: "get_accelerator",
        _CONFIG: "DeepSpeedConfig",
        _LOG: "log_dist logger",
        _PIPELINE: "PipelineModule",
    },
    "deepspeed.autotuning.constants": {
        "hadal.autotuning.space": "DEFAULT_TUNING_SPACE_ZERO_0 DEFAULT_TUNING_SPACE_ZERO_1"
        " DEFAULT_TUNING_SPACE_ZERO_2 DEFAULT_TUNING_SPACE_ZERO_3"
    },
    "deepspeed.accelerator": {
        _ACCELERATOR: "get_accelerator is_current_accelerator_supported set_accelerator"
    },
    "deepspeed.checkpoint.utils": {
        _TOOLS: "clone_tensors_for_torch_save",
        _FILES: "get_model_ckpt_name_for_rank",
    },
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.comm": _COLLECTIVES,
    "deepspeed.comm.comm": _COLLECTIVES,
    "deepspeed.compression": {
        "hadal.compression": "init_compression",
        _COMPRESSION: "redundancy_clean",
        _TOOLS: "convert_conv1d_to_linear",
    },
    "deepspeed.compression.compress": {
        "hadal.compression": "init_compression student_initialization",
        _COMPRESSION: "check_deepspeed_config get_compress_methods get_module_name"
        " redundancy_clean",
    },
    "deepspeed.compression.config": {_COMPRESSION: "get_compression_config get_quantize_enabled"},
    "deepspeed.compression.helper": {
        _TOOLS: "convert_conv1d_to_linear recursive_getattr recursive_setattr",
        _COMPRESSION: "compression_preparation fix_compression generate_pruners get_mpu"
        " is_module_compressible module_replacement register_on_step_begin rewrite_optimizer_step",
    },
    "deepspeed.compression.utils": {
        _COMPRESSION: "AsymQuantizer BinaryQuantizer SymQuantizer TernaryQuantizer TopKBinarizer"
    },
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {
        "hadal.compat.analyzers": "DataAnalyzer DistributedDataAnalyzer"
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {
        "hadal.compat.indexed": "IndexedDatasetBuilder MMapIndexedDataset"
        " MMapIndexedDatasetBuilder code create_doc_idx data_file_path dataset_exists"
        " index_file_path infer_dataset_impl make_builder make_dataset"
    },
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {
        "hadal.compat.batching": "VariableBatchSizeLR batch_by_seqlens"
        " dataloader_for_variable_batch_size"
        " get_dataloader_and_lr_scheduler_for_variable_batch_size"
        " get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"
        " lr_scheduler_for_variable_batch_size scale_lr"
    },
    "deepspeed.runtime.data_pipeline.data_sampling.utils": {
        "hadal.compat.indexed": "close_mmap_dataset_builder create_mmap_dataset_builder"
        " split_dataset split_index"
    },
    "deepspeed.elasticity": {_ELASTICITY: "compute_elastic_config"},
    "deepspeed.elasticity.config": {_ELASTICITY: "ElasticityError ElasticityIncompatibleWorldSize"},
    "deepspeed.moe.experts": {"hadal.moe": "Experts"},
    "deepspeed.moe.layer": {"hadal.moe": "MoE"},
    "deepspeed.moe.mappings": {_EXPERTS: "drop_tokens gather_tokens"},
    "deepspeed.moe.sharded_moe": {
        "hadal.moe": "MOELayer TopKGate",
        _EXPERTS: "TUTEL_INSTALLED einsum gumbel_rsample multiplicative_jitter top1gating"
        " top2gating topkgating",
    },
    "deepspeed.moe.sharded_moe.dist": {"hadal.comm": "all_reduce"},
    "deepspeed.moe.utils": {
        "hadal.moe": "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group"
        " split_params_into_different_moe_groups_for_optimizer",
        "hadal.moe.param_groups": "split_params_grads_into_shared_and_expert_params"
        " split_params_into_shared_and_expert_params",
    },
    "deepspeed.monitor.comet": {_MONITORS: "CometMonitor Event EventsLogScheduler"},
    "deepspeed.monitor.config": {_MONITORS: "DeepSpeedMonitorConfig get_monitor_config"},
    "deepspeed.monitor.csv_monitor": {_MONITORS: "csvMonitor"},
    "deepspeed.monitor.monitor": {_MONITORS: "Monitor MonitorMaster"},
    "deepspeed.monitor.tensorboard": {_MONITORS: "TensorBoardMonitor"},
    "deepspeed.monitor.utils": {
        _MONITORS: "check_comet_availability check_tb_availability check_wandb_availability"
    },
    "deepspeed.monitor.wandb": {_MONITORS: "WandbMonitor"},
    "deepspeed.module_inject.autotp_config": {
        _TENSORS: "AutoTPPresets",
        "hadal.tensor_parallel.rules": "PartitionType",
    },
    "deepspeed.module_inject.layers": {_TENSORS: "is_autotp_training_mode set_autotp_mode"},
    "deepspeed.module_inject.tp_shard": {
        _TENSORS: "get_shard_size get_shard_size_list set_num_kv_heads set_tp_grain_size"
    },
    "deepspeed.ops.adagrad": {_OPTIMIZERS: "DeepSpeedCPUAdagrad"},
    "deepspeed.ops.adam": {_OPTIMIZERS: "DeepSpeedCPUAdam FusedAdam"},
    "deepspeed.ops.lamb": {_OPTIMIZERS: "FusedLamb"},
    "deepspeed.ops.lion": {_OPTIMIZERS: "DeepSpeedCPULion FusedLion"},
    "deepspeed.ops.aio": {_BUILDERS: "AsyncIOBuilder"},
    "deepspeed.ops.op_builder": {
        _BUILDERS: "AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder"
        " EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder"
        " FusedLionBuilder GDSBuilder InferenceBuilder OpBuilder PinMemoryBuilder QuantizerBuilder"
        " RaggedUtilsBuilder SparseAttnBuilder SpatialInferenceBuilder TransformerBuilder"
        " UtilsBuilder"
    },
    "deepspeed.ops.op_builder.builder": {
        _BUILDERS: "MissingCUDAException OpBuilder TORCH_MAJOR TORCH_MINOR assert_no_cuda_mismatch"
        " get_default_compute_capabilities installed_cuda_version"
    },
    "deepspeed.ops.op_builder.evoformer_attn": {_BUILDERS: "EvoformerAttnBuilder"},
    "deepspeed.ops.sparse_attention": {
        "hadal.sparse_attention": "BSLongformerSparsityConfig BertSparseSelfAttention"
        " BigBirdSparsityConfig DenseSparsityConfig FixedSparsityConfig"
        " LocalSlidingWindowSparsityConfig SparseAttentionUtils SparseSelfAttention SparsityConfig"
        " VariableSparsityConfig",
    },
    "deepspeed.ops.sparse_attention.matmul": {"hadal.sparse_attention": "MatMul"},
    "deepspeed.ops.sparse_attention.softmax": {"hadal.sparse_attention": "Softmax"},
    "deepspeed.profiling.flops_profiler": {"hadal.profiling": "FlopsProfiler get_model_profile"},
    "deepspeed.profiling.flops_profiler.profiler": {
        "hadal.profiling.units": "bytes_to_string duration_to_string flops_to_string"
        " macs_to_string number_to_string params_to_string"
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": {
        "hadal.compat.optimizer": "DeepSpeedOptimizer",
        _KINDS: "ZeROOptimizer",
    },
    "deepspeed.runtime.config": {
        _VALUES: "LAMB_OPTIMIZER ONEBIT_LAMB_OPTIMIZER",
        _CONFIG: "DeepSpeedConfig get_gradient_clipping get_log_level",
    },
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": {_EFFICIENCY: "CurriculumScheduler"},
    "deepspeed.runtime.data_pipeline.data_routing.helper": {
        "hadal.data_efficiency.token_drop": "convert_to_random_ltd",
        _EFFICIENCY: "remove_random_ltd_state_dict save_without_random_ltd",
    },
    "deepspeed.runtime.dataloader": {"hadal": "RepeatingLoader"},
    "deepspeed.runtime.engine": {_ENGINE: "DeepSpeedEngine"},
    "deepspeed.runtime.fp16.fused_optimizer": {_KINDS: "FP16_Optimizer"},
    "deepspeed.runtime.fp16.loss_scaler": {
        "hadal.compat.loss_scaler": "DynamicLossScaler LossScaler"
    },
    "deepspeed.runtime.fp16.onebit": {_OPTIMIZERS: "OnebitAdam OnebitLamb ZeroOneAdam"},
    "deepspeed.runtime.fp16.onebit.adam": {_OPTIMIZERS: "OnebitAdam"},
    "deepspeed.runtime.fp16.onebit.lamb": {_OPTIMIZERS: "OnebitLamb"},
    "deepspeed.runtime.fp16.onebit.zoadam": {_OPTIMIZERS: "ZeroOneAdam"},
    "deepspeed.runtime.fp16.unfused_optimizer": {_KINDS: "FP16_UnfusedOptimizer"},
    "deepspeed.pipe": {_PIPELINE: "LayerSpec PipelineModule TiedLayerSpec"},
    "deepspeed.runtime.pipe": {_TOPOLOGY: "ProcessTopology"},
    "deepspeed.runtime.pipe.engine": {
        _ENGINE: "DeepSpeedEngine",
        "hadal.compat.pipeline": "PipelineEngine",
    },
    "deepspeed.runtime.pipe.module": {
        _PIPELINE: "LayerSpec PipelineModule",
        "hadal": "PipelineError",
    },
    "deepspeed.runtime.pipe.schedule": {
        "hadal.pipeline.schedule": "BackwardPass BufferOpInstruction CommitP2P DataParallelSchedule"
        " ForwardPass InferenceSchedule LoadMicroBatch OptimizerStep PipeInstruction PipeSchedule"
        " RecvActivation RecvGrad ReduceGrads ReduceTiedGrads SendActivation SendGrad TrainSchedule"
    },
    "deepspeed.runtime.pipe.topology": {
        _TOPOLOGY: "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology",
        _PIPELINE: "PipelineParallelGrid",
    },
    "deepspeed.runtime.hybrid_engine": {_ENGINE: "DeepSpeedHybridEngine"},
    "deepspeed.runtime.lr_schedules": {
        "hadal.optim.schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
        "hadal": "add_tuning_arguments",
    },
    "deepspeed.runtime.eigenvalue": {"hadal.compat.eigenvalue": "Eigenvalue"},
    "deepspeed.runtime.progressive_layer_drop": {_EFFICIENCY: "ProgressiveLayerDrop"},
    "deepspeed.runtime.utils": {
        _TOOLS: "bwc_pipeline_parallel_group bwc_pipeline_parallel_world_size"
        " bwc_tensor_model_parallel_rank call_to_str clip_grad_norm_ copy_to_device empty_cache"
        " ensure_directory_exists get_global_norm get_only_unique_item move_to_device"
        " noop_decorator see_memory_usage set_random_seed",
        "hadal.pipeline.partition": "partition_balanced partition_uniform prefix_sum_inc",
    },
    "deepspeed.runtime.zero": {
        _ZERO: "GatheredParameters Init register_external_parameter unregister_external_parameter"
        " unwrap_model_for_generation",
        _VALUES: "ZeroParamStatus",
    },
    "deepspeed.runtime.zero.config": {_VALUES: "ZeroStageEnum"},
    "deepspeed.runtime.zero.offload_config": {_VALUES: "OffloadDeviceEnum OffloadStateTypeEnum"},
    "deepspeed.runtime.zero.partition_parameters": {
        _ZERO: "GatheredParameters Init register_external_parameter unregister_external_parameter",
        _ACCELERATOR: "get_accelerator",
        _VALUES: "ZeroParamStatus",
    },
    "deepspeed.runtime.zero.stage3": {
        "hadal.zero": "estimate_zero3_model_states_mem_needs"
        " estimate_zero3_model_states_mem_needs_all_cold"
        " estimate_zero3_model_states_mem_needs_all_live",
        _KINDS: "DeepSpeedZeroOptimizer_Stage3",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "hadal.zero": "estimate_zero2_model_states_mem_needs"
        " estimate_zero2_model_states_mem_needs_all_cold"
        " estimate_zero2_model_states_mem_needs_all_live",
        _KINDS: "DeepSpeedZeroOptimizer",
    },
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "hadal.sequence.groups": "get_sequence_data_parallel_group get_sequence_data_parallel_rank"
        " get_sequence_data_parallel_world_size get_sequence_parallel_group"
        " get_sequence_parallel_world_size initialize_sequence_parallel",
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "hadal.sequence": "AutogradComputeMLP SequenceTiledCompute TiledFusedLogitsLoss TiledMLP"
        " UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter sequence_tiled_compute"
    },
    "deepspeed.runtime.zero.tiling": {"hadal.zero": "TiledLinear"},
    "deepspeed.runtime.activation_checkpointing.offload_activations": {
        "hadal.compat.offloading": "CheckpointHiddenStatesOffload"
        " get_checkpoint_hidden_states_offloading_ctx_manager"
    },
    "deepspeed.runtime.chunked_cross_entropy": {
        _LOSSES: "ChunkedCausalLMLoss chunked_cross_entropy install_chunked_causal_lm_loss"
        " triton_backend_available"
    },
    "deepspeed.sequence.cross_entropy": {
        "hadal.sequence": "vocab_sequence_parallel_cross_entropy",
        _LOSSES: "VocabParallelCausalLMLoss VocabParallelCrossEntropyLoss"
        " vocab_parallel_cross_entropy",
    },
    "deepspeed.sequence.layer": {
        "hadal.sequence.attention": "DistributedAttention apply_rotary_pos_emb single_all_to_all"
    },
    "deepspeed.sequence.linear_cross_entropy": {_LOSSES: "vocab_parallel_linear_cross_entropy"},
    "deepspeed.utils": {
        "hadal": "RepeatingLoader set_z3_leaf_modules unset_z3_leaf_modules",
        "hadal.comm": "is_initialized",
        "hadal.utils": f"{_SAFE} safe_update_full_grad_vectorized",
        _LEAVES: "get_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
        " z3_leaf_module z3_leaf_parameter",
        _LOG: "log_dist logger set_log_level_from_string",
    },
    "deepspeed.utils.debug": {
        "hadal.compat.debug": "debug_clear_module_and_param_names"
        " debug_extract_module_and_param_names debug_module2name debug_module2name_class"
        " debug_param2name module_names param_names"
    },
    "deepspeed.utils.comms_logging": {_COMM: "CommsLogger"},
    "deepspeed.utils.groups": {
        _GROUPS: "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size"
        " get_tensor_model_parallel_group get_tensor_model_parallel_rank"
        " get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size initialize",
    },
    "deepspeed.utils.logging": {
        _LOG: "LoggerFactory get_current_level get_log_level_from_string log_dist log_dist_once"
        " logger set_log_level_from_string should_log_le warning_once"
    },
    "deepspeed.utils.numa": {_TOOLS: "parse_range_list"},
    "deepspeed.utils.nvtx": {_TOOLS: "instrument_w_nvtx"},
    "deepspeed.utils.timer": {
        "hadal.compat.timers": "NoopTimer SynchronizedWallClockTimer trim_mean"
    },
    "deepspeed.utils.torch": {_TOOLS: "required_torch_version"},
    "deepspeed.utils.zero_to_fp32": {
        _FILES: "get_model_state_file get_model_state_files get_optim_files",
        "hadal.utils": "convert_zero_checkpoint_to_fp32_state_dict"
        " convert_zero_checkpoint_to_state_dict"
        " get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
    },
    "deepspeed.utils.tensor_fragment": {"hadal.utils": _SAFE, _VALUES: "fragment_address"},
    "deepspeed.zero": {
        _ZERO: "GatheredParameters Init MiCS_Init register_external_parameter"
        " unregister_external_parameter unwrap_model_for_generation",
        "hadal.zero": "TiledLinear",
        _VALUES: "ZeroParamStatus ZeroParamType",
    },
}
# Names that differ here.
_OTHERS: dict[str, str] = {
    "deepspeed.compression.basic_layer.BNLayer_Compress": "torch.nn:BatchNorm2d",
    "deepspeed.compression.scheduler.compression_scheduler": (
        "hadal.compression:CompressionScheduler"
    ),
    **{
        f"deepspeed.compression.basic_layer.{name}": f"hadal.compression.{home}"
        for name, home in {
            "ColumnParallelLinear_Compress": "parallel:ColumnParallelLinear",
            "Conv2dLayer_Compress": "layers:CompressedConv2d",
            "Embedding_Compress": "layers:CompressedEmbedding",
            "LinearLayer_Compress": "layers:CompressedLinear",
            "QuantAct": "layers:RunningRange",
            "RowParallelLinear_Compress": "parallel:RowParallelLinear",
        }.items()
    },
    **{
        f"deepspeed.{module}._CUDA_RNG_STATE_TRACKER": f"{_RANDOM_STATES}:TRACKER"
        for module in ("checkpointing", "runtime.activation_checkpointing.checkpointing")
    },
    "deepspeed.__git_branch__": f"{_VALUES}:NO_GIT",
    "deepspeed.__git_hash__": f"{_VALUES}:NO_GIT",
    **{
        f"deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset.{name}": (
            "hadal.compat.indexed:MMapIndexedDataset"
        )
        for name in ("IndexedDataset", "IndexedCachedDataset")
    },
    "deepspeed.runtime.data_pipeline.data_sampling.utils.find_fit_int_dtype": (
        "hadal.data_efficiency.indexed:smallest_dtype"
    ),
    "deepspeed.checkpoint.ds_to_universal.main": "hadal.cli.ds_to_universal:convert",
    "deepspeed.checkpoint.ds_to_universal.parse_arguments": (
        "hadal.cli.ds_to_universal:parse_arguments"
    ),
    **{
        f"deepspeed.module_inject.layers.{name}": f"hadal.tensor_parallel.layers:{home}"
        for name, home in {
            "LinearAllreduce": "RowLinear",
            "LinearLayer": "ColumnLinear",
            "TensorParallel_Layer": "SlicedLayer",
            "VocabParallelEmbedding": "VocabularyEmbedding",
        }.items()
    },
    "deepspeed.module_inject.auto_tp.PartitionType": "hadal.tensor_parallel.rules:PartitionType",
    "deepspeed.module_inject.auto_tp.TPLayerSpec": "hadal.tensor_parallel.rules:LayerRule",
    "deepspeed.DeepSpeedConfigError": "hadal.errors:ConfigError",
    "deepspeed.dist": "deepspeed.comm",
    "deepspeed.OnDevice": f"{_ZERO}:OnDevice",
    "deepspeed.ops.__compatible_ops__": f"{_BUILDERS}:COMPATIBLE_OPS",
    "deepspeed.monitor.config.CSVConfig": "hadal.config.monitors:CsvMonitor",
    "deepspeed.monitor.config.CometConfig": "hadal.config.monitors:Comet",
    "deepspeed.monitor.config.TensorBoardConfig": "hadal.config.monitors:TensorBoard",
    "deepspeed.monitor.config.WandbConfig": "hadal.config.monitors:Wandb",
    "deepspeed.runtime.config.DeepSpeedConfigError": "hadal.errors:ConfigError",
    "deepspeed.runtime.utils.is_model_parallel_parameter": "hadal.zero.sharing:is_model_part",
    "deepspeed.runtime.zero.utils.ZeRORuntimeException": "hadal.errors:CheckpointError",
    "deepspeed.utils.groups._get_model_parallel_world_size": (
        f"{_GROUPS}:get_tensor_model_parallel_world_size"
    ),
    "deepspeed.utils.groups.get_model_parallel_group": (
        f"{_GROUPS}:get_tensor_model_parallel_group"
    ),
    "deepspeed.utils.groups.get_model_parallel_rank": f"{_GROUPS}:get_tensor_model_parallel_rank",
    "deepspeed.utils.groups.get_model_parallel_world_size": (
        f"{_GROUPS}:get_tensor_model_parallel_world_size"
    ),
    **{
        f"deepspeed.utils.groups._{name}": f"{_GROUPS}:{name}"
        for name in (
            "get_broadcast_src_rank",
            "get_data_parallel_group",
            "get_data_parallel_group_ranks",
            "get_data_parallel_rank",
            "get_data_parallel_world_size",
            "get_sequence_data_parallel_group",
            "get_sequence_data_parallel_rank",
            "get_sequence_data_parallel_world_size",
            "get_sequence_parallel_group",
            "get_sequence_parallel_rank",
            "get_sequence_parallel_world_size",
        )
    },
    **{
        f"deepspeed.utils.groups.{name}": f"{_EXPERT_GROUPS}:{home}"
        for name, home in {
            "_create_expert_and_data_parallel": "create",
            "_get_expert_broadcast_src_rank": "data_parallel_src_rank",
            "_get_expert_parallel_ranks": "ranks_of",
            **{
                f"_get_expert_{name}": name
                for name in (
                    "data_parallel_group",
                    "data_parallel_group_dict",
                    "data_parallel_group_ranks",
                    "data_parallel_rank",
                    "data_parallel_world_size",
                    "parallel_group",
                    "parallel_group_dict",
                    "parallel_group_ranks",
                    "parallel_rank",
                    "parallel_src_rank",
                    "parallel_world_size",
                )
            },
            "_get_max_expert_parallel_group": "max_expert_parallel_group",
            "_get_max_expert_size": "max_expert_size",
            "_get_max_expert_size_name": "max_expert_size_name",
        }.items()
    },
    "deepspeed.DeepSpeedOptimizerCallable": f"{_KINDS}:OptimizerCallable",
    "deepspeed.DeepSpeedSchedulerCallable": f"{_KINDS}:SchedulerCallable",
    "deepspeed.runtime.engine.DeepSpeedOptimizerCallable": f"{_KINDS}:OptimizerCallable",
    "deepspeed.runtime.engine.DeepSpeedSchedulerCallable": f"{_KINDS}:SchedulerCallable",
    "deepspeed.runtime.zero.partition_parameters.is_zero_param": f"{_PARAMETERS}:is_zero_param",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp.get_model_parallel_rank": (
        "hadal.sequence.groups:get_sequence_parallel_rank"
    ),
    "deepspeed.sequence.layer._SeqAllToAll": "hadal.sequence.attention:SeqAllToAll",
    "deepspeed.runtime.zero.utils.is_zero_param": f"{_PARAMETERS}:is_zero_param",
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": (
        "hadal.compat.optimizer:ParameterOffload"
    ),
    "deepspeed.env_report.cli_main": "hadal.cli.deepspeed:report",
    "deepspeed.env_report.main": "hadal.cli.deepspeed:show_report",
    "deepspeed.launcher.launch.main": "hadal.cli.deepspeed:launch",
    "deepspeed.launcher.runner.main": "hadal.cli.deepspeed:run",
    "deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": (
        f"{_ZERO}:zero_wrapper_for_fp_tensor_constructor"
    ),
    "deepspeed.ops.op_builder.builder.CUDAMismatchException": f"{_BUILDERS}:MissingCUDAException",
    "deepspeed.ops.op_builder.builder.CUDAOpBuilder": f"{_BUILDERS}:OpBuilder",
    "deepspeed.ops.op_builder.get_default_compute_capabilities": (
        f"{_BUILDERS}:get_default_compute_capabilities"
    ),
    "deepspeed.utils.exceptions.DeprecatedException": "hadal.errors:NotBuiltYetError",
    "deepspeed.runtime.dataloader.DeepSpeedDataLoader": "hadal.data.loader:ShardedLoader",
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
"""Full name on the surface -> its home."""
