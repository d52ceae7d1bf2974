"""`data_types`: dtypes that do not follow from fp16 or bf16."""

from typing import Literal

from hadal.config.section import AUTO_IS_A_WORD, Section, key
from hadal.config.values import Boolean, Dtype, Texts


class DataTypes(Section):
    """Dtypes of things that otherwise follow the model's precision."""

    grad_accum_dtype: Dtype | None = key(
        None,
        "Dtype in which micro-batches' gradients are summed, at every stage; null is the model's "
        "dtype. Gradients travel in it too, unless `communication_data_type` says otherwise.",
    )
    param_dtype: Dtype | None = key(
        None, "Dtype of the weights; where given it must be the one that fp16 or bf16 implies."
    )
    buffer_dtype: Dtype | None = key(
        None,
        "Dtype to which floating-point buffers are cast; null leaves them as they are given, so "
        "that a rotary embedding's frequencies stay exact. Only running statistics (of batch and "
        "instance norms) then take their module's dtype, as torch requires. Where a module adds a "
        "buffer to 16-bit values and hands the sum to a layer, give the model's dtype.",
    )
    keep_in_fp32_modules: Literal["auto"] | Texts = key(
        "auto",
        "Modules whose floating-point buffers are not cast but stay as they are given: regular "
        "expressions for one or more whole parts of a buffer's full name (`norm` matches "
        "`blocks.0.norm.mean`, not `layernorm.mean`). auto takes the model's own lists, "
        "`_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict`; [] is none. Parameters of "
        "these modules are cast like any other; their masters are fp32.",
        mark=AUTO_IS_A_WORD,
    )
    early_rounding: Boolean | None = key(
        None,
        "Round where DeepSpeed does: fp32 masters of weights that are cast start from the rounded "
        "weights, and a micro-batch's mean gradient is rounded to the dtype in which sums are kept "
        "before it is added. false: masters start from the weights as given, and a sum is rounded "
        "once; that is nearer to training in fp32. null is true under the name of DeepSpeed, whose "
        "numbers programs expect there, and false elsewhere. A key of Hadal's own.",
    )
