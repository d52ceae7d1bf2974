"""`weight_quantization`: weights stored quantized at stage 3, for inference."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.section import Mark, Section, key, section
from hadal.config.values import Boolean, Integer, whole

_Bits: TypeAlias = Annotated[Literal[4, 8], BeforeValidator(whole)]


class GroupQuantization(Section):
    """Groups of a weight's elements that share one scale."""

    num_bits: _Bits | None = key(None, "Bits per weight.")
    group_size: Integer | None = key(None, "Elements that share a scale.", gt=0)
    group_dim: Integer | None = key(None, "Dimension that is split into groups.")
    symmetric: Literal[False] | None = key(None, "Scales without an offset; not available.")


class WeightQuantization(Section):
    """Weights stored in fewer bits than they compute in."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(
        True, "Enable the keys below.", mark=Mark(status="not built yet", only=(True,))
    )
    num_bits: Integer = key(8, "Bits per weight.", ge=1)
    q_type: Literal["symmetric", "asymmetric"] = key(
        "symmetric", "Scales without (symmetric) or with an offset (asymmetric)."
    )
    q_groups: Integer = key(1, "Scales per weight.", ge=1)
    quantized_initialization: GroupQuantization = section(
        GroupQuantization, "Quantize while the model is built."
    )
    post_init_quant: dict[str, GroupQuantization] = key(
        {}, "Maps part of a module's name to the quantization of its weights after loading."
    )
