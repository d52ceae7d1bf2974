"""The batch sizes: each of the three follows from the other two and the number of ranks."""

from hadal.config.section import TUNABLE, Section, key
from hadal.config.values import Boolean, Integer

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Batch(Section):
    """The number of samples in one update and how they are divided."""

    train_batch_size: Integer = key(
        None,
        "Samples in one update over all ranks: micro-batch x accumulation steps x data-parallel "
        "ranks. Any one of the three sizes follows from the other two.",
        gt=0,
    )
    train_micro_batch_size_per_gpu: Integer = key(
        None,
        "Samples in one rank's forward and backward pass. Every rank's loss has the same "
        "weight, however many samples the rank has.",
        gt=0,
        mark=TUNABLE,
    )
    gradient_accumulation_steps: Integer = key(
        None, "Micro-batches in one update; `engine.backward` divides the loss by it.", gt=0
    )
    managed_gradient_accumulation: Boolean = key(
        True,
        "The engine counts micro-batches, and `engine.step` updates the weights at the last "
        "one. If false, every `engine.step` is an update with all gradients since the previous "
        "one, after as many backward passes as the caller likes. The loss is divided by "
        "gradient_accumulation_steps either way; `engine.backward(loss, scale_wrt_gas=False)` "
        "does not divide it.",
    )
    sequence_parallel_size: Integer = key(
        1,
        "Number of consecutive ranks that share each sequence; it must divide the number of "
        "ranks. These ranks receive the same samples and count as one in the batch. In training, a "
        "model of transformers gets this rank's slice of each batch, its attention exchanges heads "
        "(Ulysses; with fewer heads than ranks, keys and values travel around a ring), and its "
        "loss is that of whole sequences. Any other model gets the program's inputs, and each "
        "rank passes its part of the loss to `engine.backward`; the parts must add up to the loss "
        "of the whole sequence.",
        ge=1,
    )
    data_parallel_size: Integer | None = key(
        None,
        "Number of ranks that see different samples. Only checked: together with "
        "sequence_parallel_size it must multiply to the number of ranks. Alone it has no "
        "effect.",
        ge=1,
    )
