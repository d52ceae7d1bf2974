"""`weight_quantization`: weights held quantised at stage 3, for inference."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from hadal.config.section import Mark, Section, key, section
from hadal.config.values import Boolean, Integer, whole

_Bits: TypeAlias = Annotated[Literal[4, 8], BeforeValidator(whole)]


class GroupQuantization(Section):
    """Groups of a weight that share one scale."""

    num_bits: _Bits | None = key(None, "Bits of a weight.")
    group_size: Integer | None = key(None, "Elements that share a scale.", gt=0)
    group_dim: Integer | None = key(None, "Dimension that is cut into groups.")
    symmetric: Literal[False] | None = key(None, "Scales without an offset; not offered.")


class WeightQuantization(Section):
    """Weights held in fewer bits than they compute in."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(
        True, "Let the keys below act.", mark=Mark(status="not built yet", only=(True,))
    )
    num_bits: Integer = key(8, "Bits of a weight.", ge=1)
    q_type: Literal["symmetric", "asymmetric"] = key(
        "symmetric", "Scales without or with an offset."
    )
    q_groups: Integer = key(1, "Scales per weight.", ge=1)
    quantized_initialization: GroupQuantization = section(
        GroupQuantization, "Quantise while the model is built."
    )
    post_init_quant: dict[str, GroupQuantization] = key(
        {}, "Part of a module's name, and how its weights are quantised after loading."
    )
