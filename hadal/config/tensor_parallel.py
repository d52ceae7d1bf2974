"""`tensor_parallel`: splitting single layers over ranks.

Tests: tests/config/test_every_key.py
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Mark, Section, key, section
from hadal.config.values import Boolean, Integer, Texts, lowered


class TensorParallelDegree(Section):
    """The degree, given a second time."""

    tp_size: Integer = key(1, "Ranks that share a layer; 1, or the same as autotp_size.", ge=1)
    tp_grain_size: Integer = key(1, "Shards are multiples of this many elements.", ge=1)
    mpu: Any = key(None, "Object that describes the ranks; passed by programs only.")
    tp_group: Any = key(None, "Process group; passed by programs only.")


class SplitLayer(Section):
    """Rule for splitting the parameters that match a pattern."""

    patterns: Texts = key((), "Regular expressions matched from the start of a name.")
    partition_type: Annotated[Literal["column", "row", "skip"], BeforeValidator(lowered)] = key(
        "column", "column splits outputs, row splits inputs and sums, skip does not split."
    )
    shape: tuple[Any, ...] | None = key(
        None, "View of a fused weight before the split: lengths, or -1; at most one nested list."
    )
    partition_dim: Integer | None = key(
        None, "Dimension of that shape to split; null is 0 for column and 1 for row.", ge=0
    )
    model_types: Texts | None = key(None, "Model types to which the rule applies; null is all.")
    gather_output: Boolean = key(False, "column: gather the whole output on every rank.")
    grad_allreduce: Boolean = key(False, "skip: sum the gradient over the ranks.")


class PartitionConfig(Section):
    """Custom rules, which take precedence over the model's."""

    use_default_specs: Boolean = key(True, "Add the preset's rules.")
    layer_specs: tuple[SplitLayer, ...] = key((), "Rules, in order; the first match applies.")
    tp_size: Integer = key(1, "Overridden by autotp_size.", ge=1)
    embedding_partition_dim: Integer = key(1, "Dimension of embeddings.", mark=NO_EFFECT)
    lm_head_patterns: Texts = key(("lm_head", "embed_out"), "Names of the output layer.")
    strict_mode: Boolean = key(False, "Refuse a linear layer that matches no rule.")


class TensorParallel(Section):
    """Splits linear layers over ranks by the model's plan, a preset or custom rules."""

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
    tp_overlap_comm: Boolean = key(False, "Overlap the sum of row-split outputs with computation.")
    dtype: Any = key("torch.float16", "Dtype of the split model.")
    tp: TensorParallelDegree = section(TensorParallelDegree, "The degree, given a second time.")
    injection_policy_tuple: tuple[Any, ...] | None = key(None, "Names of row-split layers.")
    keep_module_on_host: Boolean = key(False, "Keep the shards in host memory.")
    kernel_inject: Boolean = key(False, "Replace modules with inference kernels.")
    vocab_parallel_lm_head: Boolean | None = key(
        None, "Split the output layer by vocabulary; null follows the model's plan."
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] = key(
        "torch", "Cross-entropy implementation for such an output."
    )
    partition_config: PartitionConfig | None = key(None, "Custom rules.")
