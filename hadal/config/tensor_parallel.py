"""`tensor_parallel`: cutting single layers over ranks."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Mark, Section, key, section
from hadal.config.values import Boolean, Integer, Texts, lowered


class TensorParallelDegree(Section):
    """The degree, said a second time."""

    tp_size: Integer = key(1, "Ranks that share a layer; 1, or as autotp_size.", ge=1)
    tp_grain_size: Integer = key(1, "Shards are multiples of this many elements.", ge=1)
    mpu: Any = key(None, "Object that knows the ranks; given by programs only.")
    tp_group: Any = key(None, "Process group; given by programs only.")


class LayerSpec(Section):
    """How parameters of one kind of name are cut."""

    patterns: Texts = key((), "Regular expressions matched from the start of a name.")
    partition_type: Annotated[Literal["column", "row", "skip"], BeforeValidator(lowered)] = key(
        "column", "column cuts outputs, row cuts inputs and sums, skip keeps whole."
    )
    shape: tuple[Any, ...] | None = key(
        None, "How a fused weight is seen before the cut: lengths, or -1; one nested list at most."
    )
    partition_dim: Integer | None = key(
        None, "Dimension of that shape to cut; null is 0 for column and 1 for row.", ge=0
    )
    model_types: Texts | None = key(None, "Model types that the rule is for; null is all.")
    gather_output: Boolean = key(False, "column: give every rank the whole output.")
    grad_allreduce: Boolean = key(False, "skip: sum the gradient over the ranks.")


class PartitionConfig(Section):
    """Own rules, before the model's."""

    use_default_specs: Boolean = key(True, "Add the preset's rules.")
    layer_specs: tuple[LayerSpec, ...] = key((), "Rules, in order; the first match holds.")
    tp_size: Integer = key(1, "Overruled by autotp_size.", ge=1)
    embedding_partition_dim: Integer = key(1, "Dimension of embeddings.", mark=NO_EFFECT)
    lm_head_patterns: Texts = key(("lm_head", "embed_out"), "Names of the output layer.")
    strict_mode: Boolean = key(False, "Refuse a linear layer that no rule matches.")


class TensorParallel(Section):
    """Cuts linear layers over ranks by the model's plan, a preset or own rules."""

    switch: ClassVar[str | None] = "autotp_size"
    off: ClassVar[tuple[Any, ...]] = (0, 1)
    aliases: ClassVar[Mapping[str, str]] = {
        "replace_with_kernel_inject": "kernel_inject",
        "tensor_parallel": "tp",
    }

    autotp_size: Integer = key(
        0,
        "Ranks that share a layer; 0 and 1 are off.",
        ge=0,
        mark=Mark(status="not built yet", off=(1,)),
    )
    preset_model: (
        Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None
    ) = key(None, "Rules made for one family of models.")
    tp_overlap_comm: Boolean = key(False, "Sum row-cut outputs beside computation.")
    dtype: Any = key("torch.float16", "Dtype of the model that is cut.")
    tp: TensorParallelDegree = section(TensorParallelDegree, "The degree, said a second time.")
    injection_policy_tuple: tuple[Any, ...] | None = key(None, "Names of row-cut layers.")
    keep_module_on_host: Boolean = key(False, "Leave the shards in host memory.")
    kernel_inject: Boolean = key(False, "Swap in inference kernels.")
    vocab_parallel_lm_head: Boolean | None = key(
        None, "Cut the output layer by vocabulary; null follows the model's plan."
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] = key(
        "torch", "Cross-entropy over such an output."
    )
    partition_config: PartitionConfig | None = key(None, "Own rules.")
