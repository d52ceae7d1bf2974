"""`data_types`: dtypes that do not follow from fp16 or bf16."""

from typing import Literal

from hadal.config.section import UNBUILT, Mark, Section, key
from hadal.config.values import Dtype, TextOrTexts


class DataTypes(Section):
    """Dtypes of things that otherwise follow the model's precision."""

    grad_accum_dtype: Dtype | None = key(
        None, "Dtype in which micro-batches' gradients are summed; null is the model's dtype."
    )
    param_dtype: Dtype | None = key(
        None, "Dtype of the weights; where given it must be the one that fp16 or bf16 implies."
    )
    buffer_dtype: Dtype | None = key(
        None,
        "Dtype to which floating-point buffers are cast; null is the model's dtype under fp16 and "
        "bf16, and leaves them otherwise.",
        mark=UNBUILT,
    )
    keep_in_fp32_modules: Literal["auto"] | TextOrTexts = key(
        "auto",
        "Patterns of buffers that stay in fp32; auto follows the model's own list, [] is none.",
        mark=Mark(status="not built yet", auto_is_a_word=True),
    )
