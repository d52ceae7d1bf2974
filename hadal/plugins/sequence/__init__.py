"""Long sequences: split over ranks, computed in tiles, and their losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hadal.lazy import importer_of

if TYPE_CHECKING:
    from hadal.plugins.sequence.attention import DistributedAttention
    from hadal.plugins.sequence.cross_entropy import (
        linear_cross_entropy,
        vocab_parallel_cross_entropy,
        vocab_sequence_parallel_cross_entropy,
    )
    from hadal.plugins.sequence.groups import SequenceGroups, initialize_sequence_parallel
    from hadal.plugins.sequence.huggingface import UlyssesSPAttentionHF
    from hadal.plugins.sequence.loader import UlyssesSPDataLoaderAdapter
    from hadal.plugins.sequence.loss import mean_over_sequence, sequence_loss
    from hadal.plugins.sequence.ring import ring_attention
    from hadal.plugins.sequence.tiles import (
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
        "AutogradComputeMLP": "hadal.plugins.sequence.tiles",
        "DistributedAttention": "hadal.plugins.sequence.attention",
        "SequenceGroups": "hadal.plugins.sequence.groups",
        "SequenceTiledCompute": "hadal.plugins.sequence.tiles",
        "TiledFusedLogitsLoss": "hadal.plugins.sequence.tiles",
        "TiledMLP": "hadal.plugins.sequence.tiles",
        "UlyssesSPAttentionHF": "hadal.plugins.sequence.huggingface",
        "UlyssesSPDataLoaderAdapter": "hadal.plugins.sequence.loader",
        "initialize_sequence_parallel": "hadal.plugins.sequence.groups",
        "linear_cross_entropy": "hadal.plugins.sequence.cross_entropy",
        "mean_over_sequence": "hadal.plugins.sequence.loss",
        "ring_attention": "hadal.plugins.sequence.ring",
        "sequence_loss": "hadal.plugins.sequence.loss",
        "sequence_tiled_compute": "hadal.plugins.sequence.tiles",
        "vocab_parallel_cross_entropy": "hadal.plugins.sequence.cross_entropy",
        "vocab_sequence_parallel_cross_entropy": "hadal.plugins.sequence.cross_entropy",
    },
)


def __dir__() -> list[str]:
    return __all__
