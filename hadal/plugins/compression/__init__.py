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

from hadal.lazy import lazy_names

if TYPE_CHECKING:
    from hadal.plugins.compression.compress import (
        CompressionScheduler as CompressionScheduler,
        init_compression as init_compression,
        redundancy_clean as redundancy_clean,
        student_initialization as student_initialization,
    )
    from hadal.plugins.compression.export import (
        load_packed as load_packed,
        save_packed as save_packed,
    )
    from hadal.plugins.compression.packed import (
        compute_in_integers as compute_in_integers,
        pack_weights as pack_weights,
        unpack_weights as unpack_weights,
    )
    from hadal.plugins.compression.report import (
        CompressionReport as CompressionReport,
        compression_report as compression_report,
    )
    from hadal.plugins.compression.student import (
        distillation_loss as distillation_loss,
        hidden_state_loss as hidden_state_loss,
        register_with_transformers as register_with_transformers,
    )

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "hadal.plugins.compression.compress": (
            "CompressionScheduler init_compression redundancy_clean student_initialization"
        ),
        "hadal.plugins.compression.export": "load_packed save_packed",
        "hadal.plugins.compression.packed": "compute_in_integers pack_weights unpack_weights",
        "hadal.plugins.compression.report": "CompressionReport compression_report",
        "hadal.plugins.compression.student": (
            "distillation_loss hidden_state_loss register_with_transformers"
        ),
    },
)
