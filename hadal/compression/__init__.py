"""Compression during training: weights and activations in fewer bits, fewer of them, fewer layers.

Words of this folder.

technique        one section of `compression_training`, such as `weight_quantization`
effective        weight that a forward computes with: the trained one, quantized and masked
applied updates  updates that were not skipped; every schedule is a function of their number
clean            make the effective weights the model's own, and remove what they leave out

The trained weights stay as they are until `redundancy_clean`. A module of the model keeps its
parameters, hooks and place; only its class becomes a subclass that computes with effective weights.
"""

from hadal.compression.compress import (
    CompressionScheduler,
    init_compression,
    redundancy_clean,
    student_initialization,
)

__all__ = [
    "CompressionScheduler",
    "init_compression",
    "redundancy_clean",
    "student_initialization",
]
