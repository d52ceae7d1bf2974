"""Top-level keys for averaging gradients."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Section, key
from hadal.config.values import Boolean, Dtype, Number, lowered


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
