"""`tensor_parallel`: splitting single layers over ranks."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Mark, Section, key, section
from hadal.config.values import Boolean, Integer, Texts, lowered

Shape: TypeAlias = tuple[int | tuple[int, ...], ...]
"""A fused weight: each dimension's number of equal parts, their sizes, or -1 for its own size."""


def shape_fault(shape: Shape | None, dim: int) -> str | None:
    """Return why a weight cannot be cut along dimension `dim` of this shape; None: it can."""
    if shape is None:
        return None
    described = f"shape {list(shape)}"
    if not 0 <= dim < len(shape):
        return f"partition_dim {dim} is no dimension of {described}; expected 0..{len(shape) - 1}"
    if len(shape) != 2:
        return f"{described} has {len(shape)} dimensions; expected the 2 of a linear layer's weight"
    for place, entry in enumerate(shape):
        sizes = entry if isinstance(entry, tuple) else (entry,)
        if isinstance(entry, tuple) and place != dim:
            return f"{described} lists parts in dimension {place}, and dimension {dim} is cut"
        least = 1 if isinstance(entry, tuple) else -1
        if not sizes or not all(isinstance(one, int) and one and one >= least for one in sizes):
            return f"{described} has an entry {entry!r}; expected lengths above 0, or one -1"
    return None


def _nested(value: Any) -> Any:
    """Return lists, and lists in them, as tuples."""
    return tuple(map(_nested, value)) if isinstance(value, list | tuple) else value


class TensorParallelDegree(Section):
    """The degree, given a second time."""

    tp_size: Integer = key(1, "Ranks that share a layer; 1, or the same as autotp_size.", ge=1)
    tp_grain_size: Integer = key(
        1,
        "Slices of layers that are not split between heads are multiples of this many rows; the "
        "last rank has the remainder.",
        ge=1,
    )
    mpu: Any = key(
        None,
        "Object with Megatron's methods; passed by programs only. Its tensor-parallel ranks are "
        "compared with those of autotp_size.",
    )
    tp_group: Any = key(
        None,
        "Process group of the ranks that share a layer; passed by programs only. Expected are "
        "consecutive ranks, as many as autotp_size.",
    )


class SplitLayer(Section):
    """Rule for the parameters that match a pattern."""

    patterns: Texts = key(
        (), "Regular expressions, matched from the start of a parameter's full name."
    )
    partition_type: Annotated[Literal["column", "row", "skip"], BeforeValidator(lowered)] = key(
        "column",
        "column splits outputs, row splits inputs and sums the ranks' results, skip does nothing.",
    )
    shape: Annotated[tuple[Any, ...] | None, BeforeValidator(_nested)] = key(
        None,
        "Parts that are fused in a weight, each of which is cut: [3, -1] for three equal ones, "
        "[[16, 4, 4], -1] for their rows.",
    )
    partition_dim: Integer | None = key(
        None, "Dimension of that shape that is cut; null is 0 for column and 1 for row.", ge=0
    )
    model_types: Texts | None = key(
        None, "Types of models (`model.config.model_type`) that the rule is for; null is all."
    )
    gather_output: Boolean = key(False, "column: every rank gets the whole output.")
    grad_allreduce: Boolean = key(
        False,
        "skip: the gradient is summed over the ranks. For parameters that each rank uses on its "
        "own slice of values, such as norms of single heads.",
    )


class PartitionConfig(Section):
    """Custom rules, which replace the plan of the model."""

    use_default_specs: Boolean = key(True, "Add the rules of preset_model after these.")
    layer_specs: tuple[SplitLayer, ...] = key((), "Rules, in order; the first match applies.")
    tp_size: Integer = key(1, "Overridden by autotp_size.", ge=1, mark=NO_EFFECT)
    embedding_partition_dim: Integer = key(1, "Dimension of embeddings.", mark=NO_EFFECT)
    lm_head_patterns: Texts = key(
        ("lm_head", "embed_out"), "Names of the output layer, which is cut by its vocabulary."
    )
    strict_mode: Boolean = key(False, "Refuse a linear layer that matches no rule.")


class TensorParallel(Section):
    """Cuts linear layers over ranks by the model's plan, a preset or custom rules."""

    switch: ClassVar[str | None] = "autotp_size"
    off: ClassVar[tuple[Any, ...]] = (0, 1)
    aliases: ClassVar[Mapping[str, str]] = {
        "replace_with_kernel_inject": "kernel_inject",
        "tensor_parallel": "tp",
    }

    autotp_size: Integer = key(
        0,
        "Ranks that share a layer, consecutive ones; 0 and 1 are off. They divide the number of "
        "ranks, and read the same samples.",
        ge=0,
    )
    preset_model: (
        Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None
    ) = key(None, "Rules made for one family of models, instead of the model's plan.")
    tp_overlap_comm: Boolean = key(
        False,
        "Sum the gradient of a column layer's input while that of its weight is computed. Without "
        "it, layers with the same input share one sum.",
    )
    dtype: Any = key(
        "torch.float16",
        'Dtype of the model ("bf16", "fp16", "fp32" or a torch.dtype). It is compared with the '
        "one in which the model computes, and changes nothing.",
    )
    tp: TensorParallelDegree = section(TensorParallelDegree, "The degree, given a second time.")
    injection_policy_tuple: tuple[Any, ...] | None = key(
        None,
        "Ends of the names of row layers; the other linear layers of blocks are columns. For "
        "models without a plan.",
    )
    keep_module_on_host: Boolean = key(
        False,
        "Keep the slices in host memory. Use `zero_optimization.offload_param`.",
        mark=NO_EFFECT,
    )
    kernel_inject: Boolean = key(False, "Replace modules with inference kernels.", mark=NO_EFFECT)
    vocab_parallel_lm_head: Boolean | None = key(
        None,
        "Split the output layer by vocabulary, and with it an embedding that shares its weight. "
        "true: in training the loss is computed from slices of the logits, so that whole logits "
        "never exist; the output's `logits` are then this rank's slice. null: follow the model's "
        "plan, with whole logits. false: a tied output layer stays whole.",
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] = key(
        "torch",
        "Implementation of that loss.",
        mark=Mark(status="not built yet", only=("liger",)),
    )
    sequence_parallel: Boolean = key(
        False,
        "Split activations between the layers (norms, dropout, residuals) by the sequence: ranks "
        "send the same bytes, and each stores only its slice of these activations. Hadal's own; "
        "for decoders of transformers.",
    )
    partition_config: PartitionConfig | None = key(None, "Custom rules.")
