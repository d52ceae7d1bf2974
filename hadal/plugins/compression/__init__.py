"""Compression during training: weights and activations in fewer bits, fewer of them, fewer layers.

Words of this folder.

technique        one section of `compression_training`, such as `weight_quantization`
effective        the weight that a forward computes with: the trained one, quantized and masked
applied updates  updates that were not skipped; every schedule is a function of their number
clean            make the effective weights permanent, and remove what they leave out
grid             the values that a quantized weight may have: integers times a scale, plus a zero
packed           stored as integers of a few bits, and dequantized in each forward

The trained weights stay as they are until `redundancy_clean`. A module of the model keeps its
parameters, hooks and place; only its class becomes a subclass that computes with effective weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hadal.lazy import importer_of

if TYPE_CHECKING:
    from hadal.plugins.compression.compress import (
        CompressionScheduler,
        init_compression,
        redundancy_clean,
        student_initialization,
    )
    from hadal.plugins.compression.files import load_packed, save_packed
    from hadal.plugins.compression.packed import compute_in_integers, pack_weights, unpack_weights
    from hadal.plugins.compression.report import CompressionReport, compression_report
    from hadal.plugins.compression.student import (
        distillation_loss,
        hidden_state_loss,
        register_with_transformers,
    )

__all__ = [
    "CompressionReport",
    "CompressionScheduler",
    "compression_report",
    "compute_in_integers",
    "distillation_loss",
    "hidden_state_loss",
    "init_compression",
    "load_packed",
    "pack_weights",
    "redundancy_clean",
    "register_with_transformers",
    "save_packed",
    "student_initialization",
    "unpack_weights",
]

__getattr__ = importer_of(
    __name__,
    {
        "CompressionReport": "hadal.plugins.compression.report",
        "CompressionScheduler": "hadal.plugins.compression.compress",
        "compression_report": "hadal.plugins.compression.report",
        "compute_in_integers": "hadal.plugins.compression.packed",
        "distillation_loss": "hadal.plugins.compression.student",
        "hidden_state_loss": "hadal.plugins.compression.student",
        "init_compression": "hadal.plugins.compression.compress",
        "load_packed": "hadal.plugins.compression.files",
        "pack_weights": "hadal.plugins.compression.packed",
        "redundancy_clean": "hadal.plugins.compression.compress",
        "register_with_transformers": "hadal.plugins.compression.student",
        "save_packed": "hadal.plugins.compression.files",
        "student_initialization": "hadal.plugins.compression.compress",
        "unpack_weights": "hadal.plugins.compression.packed",
    },
)


def __dir__() -> list[str]:
    return __all__
