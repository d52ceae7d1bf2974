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
    """Weights stay in their dtype; operations that are safe at lower precision use it.

    Only what runs inside the engine's forward is under autocast; a loss that is computed outside it
    is not. Autocast keeps its casts of weights from forward to backward, at stage 3 too: where
    memory is short, weights in bf16 or fp16 (sections `bf16`, `fp16`) need less.
    """

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(
        False,
        "Run the forward pass under `torch.autocast`, whatever autocast the caller has set.",
    )
    dtype: _Name | None = key(
        None,
        "Precision of autocast: bf16 (also `bfloat16`, `torch.bfloat16`) or fp16 (also `half`, "
        "`float16`, `torch.float16`); null takes torch's choice for the device (bf16 on CPUs, fp16 "
        "on CUDA). Under fp16 the loss is scaled, at every stage, as section `fp16` says by its "
        "numbers; it need not be enabled.",
    )
    lower_precision_safe_modules: Texts | None = key(
        None,
        "Import paths of module classes whose parameters' gradients travel in that dtype, others' "
        "in their own; null means `torch.nn.Linear`, `Conv1d`, `Conv2d` and `Conv3d`. On an "
        "accelerator they are added up in it too; [] keeps sums in fp32. Where "
        "`communication_data_type` is given, all travel in that. Weights are gathered in their own "
        "dtype.",
    )
