"""`amp`: mixed precision with NVIDIA Apex's levels, implemented with torch."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt
from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Section, key
from hadal.config.values import Boolean, DtypeName, Integer, Number, boolean_word

Flag = Annotated[Boolean, BeforeValidator(boolean_word)]


class Amp(Section):
    """Mixed precision with Apex's levels and keywords, implemented with torch.amp. Stage 0 only.

    O0 trains in fp32. O1 runs the forward pass under fp16 autocast. O2 casts weights, buffers and
    inputs to fp16, except those of batch norm, and keeps fp32 masters. O3 casts everything and
    keeps no masters. O1 and O2 scale the loss dynamically: the scale starts at 2^16, doubles after
    2000 updates without overflow and halves at each overflow. The other keys override a level's
    choices; null keeps the level's own.
    """

    switch: ClassVar[str | None] = "enabled"
    required: ClassVar[tuple[str, ...]] = ("enabled",)

    enabled: Boolean = key(
        False, "Train in mixed precision. Required; excludes fp16, bf16 and ZeRO."
    )
    opt_level: Literal["O0", "O1", "O2", "O3"] = key("O1", "Apex's level; see above.")
    cast_model_type: DtypeName | None = key(
        None,
        "Dtype to cast weights, buffers and inputs to (`torch.float16` and the like are "
        "accepted too); null is fp32 at O0, no cast at O1, fp16 at O2 and O3.",
    )
    patch_torch_functions: Flag | None = key(
        None,
        "Run the forward pass under fp16 autocast; null is true at O1 and false elsewhere. "
        "Cannot be combined with casting the model.",
    )
    keep_batchnorm_fp32: Flag | None = key(
        None,
        "Keep batch norm's weights and buffers in fp32 when the model is cast; null is true at "
        "O2 and false elsewhere.",
    )
    master_weights: Flag | None = key(
        None,
        "Keep fp32 masters of cast weights; null is true at O2 and false elsewhere. Moments are "
        "fp32 in any case.",
    )
    loss_scale: Literal["dynamic"] | Annotated[Number, Gt(0)] | None = key(
        None,
        '"dynamic", or a fixed number; null is "dynamic" at O1 and O2, 1 at O0 and O3. Updates '
        "that overflow are skipped if anything is fp16.",
    )
    min_loss_scale: Annotated[Number, Gt(0)] | None = key(
        None, "Lower bound of a dynamic scale; null sets none."
    )
    max_loss_scale: Annotated[Number, Gt(0)] = key(
        16777216.0, "Upper bound of a dynamic scale (2^24)."
    )
    cast_model_outputs: DtypeName | None = key(
        None,
        "Dtype to cast the model's floating-point output tensors to; null is fp32 when inputs "
        "are cast, and no cast otherwise.",
    )
    num_losses: Annotated[Integer, Ge(1)] = key(
        1,
        "Number of losses with a scale of their own. An engine uses one scale for all losses.",
        mark=NO_EFFECT,
    )
    verbosity: Integer = key(1, "Verbosity of Apex's messages. There are none.", mark=NO_EFFECT)
