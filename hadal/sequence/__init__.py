"""Long sequences: split over ranks, computed in tiles, and their losses."""

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
