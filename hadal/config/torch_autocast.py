"""`torch_autocast`: running the forward pass under `torch.autocast`."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.section import UNBUILT, Section, key
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
    """Weights stay in their dtype; operations that are safe at lower precision use it."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Run the forward pass under autocast.", mark=UNBUILT)
    dtype: _Name | None = key(
        None,
        "Precision of autocast: bf16 (also `bfloat16`, `torch.bfloat16`) or fp16 (also `half`, "
        "`float16`, `torch.float16`); null takes torch's choice for the device.",
    )
    lower_precision_safe_modules: Texts | None = key(
        None,
        "Import paths of module classes whose gradients and parameters may travel in that dtype; "
        "null means linear layers and convolutions.",
    )
