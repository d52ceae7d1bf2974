"""`activation_checkpointing`: recomputing activations instead of keeping them."""

from hadal.config.section import UNBUILT, Section, key, unbuilt_beside
from hadal.config.values import Boolean, Integer


class ActivationCheckpointing(Section):
    """How the inputs of recomputed blocks are kept."""

    partition_activations: Boolean = key(
        False, "Shard kept inputs over the ranks that share the model.", mark=UNBUILT
    )
    cpu_checkpointing: Boolean = key(False, "Keep inputs in host memory.", mark=UNBUILT)
    contiguous_memory_optimization: Boolean = key(
        False,
        "Lay kept inputs end to end. Needs partition_activations and number_checkpoints.",
        mark=UNBUILT,
    )
    number_checkpoints: Integer | None = key(
        None,
        "Recomputed blocks, for the buffers of the key above.",
        gt=0,
        mark=unbuilt_beside("contiguous_memory_optimization"),
    )
    synchronize_checkpoint_boundary: Boolean = key(
        False, "Wait for the device at each border.", mark=UNBUILT
    )
    profile: Boolean = key(False, "Log the time of each recomputed block.", mark=UNBUILT)
