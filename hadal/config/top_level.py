"""The configuration as a whole: the top-level keys and the sections."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from hadal.config.activation_checkpointing import ActivationCheckpointing
from hadal.config.autotuning import Autotuning
from hadal.config.checkpoint import Checkpoint, DatastatesCkpt
from hadal.config.compile import Compile
from hadal.config.compression import CompressionTraining, Eigenvalue, QuantizeTraining
from hadal.config.data_efficiency import CurriculumLearning, DataEfficiency, ProgressiveLayerDrop
from hadal.config.elasticity import Elasticity
from hadal.config.general import General
from hadal.config.monitors import (
    Comet,
    CommsLogging,
    CsvMonitor,
    FlopsProfile,
    JsonlMonitor,
    MonitorScope,
    TensorBoard,
    Timers,
    Wandb,
)
from hadal.config.not_built import Nebula, WeightQuantization
from hadal.config.offload import Aio
from hadal.config.optimizer import Optimizer
from hadal.config.parallelism import ExpertParallel, HybridEngine, Pipeline, TensorParallel
from hadal.config.precision import Amp, Bf16, DataTypes, Fp16, TorchAutocast
from hadal.config.scheduler import Scheduler
from hadal.config.section import Moved, key, plain, section
from hadal.config.sparse_attention import SparseAttention
from hadal.config.zero_optimization import ZeroOptimization

Origin = Literal["you", "auto", "default", "inferred"]
_FOREIGN = "ignored: another program reads it"
_COMMENT = "ignored: a comment"
_DEGREE = "ignored: another program reads it; here tensor_parallel and pipeline divide a model"
_BELOW = 'ignored at the top level, also by DeepSpeed: it acts in "%s"'
_OF_FP16 = "loss_scale loss_scale_window hysteresis min_loss_scale"
_OF_ZERO = "offload_optimizer offload_param stage3_max_live_parameters stage3_max_reuse_distance"


class Config(General):
    """One ds_config.json, validated and complete."""

    moved: ClassVar[Mapping[str, Moved]] = {
        "bfloat16": Moved("bf16"),
        "fp32_allreduce": Moved("communication_data_type", "fp32"),
        "allgather_size": Moved("zero_optimization.allgather_bucket_size"),
        "arg_mappings": Moved("autotuning.arg_mappings"),
    }
    leftovers: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("msamp", "inference"), _FOREIGN),
        **dict.fromkeys(("comment", "comments"), _COMMENT),
        **dict.fromkeys(("pipe-parallel-size", "pipe_parallel_size"), _DEGREE),
        **dict.fromkeys(("model-parallel-size", "model_parallel_size"), _DEGREE),
        **dict.fromkeys(_OF_FP16.split(), _BELOW % "fp16"),
        **dict.fromkeys(_OF_ZERO.split(), _BELOW % "zero_optimization"),
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        "moe": 'experts are layers of the model (hadal.moe.MoE), or cut by "expert_parallel"'
    }

    optimizer: Optimizer | None = key(None, "The optimizer that the engine builds.")
    scheduler: Scheduler | None = key(None, "The learning-rate schedule.")
    fp16: Fp16 = section(Fp16, "Half precision.")
    bf16: Bf16 = section(Bf16, "bfloat16.")
    amp: Amp | None = key(None, "Mixed precision with Apex's levels.")
    torch_autocast: TorchAutocast | None = key(None, "Forward pass under autocast.")
    data_types: DataTypes = section(DataTypes, "Other dtypes.")
    zero_optimization: ZeroOptimization = section(
        ZeroOptimization, "Sharding, offloading and communication."
    )
    aio: Aio = section(Aio, "Disk requests.")
    tensor_parallel: TensorParallel = section(TensorParallel, "Layers split over ranks.")
    hybrid_engine: HybridEngine = section(HybridEngine, "Training and generation.")
    expert_parallel: ExpertParallel = section(ExpertParallel, "Experts distributed over ranks.")
    timers: Timers = section(Timers, "Timers.")
    autotuning: Autotuning = section(Autotuning, "Search for the fastest configuration.")
    flops_profiler: FlopsProfile = section(FlopsProfile, "Operations of one step.")
    activation_checkpointing: ActivationCheckpointing = section(
        ActivationCheckpointing, "Recomputation."
    )
    sparse_attention: SparseAttention | None = key(
        None, "Block-sparse attention of models that read it."
    )
    data_efficiency: DataEfficiency = section(DataEfficiency, "Less data for the same quality.")
    curriculum_learning: CurriculumLearning | None = key(None, "Short sequences first.")
    tensorboard: TensorBoard = section(TensorBoard, "Scalars to TensorBoard.")
    csv_monitor: CsvMonitor = section(CsvMonitor, "Scalars to CSV files.")
    wandb: Wandb = section(Wandb, "Scalars to Weights & Biases.")
    comet: Comet = section(Comet, "Scalars to Comet.")
    jsonl_monitor: JsonlMonitor = section(JsonlMonitor, "Scalars to one file of JSON lines.")
    monitor: MonitorScope = section(MonitorScope, "Which scalars.")
    elasticity: Elasticity | None = key(None, "A batch size for many numbers of ranks.")
    comms_logger: CommsLogging | None = key(
        None, "Count, size and speed of messages between ranks."
    )
    compression_training: CompressionTraining = section(
        CompressionTraining, "Compression during training."
    )
    checkpoint: Checkpoint = section(Checkpoint, "Saving and loading.")
    datastates_ckpt: DatastatesCkpt | None = key(
        None, "Asynchronous checkpoints, as with checkpoint.async_save."
    )
    nebula: Nebula | None = key(None, "Azure Nebula.")
    compile: Compile = section(Compile, "What is done around compiled graphs.")
    pipeline: Pipeline = section(Pipeline, "Pipeline stages.")
    progressive_layer_drop: ProgressiveLayerDrop | None = key(None, "Skipped layers.")
    eigenvalue: Eigenvalue | None = key(None, "Curvature.")
    quantize_training: QuantizeTraining | None = key(None, "Quantized training, first form.")
    weight_quantization: WeightQuantization | None = key(None, "Quantized weights.")

    _origins: Mapping[str, Origin] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _lines: tuple[str, ...] = PrivateAttr(default=())

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Return the origin of each value, by JSON path."""
        return self._origins

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the notes collected while loading."""
        return self._notes

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the lines to log: one line lists all keys that do nothing."""
        return self._lines

    def as_dict(self) -> dict[str, Any]:
        """Return the effective configuration as plain JSON values."""
        return {name: plain(getattr(self, name)) for name in type(self).model_fields}

    def as_public_dict(self) -> dict[str, Any]:
        """Return the same without secrets, for logs and files that others read."""
        values = self.as_dict()
        if values["comet"]["api_key"] is not None:
            values["comet"]["api_key"] = "(hidden)"
        return values
