"""Long sequences: split over ranks, computed in tiles, and their losses.

Tests: tests/sequence/test_attention.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hadal.lazy import importer_of

if TYPE_CHECKING:
    from hadal.sequence.attention import DistributedAttention
    from hadal.sequence.cross_entropy import (
        linear_cross_entropy,
        vocab_parallel_cross_entropy,
        vocab_sequence_parallel_cross_entropy,
    )
    from hadal.sequence.groups import SequenceGroups, initialize_sequence_parallel
    from hadal.sequence.huggingface import UlyssesSPAttentionHF
    from hadal.sequence.loader import UlyssesSPDataLoaderAdapter
    from hadal.sequence.loss import mean_over_sequence, sequence_loss
    from hadal.sequence.ring import ring_attention
    from hadal.sequence.tiles import (
        AutogradComputeMLP,
        SequenceTiledCompute,
        TiledFusedLogitsLoss,
        TiledMLP,
        sequence_tiled_compute,
    )

__all__ = [
    "AutogradComputeMLP",
    "DistributedAttention",
    "SequenceGroups",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "initialize_sequence_parallel",
    "linear_cross_entropy",
    "mean_over_sequence",
    "ring_attention",
    "sequence_loss",
    "sequence_tiled_compute",
    "vocab_parallel_cross_entropy",
    "vocab_sequence_parallel_cross_entropy",
]

__getattr__ = importer_of(
    __name__,
    {
        "AutogradComputeMLP": "hadal.sequence.tiles",
        "DistributedAttention": "hadal.sequence.attention",
        "SequenceGroups": "hadal.sequence.groups",
        "SequenceTiledCompute": "hadal.sequence.tiles",
        "TiledFusedLogitsLoss": "hadal.sequence.tiles",
        "TiledMLP": "hadal.sequence.tiles",
        "UlyssesSPAttentionHF": "hadal.sequence.huggingface",
        "UlyssesSPDataLoaderAdapter": "hadal.sequence.loader",
        "initialize_sequence_parallel": "hadal.sequence.groups",
        "linear_cross_entropy": "hadal.sequence.cross_entropy",
        "mean_over_sequence": "hadal.sequence.loss",
        "ring_attention": "hadal.sequence.ring",
        "sequence_loss": "hadal.sequence.loss",
        "sequence_tiled_compute": "hadal.sequence.tiles",
        "vocab_parallel_cross_entropy": "hadal.sequence.cross_entropy",
        "vocab_sequence_parallel_cross_entropy": "hadal.sequence.cross_entropy",
    },
)


def __dir__() -> list[str]:
    return __all__
