"""`elasticity`: one batch size that suits many numbers of ranks."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from annotated_types import Ge

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Number


class Elasticity(Section):
    """Chooses the batch size and the numbers of ranks that can train it."""

    switch: ClassVar[str | None] = "enabled"
    renamed: ClassVar[Mapping[str, str]] = {"prefer_large_batch": "prefer_larger_batch"}

    enabled: Boolean = key(False, "Choose the batch sizes.")
    max_train_batch_size: Integer = key(2000, "Largest batch, in samples. Required.", gt=0)
    micro_batch_sizes: tuple[Annotated[Integer, Ge(1)], ...] = key(
        (2, 4, 6), "Micro-batches to choose from, in samples. Required."
    )
    min_gpus: Integer = key(1, "Minimum number of ranks.", ge=1)
    max_gpus: Integer = key(10000, "Maximum number of ranks.", ge=1)
    min_time: Integer = key(
        0,
        "Minutes of training before `hadal run --elastic_training` restarts the ranks to admit "
        "new hosts.",
        ge=0,
    )
    prefer_larger_batch: Boolean = key(True, "Choose the larger batch among equals.")
    ignore_non_elastic_batch_info: Boolean = key(
        False, "Override batch sizes given elsewhere rather than refuse them."
    )
    version: Number = key(0.2, "Version of the algorithm: 0.1 or 0.2.")
    num_gpus_per_node: Integer = key(1, "Ranks per node (0.2).", ge=1)
    model_parallel_size: Integer = key(1, "Ranks that share one copy of the model (0.2).", ge=1)
