"""`torch_autocast`: running the forward pass under `torch.autocast`."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Spelled, Texts

_SPELLINGS = {
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
}
_Name: TypeAlias = Annotated[Literal["bf16", "fp16"], BeforeValidator(Spelled(_SPELLINGS))]


class TorchAutocast(Section):
    """Weights keep their dtype; operations that are safe at lower precision use it.

    Autocast covers the engine's forward only; a loss computed outside it is not covered. Autocast
    keeps its casts of weights from forward to backward, at stage 3 too: if memory is short, weights
    in bf16 or fp16 (sections `bf16`, `fp16`) take less.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(
        False,
        "Run the forward pass under `torch.autocast`, regardless of the caller's own autocast.",
    )
    dtype: _Name | None = key(
        None,
        "Precision of autocast: bf16 (also `bfloat16`, `torch.bfloat16`) or fp16 (also `half`, "
        "`float16`, `torch.float16`); null uses torch's choice for the device (bf16 on CPUs, "
        "fp16 on CUDA). With fp16 the loss is scaled, at every stage, with the numbers of "
        "section `fp16`, which need not be enabled.",
    )
    lower_precision_safe_modules: Texts | None = key(
        None,
        "Import paths of module classes whose parameters' gradients are sent in that dtype; "
        "other gradients are sent in their own. null means `torch.nn.Linear`, `Conv1d`, "
        "`Conv2d` and `Conv3d`. On an accelerator they are also summed in it; [] keeps sums in "
        "fp32. `communication_data_type`, if given, applies to all of them. Weights are "
        "gathered in their own dtype.",
    )
