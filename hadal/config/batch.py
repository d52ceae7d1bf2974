"""The batch: three sizes of which any one follows from the others and the number of ranks."""

from hadal.config.section import NO_EFFECT, TUNABLE, UNBUILT, Section, key
from hadal.config.values import Boolean, Integer

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Batch(Section):
    """How many samples make one update, and how they are cut."""

    train_batch_size: Integer = key(
        None,
        "Samples of one update over all ranks: micro-batch x accumulation x ranks.",
        gt=0,
    )
    train_micro_batch_size_per_gpu: Integer = key(
        None, "Samples of one rank's forward and backward pass.", gt=0, mark=TUNABLE
    )
    gradient_accumulation_steps: Integer = key(None, "Micro-batches of one update.", gt=0)
    managed_gradient_accumulation: Boolean = key(
        True,
        "The engine counts micro-batches; false leaves the border to the caller.",
        mark=UNBUILT,
    )
    sequence_parallel_size: Integer = key(
        1, "Ranks that share one sequence; divides the number of ranks.", ge=1, mark=UNBUILT
    )
    data_parallel_size: Integer | None = key(
        None,
        "Ranks that see different samples; means something beside sequence_parallel_size only.",
        ge=1,
        mark=NO_EFFECT,
    )
