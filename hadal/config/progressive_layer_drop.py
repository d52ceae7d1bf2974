"""`progressive_layer_drop`: skipping layers more often while training goes on."""

from typing import ClassVar

from hadal.config.section import UNBUILT, Section, key
from hadal.config.values import Boolean, Number


class ProgressiveLayerDrop(Section):
    """Hands the model a keep probability that falls from 1 to theta."""

    switch: ClassVar[str | None] = "enabled"
    required: ClassVar[tuple[str, ...]] = ("enabled",)

    enabled: Boolean = key(False, "Skip layers. Must be said.", mark=UNBUILT)
    theta: Number | None = key(None, "Keep probability in the end. Must be said.", gt=0, le=1)
    gamma: Number | None = key(None, "Speed of the fall, per update. Must be said.", gt=0)
