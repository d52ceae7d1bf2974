"""How gradients are averaged, as top-level keys."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, UNBUILT, UNBUILT_WHERE_USED, Section, key
from hadal.config.values import Boolean, Dtype, Number, lowered


class Communication(Section):
    """The gradients' way to their average."""

    communication_data_type: Dtype | None = key(
        None, "Dtype of gradients on the wire: fp16, bf16 or fp32; null follows the model."
    )
    seq_parallel_communication_data_type: Dtype | None = key(
        "fp32", "The same, where sequences are shared between ranks.", mark=UNBUILT_WHERE_USED
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lowered)] = key(
        "mean", "Average the ranks' gradients, or add them.", mark=UNBUILT
    )
    prescale_gradients: Boolean = key(False, "Divide before adding up, not after.", mark=UNBUILT)
    gradient_predivide_factor: Number = key(
        1.0, "Part of the division that is done before adding up.", gt=0, mark=UNBUILT
    )
    sparse_gradients: Boolean = key(
        False, "Send embeddings' gradients as the rows that are not zero.", mark=UNBUILT
    )
    disable_allgather: Boolean = key(False, "An old switch.", mark=NO_EFFECT)
