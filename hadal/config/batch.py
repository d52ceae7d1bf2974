"""The batch: three sizes of which any one follows from the others and the number of ranks."""

from hadal.config.section import TUNABLE, Section, key
from hadal.config.values import Boolean, Integer

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Batch(Section):
    """How many samples make one update, and how they are cut."""

    train_batch_size: Integer = key(
        None,
        "Samples of one update over all ranks: micro-batch x accumulation x ranks that see"
        " different samples. Any one of the three sizes follows from the other two.",
        gt=0,
    )
    train_micro_batch_size_per_gpu: Integer = key(
        None,
        "Samples of one rank's forward and backward pass; every rank's loss counts alike, whatever"
        " the number of its samples.",
        gt=0,
        mark=TUNABLE,
    )
    gradient_accumulation_steps: Integer = key(
        None, "Micro-batches of one update; `engine.backward` divides the loss by it.", gt=0
    )
    managed_gradient_accumulation: Boolean = key(
        True,
        "The engine counts micro-batches, and `engine.step` updates the weights at the last one."
        " With false every `engine.step` is an update with all gradients since the one before,"
        " after as many backwards as the caller likes. The loss is divided by"
        " gradient_accumulation_steps all the same; `engine.backward(loss, scale_wrt_gas=False)`"
        " leaves it as it is.",
    )
    sequence_parallel_size: Integer = key(
        1,
        "Consecutive ranks that share each sequence; divides the number of ranks. They get the same"
        " samples and count as one in the batch. Each gives `engine.backward` its part of the loss,"
        " such that the parts add up to the loss of the whole sequence.",
        ge=1,
    )
    data_parallel_size: Integer | None = key(
        None,
        "Ranks that see different samples, checked beside sequence_parallel_size: the two multiply"
        " to the number of ranks. Alone it has no effect.",
        ge=1,
    )
