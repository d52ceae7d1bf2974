"""`data_types`: dtypes that fp16 and bf16 do not decide."""

from typing import Literal

from hadal.config.section import AUTO_IS_A_WORD, Section, key
from hadal.config.values import Boolean, Dtype, Texts


class DataTypes(Section):
    """Dtypes that otherwise follow the model's precision."""

    grad_accum_dtype: Dtype | None = key(
        None,
        "Dtype in which the gradients of micro-batches are accumulated, at every stage; null is "
        "the model's dtype. It is also the dtype on the wire, unless `communication_data_type` "
        "sets another one.",
    )
    param_dtype: Dtype | None = key(
        None, "Dtype of the weights; if given, it must be the one that fp16 or bf16 implies."
    )
    buffer_dtype: Dtype | None = key(
        None,
        "Dtype to cast floating-point buffers to; null leaves them unchanged, so that a "
        "rotary embedding's frequencies stay exact. Only running statistics (of batch and "
        "instance norms) then take their module's dtype, as torch requires. If a module adds a "
        "buffer to 16-bit values and passes the sum to a layer, set the model's dtype.",
    )
    keep_in_fp32_modules: Literal["auto"] | Texts = key(
        "auto",
        "Modules whose floating-point buffers are not cast: regular expressions for one or more "
        "whole components of a buffer's full name (`norm` matches `blocks.0.norm.mean`, not "
        "`layernorm.mean`). auto uses the model's own lists, `_keep_in_fp32_modules` and "
        "`_keep_in_fp32_modules_strict`; [] is none. Parameters of these modules are cast like "
        "any other; their masters are fp32.",
        mark=AUTO_IS_A_WORD,
    )
    early_rounding: Boolean | None = key(
        None,
        "Round as early as DeepSpeed does: fp32 masters of cast weights start from the rounded "
        "weights, and a micro-batch's mean gradient is rounded to the accumulation dtype before "
        "it is added. false: masters start from the weights as given, and a sum is rounded "
        "once, which is closer to training in fp32. null is true under the name of DeepSpeed, "
        "whose numbers programs expect there, and false elsewhere. Hadal's own key.",
    )
