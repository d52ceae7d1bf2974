"""Models split into pipeline stages: the splits, the grid of ranks, and each stage's schedule.

`hadal.initialize` returns a `PipelineEngine` for a `PipelineModule`.
"""

from hadal.pipeline.grid import PipelineParallelGrid
from hadal.pipeline.module import PipelineModule
from hadal.pipeline.specs import LayerSpec, TiedLayerSpec
from hadal.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]
