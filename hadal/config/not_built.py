"""The sections of features that Hadal does not have: their keys are checked."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import Ge
from pydantic import BeforeValidator

from hadal.config.section import UNBUILT, Mark, Section, Switched, key, section
from hadal.config.values import Boolean, Integer, Number, Text, whole

NOT_BUILT: Mapping[str, tuple[str, str]] = {
    "aio.use_gds": ("it needs a GPU, a driver and a disk for GPUDirect Storage", ""),
    "checkpoint.writer.type": ("", "choose another"),
    "compile.offload_activation": (
        "activation_checkpointing.cpu_checkpointing keeps the inputs of recomputed blocks there",
        "",
    ),
    "compile.offload_parameters": ("zero_optimization.offload_param keeps them there", ""),
    "hybrid_engine.inference_tp_size": ("tensor_parallel splits layers in training too", ""),
    "nebula.enabled": ("checkpoint.async_save saves in the background", ""),
    "tensor_parallel.vocab_parallel_ce_backend": ("", "choose another"),
    "weight_quantization.enabled": ("", "leave the section out"),
    "zero_optimization.offload_optimizer.super_offload": ("", ""),
    "zero_optimization.save_muon_momentum_buffer_in_memory": ("one tier stores all state", ""),
    "zero_optimization.zenflow": ("", "leave it out: offload_optimizer updates everything at once"),
}
"""The reason, and the remedy if it is not to set the default, for each key that is refused."""


class Nebula(Switched):
    """Checkpoints kept in memory and persisted by a service."""

    enabled: Boolean = key(False, "Use the service.", mark=UNBUILT)
    nebula_load_path: Text | None = key(
        None, "Directory to resume from; null is persistent_storage_path."
    )
    enable_nebula_load: Boolean = key(True, "Load through the service.")
    persistent_storage_path: Text | None = key(None, "Directory to persist to.")
    persistent_time_interval: Integer = key(100, "Seconds between two persisted copies.", gt=0)
    num_of_version_in_retention: Integer = key(2, "Copies kept in memory.", ge=1)


_Bits: TypeAlias = Annotated[Literal[4, 8], BeforeValidator(whole)]


class GroupQuantization(Section):
    """Groups of a weight's elements that share one scale."""

    num_bits: _Bits | None = key(None, "Bits per weight.")
    group_size: Integer | None = key(None, "Elements that share a scale.", gt=0)
    group_dim: Integer | None = key(None, "Dimension that is split into groups.")
    symmetric: Literal[False] | None = key(None, "Scales without an offset; not available.")


class WeightQuantization(Switched):
    """Weights stored in fewer bits than they compute in."""

    enabled: Boolean = key(
        True, "Enable the keys below.", mark=Mark(status="not built yet", only=(True,))
    )
    num_bits: Integer = key(8, "Bits per weight.", ge=1)
    q_type: Literal["symmetric", "asymmetric"] = key(
        "symmetric", "Scales without (symmetric) or with an offset (asymmetric)."
    )
    q_groups: Integer = key(1, "Scales per weight.", ge=1)
    quantized_initialization: GroupQuantization = section(
        GroupQuantization, "Quantize while the model is built."
    )
    post_init_quant: dict[str, GroupQuantization] = key(
        {}, "Maps part of a module's name to the quantization of its weights after loading."
    )


_Period: TypeAlias = Literal["auto"] | Annotated[Integer, Ge(1)]


class ZenFlow(Section):
    """Selective updates on the device alongside an offloaded optimizer."""

    leftovers: ClassVar[Mapping[str, str]] = {
        "steps_per_epoch": "ignored: it is filled in while training"
    }

    topk_ratio: Number = key(0.1, "Fraction of columns updated at each step.", gt=0, lt=1)
    select_strategy: Literal["auto", "step", "epoch"] = key(
        "auto", "Unit of the selection interval."
    )
    select_interval: _Period = key("auto", "Interval between selections.")
    update_interval: _Period = key(
        "auto", "Steps between updates of the columns that were not selected."
    )
    overlap_step: Boolean = key(False, "Run the CPU's update in parallel with the next steps.")
    offload: Boolean = key(False, "Keep the selected columns' state on the CPU too.")
    auto_ratio: Number = key(
        0.99, "Fraction of the gradients' mass that decides an automatic interval.", ge=0, le=1
    )
    full_warm_up_rounds: Integer = key(0, "Steps at the start that update everything.", ge=0)
    pt_reserved_cores_perc: Number = key(
        0.5, "Fraction of the cores reserved for torch.", ge=0, le=1
    )
