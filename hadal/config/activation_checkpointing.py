"""`activation_checkpointing`: recomputing activations instead of storing them."""

from typing import Annotated, Literal

from annotated_types import Gt

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Number, Texts


class ActivationCheckpointing(Section):
    """Modules that are recomputed in backward, and options for storing their inputs.

    The options also apply to a program's own calls of `deepspeed.checkpointing.checkpoint`.
    """

    modules: Literal["units"] | Texts | None = key(
        None,
        'Modules to recompute: "units" for the repeated blocks of the model, or patterns of names '
        '("model.layers.*") and class names ("LlamaDecoderLayer"). Hadal\'s own.',
    )

    memory_budget: Annotated[Number, Gt(0)] | None = key(
        None,
        "The most memory in use on each device: a share of it up to 1, or bytes. Of `modules` (by "
        "default the units), only as many are recomputed, or their inputs stored on the host, as a "
        "measured update needs. Hadal's own.",
    )
    partition_activations: Boolean = key(
        False, "Shard the stored inputs over the tensor-parallel ranks of an mpu."
    )
    cpu_checkpointing: Boolean = key(
        False, "Store the inputs in pinned host memory; backward prefetches them."
    )
    contiguous_memory_optimization: Boolean = key(
        False,
        "Store the inputs in preallocated contiguous buffers. Requires partition_activations and "
        "number_checkpoints.",
    )
    number_checkpoints: Integer | None = key(
        None,
        "Number of recomputed blocks whose inputs the contiguous buffers have room for.",
        gt=0,
    )
    synchronize_checkpoint_boundary: Boolean = key(
        False,
        "Synchronize with the device before and after the forward and the backward of each "
        "recomputed block.",
    )
    profile: Boolean = key(False, "Log the times of each recomputed block's forward and backward.")

    @property
    def asks(self) -> bool:
        """True if an option of storing inputs differs from its default."""
        return (
            self.partition_activations
            or self.cpu_checkpointing
            or self.synchronize_checkpoint_boundary
            or self.profile
        )
