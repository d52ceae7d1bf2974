"""Long sequences: computation in tiles, and losses over large vocabularies."""

from hadal.sequence.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)
from hadal.sequence.tiles import (
    AutogradComputeMLP,
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)

__all__ = [
    "AutogradComputeMLP",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "linear_cross_entropy",
    "sequence_tiled_compute",
    "vocab_parallel_cross_entropy",
    "vocab_sequence_parallel_cross_entropy",
]
