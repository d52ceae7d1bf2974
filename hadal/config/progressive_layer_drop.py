"""`progressive_layer_drop`: skipping layers more and more often during training."""

from typing import ClassVar

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Number


class ProgressiveLayerDrop(Section):
    """Passes the model a keep probability that falls from 1 to theta."""

    switch: ClassVar[str | None] = "enabled"
    required: ClassVar[tuple[str, ...]] = ("enabled",)

    enabled: Boolean = key(False, "Skip layers. Required.")
    theta: Number | None = key(None, "Final keep probability. Required.", gt=0, le=1)
    gamma: Number | None = key(None, "Rate of the decrease, per update. Required.", gt=0)
