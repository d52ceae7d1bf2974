"""The top-level keys that are not sections."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, TUNABLE, Section, key
from hadal.config.values import Boolean, Dtype, Integer, Number, lowered

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


class Communication(Section):
    """Keys for averaging gradients over ranks."""

    communication_data_type: Dtype | None = key(
        None,
        "Dtype of gradients on the wire: fp16, bf16 or fp32. null uses the dtype they are "
        "accumulated in, which follows the model; on an accelerator 16-bit gradients are then "
        "sent in fp32, because its backend sums in the dtype on the wire and rounds after each "
        "rank, while CPUs sum in fp32. That doubles the bytes of a reduction and takes one "
        "bucket in fp32 while it is in flight; bf16 or fp16 halves them, and sums are rounded.",
    )
    seq_parallel_communication_data_type: Dtype | None = key(
        "fp32", "Replaces communication_data_type when sequence_parallel_size is greater than 1."
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lowered)] = key(
        "mean", "Average the ranks' gradients, or sum them (stages 0 to 2)."
    )
    prescale_gradients: Boolean = key(
        False,
        "Divide gradients by the number of ranks before they are rounded for the wire and "
        "summed, not after. Stages 2 and 3 require reduce_scatter false.",
    )
    gradient_predivide_factor: Number = key(
        1.0,
        "Divide gradients by this factor before they are rounded for the wire, and divide the sum "
        "by (number of ranks / factor). Stages 2 and 3 require reduce_scatter false.",
        gt=0,
    )
    sparse_gradients: Boolean = key(
        False,
        "Send only the nonzero rows of the gradients of nn.Embedding and nn.EmbeddingBag when "
        "that takes fewer bytes. Applies to embeddings that are trainable from the start.",
    )
    disable_allgather: Boolean = key(
        False, "An old switch, which DeepSpeed does not read either.", mark=NO_EFFECT
    )
