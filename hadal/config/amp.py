"""`amp`: NVIDIA Apex automatic mixed precision."""

from typing import ClassVar, Literal

from pydantic import ConfigDict

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean


class Amp(Section):
    """Apex mixed precision; every key but `enabled` is handed to `apex.amp.initialize`."""

    switch: ClassVar[str | None] = "enabled"
    required: ClassVar[tuple[str, ...]] = ("enabled",)
    model_config = ConfigDict(extra="allow")

    enabled: Boolean = key(
        False, "Train under Apex. Must be said; excludes fp16, bf16 and ZeRO.", mark=UNBUILT
    )
    opt_level: Literal["O0", "O1", "O2", "O3"] = key("O1", "Apex's optimisation level.")
