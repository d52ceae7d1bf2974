"""`hybrid_engine`: training and generating with one model."""

from typing import ClassVar

from hadal.config.section import NO_EFFECT, STAGE_3, UNBUILT, Section, key
from hadal.config.values import Boolean, Integer


class HybridEngine(Section):
    """Texts generated between updates at stage 3, as reinforcement learning needs them."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(
        False, "Generate as the other keys say. The model must have a `generate`.", mark=STAGE_3
    )
    pin_parameters: Boolean = key(
        True,
        "Gather the whole model once for each call of `generate`, during which ranks may generate"
        " different numbers of tokens; false: gather weights as they are used.",
        mark=STAGE_3,
    )
    inference_tp_size: Integer = key(
        1, "Tensor-parallel ranks during generation.", mark=UNBUILT, ge=1
    )
    max_out_tokens: Integer = key(
        512, "Capacity of the key-value cache, which is the model's own.", mark=NO_EFFECT, gt=0
    )
    release_inference_cache: Boolean = key(
        False, "The model's own cache is freed after each call.", mark=NO_EFFECT
    )
    tp_gather_partition_size: Integer = key(8, "Layers gathered at a time.", mark=NO_EFFECT, ge=1)
    enable_cuda_graph: Boolean = key(
        False,
        "One graph for each position; models of transformers compile with their own cache.",
        mark=NO_EFFECT,
    )
