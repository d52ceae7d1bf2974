"""Long sequences: split over ranks, computed in tiles, and their losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hadal.lazy import lazy_names

if TYPE_CHECKING:
    from hadal.plugins.sequence.attention import DistributedAttention as DistributedAttention
    from hadal.plugins.sequence.cross_entropy import (
        linear_cross_entropy as linear_cross_entropy,
        mean_over_sequence as mean_over_sequence,
        sequence_loss as sequence_loss,
        vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
        vocab_sequence_parallel_cross_entropy as vocab_sequence_parallel_cross_entropy,
    )
    from hadal.plugins.sequence.groups import (
        SequenceGroups as SequenceGroups,
        initialize_sequence_parallel as initialize_sequence_parallel,
    )
    from hadal.plugins.sequence.huggingface import UlyssesSPAttentionHF as UlyssesSPAttentionHF
    from hadal.plugins.sequence.loader import (
        UlyssesSPDataLoaderAdapter as UlyssesSPDataLoaderAdapter,
    )
    from hadal.plugins.sequence.ring import ring_attention as ring_attention
    from hadal.plugins.sequence.tiles import (
        AutogradComputeMLP as AutogradComputeMLP,
        SequenceTiledCompute as SequenceTiledCompute,
        TiledFusedLogitsLoss as TiledFusedLogitsLoss,
        TiledMLP as TiledMLP,
        sequence_tiled_compute as sequence_tiled_compute,
    )

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "hadal.plugins.sequence.attention": "DistributedAttention",
        "hadal.plugins.sequence.cross_entropy": (
            "linear_cross_entropy mean_over_sequence sequence_loss "
            "vocab_parallel_cross_entropy vocab_sequence_parallel_cross_entropy"
        ),
        "hadal.plugins.sequence.groups": "SequenceGroups initialize_sequence_parallel",
        "hadal.plugins.sequence.huggingface": "UlyssesSPAttentionHF",
        "hadal.plugins.sequence.loader": "UlyssesSPDataLoaderAdapter",
        "hadal.plugins.sequence.ring": "ring_attention",
        "hadal.plugins.sequence.tiles": (
            "AutogradComputeMLP SequenceTiledCompute TiledFusedLogitsLoss TiledMLP "
            "sequence_tiled_compute"
        ),
    },
)
