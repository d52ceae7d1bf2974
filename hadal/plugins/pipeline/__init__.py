"""Models split into pipeline stages: the splits, the grid of ranks, and each stage's schedule.

`hadal.initialize` returns a `PipelineEngine` for a `PipelineModule`.
"""

from hadal.plugins.pipeline.grid import PipelineParallelGrid
from hadal.plugins.pipeline.module import PipelineModule
from hadal.plugins.pipeline.specs import LayerSpec, TiedLayerSpec
from hadal.plugins.pipeline.topology import (
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
