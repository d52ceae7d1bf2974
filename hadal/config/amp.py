"""`amp`: mixed precision by the levels of NVIDIA Apex, carried out by torch."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt
from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Section, key
from hadal.config.values import Boolean, DtypeName, Integer, Number, boolean_word

Flag = Annotated[Boolean, BeforeValidator(boolean_word)]


class Amp(Section):
    """Mixed precision by Apex's levels and keywords, carried out by torch.amp. At stage 0 only.

    O0 trains in fp32. O1 runs the forward pass under fp16 autocast. O2 casts weights, buffers and
    inputs to fp16, all but batch norm's, and keeps fp32 masters. O3 casts all and keeps no master.
    O1 and O2 scale the loss dynamically: from 2^16, doubled after 2000 updates without overflow,
    halved by each overflow. The other keys change a level's choices; null is the level's own.
    """

    switch: ClassVar[str | None] = "enabled"
    required: ClassVar[tuple[str, ...]] = ("enabled",)

    enabled: Boolean = key(
        False, "Train in mixed precision. Must be said; excludes fp16, bf16 and ZeRO."
    )
    opt_level: Literal["O0", "O1", "O2", "O3"] = key("O1", "What is fp16: see above.")
    cast_model_type: DtypeName | None = key(
        None,
        "Dtype that weights, buffers and inputs are cast to (also `torch.float16` and the like); "
        "null is fp32 at O0, no cast at O1, fp16 at O2 and O3.",
    )
    patch_torch_functions: Flag | None = key(
        None,
        "Run the forward pass under fp16 autocast; null is true at O1, else false. Excludes a cast "
        "of the model.",
    )
    keep_batchnorm_fp32: Flag | None = key(
        None,
        "Leave batch norm's weights and buffers in fp32 where the model is cast; null is true at "
        "O2, else false.",
    )
    master_weights: Flag | None = key(
        None,
        "Keep fp32 masters of weights that are cast; null is true at O2, else false. Moments are "
        "fp32 in any case.",
    )
    loss_scale: Literal["dynamic"] | Annotated[Number, Gt(0)] | None = key(
        None,
        '"dynamic", or a number that stays; null is "dynamic" at O1 and O2, 1 at O0 and O3. '
        "Updates that overflow are skipped where anything is fp16.",
    )
    min_loss_scale: Annotated[Number, Gt(0)] | None = key(
        None, "Floor of a dynamic scale; null is none."
    )
    max_loss_scale: Annotated[Number, Gt(0)] = key(16777216.0, "Ceiling of a dynamic scale (2^24).")
    cast_model_outputs: DtypeName | None = key(
        None,
        "Dtype that the floating-point tensors among the model's outputs are cast to; null is fp32 "
        "where inputs are cast, and leaves them otherwise.",
    )
    num_losses: Annotated[Integer, Ge(1)] = key(
        1,
        "Losses with a scale of their own. An engine scales all losses alike.",
        mark=NO_EFFECT,
    )
    verbosity: Integer = key(1, "Apex's own messages: there are none.", mark=NO_EFFECT)
