"""How gradients are averaged, as top-level keys."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Section, key
from hadal.config.values import Boolean, Dtype, Number, lowered


class Communication(Section):
    """The gradients' way to their average."""

    communication_data_type: Dtype | None = key(
        None,
        "Dtype of gradients on the wire: fp16, bf16 or fp32. null: the one they are accumulated "
        "in, which follows the model; on an accelerator 16-bit gradients then travel in fp32. Its "
        "backend adds up in the dtype that travels and rounds after each rank, where CPUs add up "
        "in fp32. That costs twice the bytes of a reduction, and one bucket in fp32 while it is "
        "under way; bf16 or fp16 halves them, and sums are rounded.",
    )
    seq_parallel_communication_data_type: Dtype | None = key(
        "fp32", "The same, in its place, where sequence_parallel_size is more than 1."
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lowered)] = key(
        "mean", "Average the ranks' gradients, or add them up undivided (stages 0 to 2)."
    )
    prescale_gradients: Boolean = key(
        False,
        "Divide gradients by the ranks before they are rounded for the wire and added up, not "
        "after. Stages 2 and 3: with reduce_scatter false.",
    )
    gradient_predivide_factor: Number = key(
        1.0,
        "Divide gradients by this before they are rounded for the wire, and by the rest of the "
        "ranks after they are added up. Stages 2 and 3: with reduce_scatter false.",
        gt=0,
    )
    sparse_gradients: Boolean = key(
        False,
        "Send the gradients of nn.Embedding and nn.EmbeddingBag as the rows that are not zero, "
        "wherever that takes fewer bytes. Those that are trained from the start.",
    )
    disable_allgather: Boolean = key(
        False, "An old switch, which DeepSpeed does not read either.", mark=NO_EFFECT
    )
