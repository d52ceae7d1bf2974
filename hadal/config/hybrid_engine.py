"""`hybrid_engine`: training and generating with one model.

Tests: tests/config/test_every_key.py
"""

from typing import ClassVar

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Integer


class HybridEngine(Section):
    """Switches between training and generation, for reinforcement learning."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Use the engine that can generate.", mark=UNBUILT)
    max_out_tokens: Integer = key(512, "Capacity of the key-value cache, in tokens.", gt=0)
    inference_tp_size: Integer = key(1, "Tensor-parallel ranks during generation.", ge=1)
    release_inference_cache: Boolean = key(False, "Free the cache after each generation.")
    pin_parameters: Boolean = key(True, "At stage 3, gather the whole model to generate.")
    tp_gather_partition_size: Integer = key(8, "Layers gathered at a time.", ge=1)
    enable_cuda_graph: Boolean = key(False, "Record one graph per position.")
