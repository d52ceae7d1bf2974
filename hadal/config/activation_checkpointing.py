"""`activation_checkpointing`: recomputing activations instead of storing them."""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Gt

from hadal.config.section import Section, key, rule
from hadal.config.values import Boolean, Integer, Number, Texts
from hadal.errors import Fault


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
        None, "Number of recomputed blocks whose inputs the contiguous buffers have room for.", gt=0
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

    @rule("number_checkpoints")
    def _contiguous_inputs(self) -> Iterator[Fault]:
        if self.contiguous_memory_optimization:
            if self.number_checkpoints is None:
                yield Fault(
                    "number_checkpoints",
                    "required by contiguous_memory_optimization: set the number of recomputed"
                    " blocks",
                )
            if not self.partition_activations:
                yield Fault(
                    "contiguous_memory_optimization", "needs partition_activations; enable that too"
                )

    @rule("memory_budget")
    def _size_of_budget(self) -> Iterator[Fault]:
        budget = self.memory_budget
        if budget is not None and 1 < budget < 1 << 20:
            yield Fault(
                "memory_budget",
                f"{budget:g} is neither a fraction of the device (up to 1, such as 0.9) nor a"
                " number of bytes that a model can need (a MiB or more); set one of the two",
            )
