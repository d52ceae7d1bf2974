"""`activation_checkpointing`: recomputing activations instead of storing them.

Tests: tests/config/test_every_key.py
"""

from hadal.config.section import UNBUILT, Section, key, unbuilt_beside
from hadal.config.values import Boolean, Integer


class ActivationCheckpointing(Section):
    """Options for storing the inputs of recomputed blocks."""

    partition_activations: Boolean = key(
        False, "Shard the stored inputs over the tensor-parallel ranks.", mark=UNBUILT
    )
    cpu_checkpointing: Boolean = key(False, "Store the inputs in host memory.", mark=UNBUILT)
    contiguous_memory_optimization: Boolean = key(
        False,
        "Store the inputs in one contiguous buffer. Requires partition_activations and "
        "number_checkpoints.",
        mark=UNBUILT,
    )
    number_checkpoints: Integer | None = key(
        None,
        "Number of recomputed blocks; sizes the contiguous buffer.",
        gt=0,
        mark=unbuilt_beside("contiguous_memory_optimization"),
    )
    synchronize_checkpoint_boundary: Boolean = key(
        False, "Synchronize with the device at each block boundary.", mark=UNBUILT
    )
    profile: Boolean = key(False, "Log the time of each recomputed block.", mark=UNBUILT)
